"""Keeps an engine registered with the queue: its heartbeats, its leases, and the recovery of dead engines' jobs."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from millrace.results.counts import QueueStats
from millrace.results.errors import InvalidRedisURL, QueueError, RedisUnavailable, ServerUnsuitable
from millrace.results.messages import Claim, EngineId, JobId, Lease, Reconciliation
from millrace.results.outage import Outage
from millrace.results.queue import JobQueue

logger = logging.getLogger("millrace.engine")

_RECOVER_AT_ONCE = 256
_STOP_S = 3.0


def new_engine_id() -> EngineId:
    """Return the id of one run of an engine: host, process, and a random part that makes it unique."""
    return EngineId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


class Leases:
    """Owns the table of this engine's leases, and the thread that sends its heartbeats.

    Calls to Redis never overlap. Otherwise a heartbeat could meet a lease that the reply of a claim has not yet put into the
    table, and give the job back. The engine loop only drops leases, and waits for no call.
    """

    def __init__(
        self,
        queue: JobQueue,
        engine_id: EngineId,
        ttl_s: float,
        *,
        pending: Callable[[], dict[JobId, Lease]],
        on_news: Callable[[Reconciliation], None],
        sleep_level: Callable[[], int],
        model: str = "",
        outage: Outage | None = None,
    ) -> None:
        """`pending` returns the leases whose last writes are not in Redis yet. `on_news` is called with what each heartbeat
        returns. `sleep_level` returns the level that heartbeats report, and `model` is the name that they report."""
        self.engine_id = engine_id
        self._queue = queue
        self._ttl_ms = int(ttl_s * 1000)
        self._pending = pending
        self._on_news = on_news
        self._sleep_level = sleep_level
        self._model = model
        self._outage = outage or Outage()
        self.queue_stats: QueueStats | None = None
        """As of the last heartbeat."""
        self._other_models: Collection[str] = ()
        """Those that other engines of the queue serve, as of the last heartbeat."""
        self._held: dict[JobId, Lease] = {}
        self._table = threading.Lock()
        """Guards `_held`."""
        self._calls = threading.Lock()
        """Held during a call."""
        self._stopping = threading.Event()
        self._beat_now = threading.Event()
        """Ends the wait for the next heartbeat."""
        self._beat_at_s = self._next_beat_s = time.monotonic()
        self._recover_from_s = 0.0
        self._num_checked = 0
        """Of the outages that have ended: those after which the server's settings were checked."""
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Register with the queue and stay registered. During an outage of Redis, register after it. Raises `QueueError` if
        Redis refuses the first heartbeat."""
        try:
            self._next_beat_s = self._next_beat_after(self._beat())
        except RedisUnavailable as error:
            if not error.is_outage:
                raise
            logger.warning("cannot register with the queue yet: %s", error)
            self._next_beat_s = time.monotonic() + self._ttl_ms / 4000
        self.thread.start()

    def stop(self, *, deregisters: bool = True) -> None:
        """End the heartbeats and deregister the engine."""
        self._stopping.set()
        self._beat_now.set()
        self.thread.join(_STOP_S)
        if not deregisters:
            return
        try:
            self._queue.deregister(self.engine_id)
        except QueueError as error:
            logger.warning("could not deregister: %s; the heartbeat will expire", error)

    def beat_soon(self) -> None:
        """Send the next heartbeat now."""
        self._beat_now.set()

    def unhealthy_reason(self, now_s: float) -> str | None:
        """Return in one line that other engines may take this engine's jobs, or that a thread has not been able to use Redis
        for as long; None while all is well. Never blocks."""
        silence_s, limit_s = now_s - self._beat_at_s, self._ttl_ms / 1000
        if silence_s > limit_s:
            return f"Redis has not taken a heartbeat for {silence_s:.1f} s, the limit is {limit_s:g} s"
        outage_s, reason = self._outage.longest()
        return reason if outage_s > limit_s else None

    @property
    def outage_s(self) -> float:
        """For how many seconds a thread of this engine has not been able to use Redis."""
        return self._outage.longest()[0]

    def claim(
        self,
        claim_id: str,
        max_jobs: int,
        kv_token_budget: int,
        fingerprint: str,
        cached_prompts: Sequence[str] = (),
        *,
        is_fair: bool = True,
    ) -> Claim:
        """Claim jobs and put their leases into the table. A repeated claim id returns the same jobs. `is_fair`: see
        `JobQueue.claim`."""
        with self._calls:
            attempt = partial(
                self._queue.claim,
                self.engine_id,
                claim_id,
                max_jobs=max_jobs,
                kv_token_budget=kv_token_budget,
                num_held=len(self._held),
                fingerprint=fingerprint,
                calls_begin=True,
                cached_prompts=cached_prompts,
                is_fair=is_fair,
            )
            claim = attempt()
            if claim is None:  # the heartbeat has expired, perhaps in a long pause
                self._heartbeat()
                claim = attempt() or Claim(jobs=[], num_ready=0, num_set_aside=0)
            with self._table:
                self._held.update((job.job_id, job.lease) for job in claim.jobs)
            return claim

    def holds(self, job_id: JobId) -> bool:
        """Return whether the table has a lease of this job."""
        with self._table:
            return job_id in self._held

    def wait_for_claim(self) -> None:
        """Wait until the leases of a claim that runs now are in the table."""
        with self._calls:
            pass

    def drop(self, job_id: JobId, lease: Lease) -> None:
        """Forget a lease: its last write is pending, or another engine has the job."""
        with self._table:
            if self._held.get(job_id) == lease:
                del self._held[job_id]

    def _run(self) -> None:
        while True:
            self._beat_now.wait(max(0.0, self._next_beat_s - time.monotonic()))
            if self._stopping.is_set():
                return
            self._beat_now.clear()
            self._next_beat_s = time.monotonic() + self._ttl_ms / 4000
            try:
                self._next_beat_s = self._next_beat_after(self._beat())
                if time.monotonic() >= self._recover_from_s:
                    self._recover()
                with self._calls:
                    self.queue_stats = stats = self._queue.stats()
                self._warn_of_other_models(stats.models)
                self._outage.note_success()
                self._check_server()
            except QueueError as error:
                self._outage.note_failure(error)
            except Exception:  # our bug: without heartbeats this engine would lose all its jobs
                logger.exception("heartbeat failed")

    def _next_beat_after(self, news: Reconciliation) -> float:
        """Return when the next heartbeat is due. It is early if the heartbeat of another engine may expire before, so that
        the jobs of a dead engine are recovered within the limit, and if the next delay or deadline is over before."""
        return time.monotonic() + min(self._ttl_ms / 4, news.next_beat_ms + 1) / 1000

    def _warn_of_other_models(self, models: Mapping[str, str]) -> None:
        """Log each model that another engine of the queue begins to serve. `models`: by engine."""
        others = {model: engine for engine, model in models.items() if model and model != self._model}
        for model in others.keys() - self._other_models:
            rule = "a job that names no model goes to either, so give each model a queue of its own"
            logger.warning("engine %s of this queue serves %s and not %s: %s", others[model], model, self._model, rule)
        self._other_models = others.keys()

    def _check_server(self) -> None:
        """Log after an outage what is wrong with the server: it may be another one, or have other settings."""
        num_ended = self._outage.num_ended
        if num_ended == self._num_checked:
            return
        try:
            with self._calls:
                self._queue.check_server()
        except (ServerUnsuitable, InvalidRedisURL) as error:
            logger.error("%s", error)
        self._num_checked = num_ended

    def _recover(self) -> None:
        num_jobs = _RECOVER_AT_ONCE
        while num_jobs == _RECOVER_AT_ONCE:
            with self._calls:  # a call at the same time would need a second connection, which a full server refuses
                recoveries = self._queue.recover(_RECOVER_AT_ONCE)
            num_jobs = sum(one.num_jobs for one in recoveries)
            for one in recoveries:
                logger.warning("recovered %d jobs of engine %s, which has no heartbeat", one.num_jobs, one.engine_id)
                for job_id in one.failed:
                    logger.warning("job %s failed: crashed: too many engines have died with it", job_id)

    def _beat(self) -> Reconciliation:
        with self._calls:
            news = self._heartbeat()
            with self._table:
                num_lost = sum(self._held.pop(job_id, None) is not None for job_id in news.lost)
                has_lost_all = num_lost > 0 and not self._held
            if has_lost_all and time.monotonic() >= self._recover_from_s:  # no other engine can have taken them
                cause = "was it emptied, or restarted without its last data?"
                logger.error("Redis has none of the leases of this engine any more (%d jobs): %s", num_lost, cause)
            self._on_news(news)  # before the next claim can bring one of them back
            return news

    def _heartbeat(self) -> Reconciliation:
        with self._table:
            held = dict(self._held)  # before `pending`: a job leaves the table only after its last write is pending
        held = {**self._pending(), **held}
        news = self._queue.heartbeat(self.engine_id, self._ttl_ms, held, self._sleep_level(), self._model)
        self._record_beat(time.monotonic())
        return news

    def _record_beat(self, now_s: float) -> None:
        """Put off recovery if the last heartbeat had expired. Perhaps Redis was not reachable: then the heartbeats of the
        other engines have expired too, and they need time to send new ones."""
        if now_s - self._beat_at_s > self._ttl_ms / 1000:
            self._recover_from_s = now_s + self._ttl_ms / 1000
        self._beat_at_s = now_s
