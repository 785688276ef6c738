"""The engine service: what the intake claims, the engine computes, and the output writes back."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterable
from typing import Literal

from millrace.engine_service.core.sequence import StopReason
from millrace.engine_service.engine import Engine, Progress
from millrace.engine_service.errors import EngineDead, EngineError, WorkersLost
from millrace.engine_service.serving.capacity import Capacity
from millrace.engine_service.serving.job_metrics import JobMetrics, JobRecorder, Outcome
from millrace.engine_service.serving.jobs import (
    Abort,
    Arrived,
    Deferred,
    EngineEvent,
    Lost,
    Refused,
    ServedJob,
    SetSleepLevel,
    Watch,
    is_alone,
)
from millrace.engine_service.serving.output import DEFER_MS, Output
from millrace.engine_service.worker_group import TOO_LARGE
from millrace.executor.wire.messages import SeqId
from millrace.results.messages import ClaimedJob, JobError, JobId, Lease, Reconciliation
from millrace.results.writer import Writer

logger = logging.getLogger("millrace.engine")

_IDLE_S = 1.0
_FULL_WRITER_S = 0.1


class Service:
    """Owns the jobs that this engine runs. Its loop is the only thread that touches the engine."""

    def __init__(
        self,
        engine: Engine,
        capacity: Capacity,
        output: Output,
        writer: Writer,
        *,
        on_over: Callable[[JobId, Lease], None],
        on_sleep_change: Callable[[], None],
    ) -> None:
        """`on_over` hears of every lease that this engine is through with; `on_sleep_change`, when it fell asleep or woke
        up."""
        self._engine = engine
        self._capacity = capacity
        self._output = output
        self._writer = writer
        self._on_over = on_over
        self._on_sleep_change = on_sleep_change
        self._jobs: dict[JobId, ServedJob] = {}
        self._by_sequence: dict[SeqId, ServedJob] = {}
        self._recorder = JobRecorder()
        self._events: queue.SimpleQueue[EngineEvent | None] = queue.SimpleQueue()
        self._is_draining = self._is_hurrying = False

    def __repr__(self) -> str:
        return f"Service({len(self._jobs)} jobs, {self._engine})"

    # --- other threads ---

    def post(self, event: EngineEvent) -> None:
        """Have the loop deal with this before its next step."""
        self._events.put(event)

    def post_reconciliation(self, news: Reconciliation) -> None:
        """What a heartbeat has found out."""
        for job_id in news.lost:
            self.post(Lost(job_id))
        for job_id in news.cancelled:
            self.post(Abort(job_id, "cancelled"))
        for job_id in news.expired:
            self.post(Abort(job_id, "expired"))
        for job_id in news.watched:
            self.post(Watch(job_id))
        self.post(SetSleepLevel(news.sleep_level))

    def metrics(self) -> JobMetrics:
        """Asks nobody and never blocks."""
        return self._recorder.metrics(num_open=len(self._jobs))

    def drain(self) -> None:
        """Finish what runs and take nothing new; the second time, do not even finish. For signal handlers too, which is
        why no lock is taken."""
        self._is_hurrying = self._is_draining
        self._is_draining = True
        self._engine.begin_drain()
        self._events.put(None)  # wakes an idle loop

    # --- the loop ---

    def serve(self) -> None:
        """Until `drain`: the engine loop."""
        while not self._is_draining:
            self._turn()

    def finish_running(self, grace_s: float) -> None:
        """Release what has not started, and give the rest this long to finish."""
        deadline_s = time.monotonic() + grace_s
        self._listen()
        self._release(job for job in list(self._jobs.values()) if job.generation.sequence.num_computed == 0)
        while self._jobs and not self._is_hurrying and time.monotonic() < deadline_s:
            self._turn()

    def release_all(self) -> None:
        """Whatever is left goes back to the queue with its tokens so far; also after the engine has died."""
        self._is_draining = True
        self._handle(self._drain_events(wait_s=None))
        self._release(list(self._jobs.values()))

    def _turn(self) -> None:
        try:
            self._listen()
            self._step()
        except WorkersLost as error:  # computing, or waking up
            logger.warning("%s; what they were doing is released", error)
            self._is_hurrying = True

    def _step(self) -> None:
        if self._writer.is_full:  # Redis is slow or away: computing more would only pile up here
            self._writer.flush(_FULL_WRITER_S)
            return
        if not self._engine.has_work:
            return
        progress = self._engine.step()
        now_s = time.monotonic()
        for one in progress:
            self._apply(one, now_s)
        self._update_capacity()

    def _apply(self, progress: Progress, now_s: float) -> None:
        job = self._by_sequence[progress.generation.sequence.seq_id]
        if progress.failure is not None and progress.failure.kind == TOO_LARGE:
            self._output.release(job, DEFER_MS)  # for an engine that has all its ranks, or for this one when it has
            self._forget(job, "released")
        elif progress.failure is not None:
            self._output.fail(job, JobError(kind=progress.failure.kind, message=progress.failure.message))
            self._forget(job, "failed")
        elif progress.finish_reason is not None:
            self._finish(job, progress.finish_reason)
        else:
            self._output.advance(job, now_s)

    def _finish(self, job: ServedJob, reason: StopReason) -> None:
        self._output.finish(job, reason)
        self._forget(job, "finished")

    # --- events ---

    def _listen(self) -> None:
        """Take in what the other threads have to say; with nothing to compute, wait for it, and look after the workers."""
        is_idle = not self._engine.has_work and not self._is_draining
        self._handle(self._drain_events(_IDLE_S if is_idle else None))
        if is_idle and not self._engine.has_work:
            self._engine.check_workers()

    def _drain_events(self, wait_s: float | None) -> Iterable[EngineEvent | None]:
        """What has been said, after waiting for so long for the first event."""
        with contextlib.suppress(queue.Empty):
            if wait_s is not None:
                yield self._events.get(timeout=wait_s)
            while True:
                yield self._events.get_nowait()

    def _handle(self, events: Iterable[EngineEvent | None]) -> None:
        for event in events:
            match event:
                case Arrived(job) if self._capacity.is_shut:  # claimed on the way into sleep
                    self._hand_back(job)
                case Arrived(job):
                    self._start(job)
                case Refused(claimed, error):
                    self._output.refuse(claimed, error)
                    self._turn_away(claimed, "failed")
                case Deferred(claimed):
                    self._output.defer(claimed)
                    self._turn_away(claimed, "released")
                case Abort(job_id, state):
                    self._abort(job_id, state)
                case Watch(job_id):
                    self._watch(job_id)
                case Lost(job_id, lease):
                    self._lose(job_id, lease)
                case SetSleepLevel(level) if not self._is_draining:
                    self._set_sleep_level(level)

    def _start(self, job: ServedJob) -> None:
        self._lose(job.job_id, lease=None)  # an older lease of the same job, if its loss has not been told yet
        self._capacity.arrive(job.cost)
        self._jobs[job.job_id] = job
        self._by_sequence[job.generation.sequence.seq_id] = job
        job.arrived_s = job.saved_at_s = time.monotonic()
        reason = job.generation.finish_reason
        if reason is not None:  # the checkpoint was already the whole output
            self._finish(job, reason)
        elif job.is_alone and not self._has_begun(job):
            self._release([job])
        else:
            self._engine.add(job.generation)

    def _has_begun(self, job: ServedJob) -> bool:
        """Have it in Redis that a job that engines have died with begins: from then on this one's death counts against it.

        Such a job runs alone, so while Redis is away there is nothing else to do. False: told to drain before that.
        """
        if self._is_draining:
            return False
        if not self._engine.has_work:
            self._engine.check_workers()  # before it begins: what happens while they start again is not its doing
        self._output.begin(job)
        while not self._is_draining:
            if self._writer.flush(_FULL_WRITER_S):
                return True
        return False

    def _turn_away(self, claimed: ClaimedJob, outcome: Outcome) -> None:
        self._recorder.count(outcome)
        self._capacity.arrive(claimed.cost)
        self._capacity.close(is_alone=is_alone(claimed))
        self._on_over(claimed.job_id, claimed.lease)

    def _abort(self, job_id: JobId, state: Literal["cancelled", "expired"]) -> None:
        job = self._jobs.get(job_id)
        if job is not None:
            self._engine.abort(job.generation)
            self._output.abort(job, state)
            self._forget(job, state)

    def _watch(self, job_id: JobId) -> None:
        job = self._jobs.get(job_id)
        if job is not None and not job.is_watched:
            job.is_watched = True
            self._output.advance(job, time.monotonic())

    def _lose(self, job_id: JobId, lease: int | None) -> None:
        job = self._jobs.get(job_id)
        if job is not None and lease in (None, job.lease):
            logger.warning("job %s is not ours any more", job_id)
            self._engine.abort(job.generation)
            self._forget(job, "lost")

    def _release(self, jobs: Iterable[ServedJob]) -> None:
        for job in jobs:
            self._engine.abort(job.generation)
            self._output.release(job)
            self._forget(job, "released")

    def _hand_back(self, job: ServedJob) -> None:
        self._recorder.count("released")
        self._output.release(job)
        self._capacity.arrive(job.cost)
        self._capacity.close(is_alone=job.is_alone)
        self._on_over(job.job_id, job.lease)

    # --- sleep ---

    def _set_sleep_level(self, level: int) -> None:
        """Sleep as deep as this, or be awake; mostly it is so already. What fails is tried again at the next heartbeat."""
        if level > self._engine.sleep_level:
            self._fall_asleep(level)
        elif level == 0 and self._capacity.is_shut:
            self._wake_up()

    def _fall_asleep(self, level: int) -> None:
        self._capacity.shut(True)
        self._release(list(self._jobs.values()))
        try:
            self._engine.sleep(level)
        except (EngineDead, WorkersLost):
            raise
        except EngineError as error:
            logger.error("%s; trying again", error)
            return
        logger.info("asleep, level %d; jobs wait, or go to other engines", level)
        self._on_sleep_change()

    def _wake_up(self) -> None:
        self._engine.wake_up()
        self._capacity.shut(False)
        self._update_capacity()
        logger.info("awake")
        self._on_sleep_change()

    # --- bookkeeping ---

    def _forget(self, job: ServedJob, outcome: Outcome) -> None:
        self._recorder.count(outcome, time.monotonic() - job.arrived_s)
        del self._jobs[job.job_id]
        del self._by_sequence[job.generation.sequence.seq_id]
        self._capacity.close(is_alone=job.is_alone)
        self._on_over(job.job_id, job.lease)

    def _update_capacity(self) -> None:
        self._capacity.update(self._engine.scheduler.free_tokens)
