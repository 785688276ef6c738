"""The engine's life as the queue sees it: heartbeats, the leases that it holds, and the recovery of dead engines' jobs."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from millrace.results.errors import QueueError
from millrace.results.messages import Claim, EngineId, JobId, Lease, Reconciliation
from millrace.results.queue import JobQueue

logger = logging.getLogger("millrace.engine")

_RECOVER_AT_ONCE = 256
_STOP_S = 3.0


def new_engine_id() -> EngineId:
    """One incarnation of an engine: where it runs, and something that no other incarnation has."""
    return EngineId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


class Leases:
    """Owns the table of leases that this engine holds, and the thread that keeps them alive.

    Its calls never overlap: else a heartbeat could find a lease that a claim's reply has not yet put into the table, and
    give the job away. The engine loop, which only drops leases, waits for none of them.
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
    ) -> None:
        """`pending` names the jobs whose last writes are still on their way; `on_news` hears what heartbeats find out;
        `sleep_level` is what they say of the engine."""
        self.engine_id = engine_id
        self._queue = queue
        self._ttl_ms = int(ttl_s * 1000)
        self._pending = pending
        self._on_news = on_news
        self._sleep_level = sleep_level
        self._held: dict[JobId, Lease] = {}
        self._table = threading.Lock()
        """Guards `_held`."""
        self._calls = threading.Lock()
        """Held during a call."""
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        """Ends the wait for the next heartbeat."""
        self._beat_at_s = self._next_beat_s = time.monotonic()
        self._recover_from_s = 0.0
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __repr__(self) -> str:
        return f"Leases({self.engine_id}, {len(self._held)} held)"

    def start(self) -> None:
        """Register with the queue and keep registered. Raises `QueueError` when the first heartbeat fails."""
        self._next_beat_s = self._time_after(self._beat())
        self.thread.start()

    def stop(self) -> None:
        """No more heartbeats; the engine is off the list when nothing is held."""
        self._stopping.set()
        self._hurry.set()
        self.thread.join(_STOP_S)
        try:
            self._queue.deregister(self.engine_id)
        except QueueError as error:
            logger.warning("could not sign off: %s; the heartbeat will expire", error)

    def beat_soon(self) -> None:
        """Send the next heartbeat now."""
        self._hurry.set()

    def unhealthy_reason(self, now_s: float) -> str | None:
        """Whether other engines may take this one's jobs by now, in one line; None when they may not. Never blocks."""
        silence_s = now_s - self._beat_at_s
        if silence_s <= self._ttl_ms / 1000:
            return None
        return f"Redis has not taken a heartbeat for {silence_s:.1f} s, the limit is {self._ttl_ms / 1000:g} s"

    def claim(self, claim_id: str, max_jobs: int, kv_token_budget: int, fingerprint: str) -> Claim:
        """Claim and take into the table. A repeated claim id returns what the first one got."""
        with self._calls:
            claim = self._claim(claim_id, max_jobs, kv_token_budget, fingerprint)
            if claim is None:  # the heartbeat has lapsed, in a long pause perhaps
                self._heartbeat()
                claim = self._claim(claim_id, max_jobs, kv_token_budget, fingerprint)
            jobs = claim.jobs if claim is not None else []
            with self._table:
                self._held.update((job.job_id, job.lease) for job in jobs)
            return claim or Claim(jobs=[], num_ready=0, num_set_aside=0)

    def drop(self, job_id: JobId, lease: Lease) -> None:
        """The engine is through with this lease: its last write is on its way, or it is another engine's."""
        with self._table:
            if self._held.get(job_id) == lease:
                del self._held[job_id]

    def _claim(self, claim_id: str, max_jobs: int, kv_token_budget: int, fingerprint: str) -> Claim | None:
        return self._queue.claim(
            self.engine_id,
            claim_id,
            max_jobs=max_jobs,
            kv_token_budget=kv_token_budget,
            num_held=len(self._held),
            fingerprint=fingerprint,
            calls_begin=True,
        )

    def _run(self) -> None:
        while True:
            self._hurry.wait(max(0.0, self._next_beat_s - time.monotonic()))
            if self._stopping.is_set():
                return
            self._hurry.clear()
            self._next_beat_s = time.monotonic() + self._ttl_ms / 4000
            try:
                self._next_beat_s = self._time_after(self._beat())
                if time.monotonic() >= self._recover_from_s:
                    self._recover()
            except QueueError as error:
                logger.warning("heartbeat failed: %s", error)
            except Exception:  # our bug: without heartbeats all jobs of this engine would be another one's
                logger.exception("heartbeat failed")

    def _time_after(self, news: Reconciliation) -> float:
        """When the heartbeat after this one is due. Whoever looks when an engine's time is over has its jobs back within the
        limit, not some time after it."""
        return time.monotonic() + min(self._ttl_ms / 4, news.next_lapse_ms + 1) / 1000

    def _recover(self) -> None:
        recovered = _RECOVER_AT_ONCE
        while recovered == _RECOVER_AT_ONCE:
            with self._calls:  # a claim at the same time would need a second connection, which a full server refuses
                recovered = self._queue.recover(_RECOVER_AT_ONCE)
            if recovered:
                logger.warning("recovered %d jobs of dead engines", recovered)

    def _beat(self) -> Reconciliation:
        with self._calls:
            news = self._heartbeat()
            with self._table:
                for job_id in news.lost:
                    self._held.pop(job_id, None)
            self._on_news(news)  # before the next claim can bring one of them back
            return news

    def _heartbeat(self) -> Reconciliation:
        with self._table:
            held = dict(self._held)  # before `pending`: a job leaves the table only after its last write is pending
        held = {**self._pending(), **held}
        news = self._queue.heartbeat(self.engine_id, self._ttl_ms, held, self._sleep_level())
        self._note_beat(time.monotonic())
        return news

    def _note_beat(self, now_s: float) -> None:
        """One that comes after the last has lapsed shows that Redis was away, or this engine. If Redis, then the others'
        have lapsed as well though nobody is dead: they get the time to come back before their jobs are taken."""
        if now_s - self._beat_at_s > self._ttl_ms / 1000:
            self._recover_from_s = now_s + self._ttl_ms / 1000
        self._beat_at_s = now_s
