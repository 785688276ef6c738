"""The engine loop of a service: it runs the claimed jobs on the engine and writes their output."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterable
from typing import Literal

from millrace.engine_service.engine import Engine, Progress
from millrace.engine_service.errors import EngineDead, EngineError, WorkersLost
from millrace.engine_service.serving.capacity import Capacity
from millrace.engine_service.serving.job_table import JobMetrics, JobTable
from millrace.engine_service.serving.jobs import (
    Abort,
    Arrived,
    Deferred,
    EngineEvent,
    Lost,
    PendingJob,
    Prepared,
    Refused,
    ResetCache,
    ServedJob,
    SetSleepLevel,
    Watch,
)
from millrace.engine_service.serving.output import DEFER_MS, SAVE_EVERY_STEPS, Output
from millrace.engine_service.serving.prefixes import CachedPrefixes
from millrace.engine_service.worker_group import TOO_LARGE, SequenceFailure
from millrace.results.messages import JobError, JobId, Lease, Reconciliation
from millrace.results.writer import Writer

logger = logging.getLogger("millrace.engine")

_IDLE_S = 1.0
_FULL_WRITER_S = 0.1
_DRAIN_REPORT_S = 5.0
_SAVE_EVERY_S = 0.1
"""How often the jobs that nobody reads are looked at, or every `SAVE_EVERY_STEPS` steps."""


class Service:
    """Owns the engine loop. The thread of the loop is the only one that uses the engine."""

    def __init__(
        self,
        engine: Engine,
        capacity: Capacity,
        output: Output,
        writer: Writer,
        *,
        prefixes: CachedPrefixes | None = None,
        is_held: Callable[[JobId], bool],
        on_over: Callable[[JobId, Lease], None],
        on_sleep_change: Callable[[], None],
    ) -> None:
        """`is_held` tells whether this engine has a lease of a job. `on_over` is called with each lease that it needs no
        longer, `on_sleep_change` after it has fallen asleep or woken up. `prefixes` gets the prompts of the jobs that start.
        """
        self._engine = engine
        self._capacity = capacity
        self._output = output
        self._writer = writer
        self._prefixes = prefixes
        self._on_sleep_change = on_sleep_change
        self._on_over = on_over
        self._is_held = is_held
        self._jobs = JobTable(capacity, self._forget)
        self._early: dict[JobId, Abort | Watch] = {}
        """What came for jobs that are on their way from the claim to this loop."""
        self._events: queue.SimpleQueue[EngineEvent | None] = queue.SimpleQueue()
        self._is_drain_urgent = False
        self._lost: list[JobId] = []
        """Jobs that other engines have taken, for the log."""
        self._num_unsaved_steps = 0
        self._saved_at_s = 0.0
        self._reset_number = 0
        """Number of the last reset of the prefix cache."""

    # --- for other threads ---

    def post(self, event: EngineEvent) -> None:
        """Queue an event. The loop handles it before its next step."""
        self._events.put(event)

    def post_reconciliation(self, news: Reconciliation) -> None:
        """Queue the events that a heartbeat has returned."""
        for job_id in news.lost:
            self.post(Lost(job_id))
        for job_id in news.cancelled:
            self.post(Abort(job_id, "cancelled"))
        for job_id in news.expired:
            self.post(Abort(job_id, "expired"))
        for job_id in news.watched:
            self.post(Watch(job_id))
        self.post(SetSleepLevel(news.sleep_level))
        self.post(ResetCache(news.reset_number))

    def metrics(self) -> JobMetrics:
        """Return the figures of the jobs. Never blocks."""
        return self._jobs.metrics()

    @property
    def unwritten_bytes(self) -> int:
        """About how many bytes of results wait to be written to Redis. Never blocks."""
        return self._writer.pending_bytes

    def drain(self) -> None:
        """Finish the running jobs and start no others; when called again, release the running jobs too.

        Signal handlers call it, so it takes no lock.
        """
        self._is_drain_urgent = self._engine.is_draining
        self._engine.begin_drain()
        self._events.put(None)  # wakes an idle loop

    # --- the loop ---

    def serve(self, idle_limit_s: float | None = None) -> None:
        """Run the engine loop until `drain`, or until there was no job for `idle_limit_s`."""
        last_job_s = time.monotonic()
        while not self._engine.is_draining:
            self._run_once()
            if self._jobs.served or self._jobs.pending:
                last_job_s = time.monotonic()
            elif idle_limit_s is not None and time.monotonic() > last_job_s + idle_limit_s:
                logger.info("there was no job for %g s", idle_limit_s)
                self._engine.begin_drain()

    def finish_running(self, grace_s: float) -> None:
        """Release the jobs that have not started, and run the others for at most this time."""
        began_s = report_s = time.monotonic()
        self._process_events()
        self._release_pending()
        self._release(job for job in self._jobs.served.values() if not _has_started(job))
        num_jobs = len(self._jobs.served)
        logger.info("draining: %d jobs run and have %g s to end; the others go back to the queue", num_jobs, grace_s)
        while self._jobs.served and not self._is_drain_urgent and (now_s := time.monotonic()) < began_s + grace_s:
            if now_s >= report_s + _DRAIN_REPORT_S:
                report_s = now_s
                logger.info("draining: %d jobs still run after %.0f s", len(self._jobs.served), now_s - began_s)
            self._run_once()
        num_left = len(self._jobs.served)
        logger.info(
            "drained in %.1f s: %d jobs have ended, %d go back to the queue",
            time.monotonic() - began_s,
            num_jobs - num_left,
            num_left,
        )

    def release_all(self) -> None:
        """Give all jobs back to the queue with their output so far. Works after the engine has died, too."""
        self._engine.begin_drain()
        self._handle(self._drain_events(wait_s=None))
        self._release_pending()
        self._release(self._jobs.served.values())

    def _run_once(self) -> None:
        try:
            self._process_events()
            self._step()
        except WorkersLost as error:  # in a step, or in waking up
            logger.warning("%s; releasing the running jobs", error)
            self._is_drain_urgent = True

    def _step(self) -> None:
        if self._writer.is_full:  # Redis is slow or not reachable: more output would only wait in memory
            self._writer.flush(_FULL_WRITER_S)
            return
        if not self._engine.has_work:
            return
        progress = self._engine.step()
        self._capacity.update(self._engine.scheduler.free_tokens)  # before a job that has ended wakes the claims
        now_s = time.monotonic()
        for one in progress:
            self._apply(one, now_s)
        self._save_due(now_s)

    def _save_due(self, now_s: float) -> None:
        """Save the jobs that nobody reads when it is time. To look at all of them in each step would cost more than all
        other work of the step."""
        self._num_unsaved_steps += 1
        if self._num_unsaved_steps >= SAVE_EVERY_STEPS or now_s - self._saved_at_s >= _SAVE_EVERY_S:
            self._num_unsaved_steps, self._saved_at_s = 0, now_s
            self._output.save_due(list(self._jobs.served.values()), now_s)

    def _apply(self, progress: Progress, now_s: float) -> None:
        found = self._jobs.by_sequence.get(progress.generation.sequence.seq_id)
        if found is None:
            return  # the failure of another candidate has ended the job in this step
        job, candidate = found
        if job.awaits_first_token and progress.failure is None:
            self._jobs.note_first_token(job)
        if progress.failure is not None:
            self._fail(job, progress.failure)
        elif progress.finish_reason is None:
            self._output.advance(job, candidate, now_s, self._jobs.num_watched)
        elif job.has_ended:
            self._finish(job)
        else:
            self._output.save(job, now_s)

    def _fail(self, job: ServedJob, failure: SequenceFailure) -> None:
        """End a job of which one candidate can't continue."""
        self._stop_candidates(job)
        if failure.kind == TOO_LARGE:
            self._output.release(job, DEFER_MS)  # for an engine with all its ranks, perhaps this one later
            self._jobs.remove(job, "released")
        else:
            logger.warning("job %s failed: %s: %s", job.job_id, failure.kind, failure.message)
            self._output.fail(job, JobError(kind=failure.kind, message=failure.message))
            self._jobs.remove(job, "failed")

    def _finish(self, job: ServedJob) -> None:
        self._output.finish(job)
        self._jobs.remove(job, "finished")

    def _stop_candidates(self, job: ServedJob) -> None:
        for generation in job.generations:
            self._engine.abort(generation)
        self._capacity.update(self._engine.scheduler.free_tokens)

    # --- events ---

    def _process_events(self) -> None:
        """Handle the posted events. If there is nothing to compute, wait for an event and check the workers."""
        is_idle = not self._engine.has_work and not self._engine.is_draining
        self._handle(self._drain_events(_IDLE_S if is_idle else None))
        if self._lost:
            logger.warning("%d jobs belong to other engines now, such as %s", len(self._lost), self._lost[0])
            self._lost.clear()
        if is_idle and not self._engine.has_work:
            self._engine.check_workers()
        self._capacity.update(self._engine.scheduler.free_tokens)  # jobs that have arrived need some of them

    def _drain_events(self, wait_s: float | None) -> Iterable[EngineEvent | None]:
        """Yield the posted events. Wait for the first one for at most this time, or not at all."""
        with contextlib.suppress(queue.Empty):
            if wait_s is not None:
                yield self._events.get(timeout=wait_s)
            while True:
                yield self._events.get_nowait()

    def _handle(self, events: Iterable[EngineEvent | None]) -> None:
        for event in events:
            match event:
                case PendingJob():
                    self._add_pending(event)
                case Prepared(job, outcome) if not job.is_withdrawn:
                    self._jobs.end_preparation(job)
                    self._handle([outcome])
                case Arrived(job):
                    self._start(job)
                case Refused(claimed, error):
                    logger.warning("job %s failed: %s: %s", claimed.job_id, error.kind, error.message)
                    self._output.refuse(claimed, error)
                    self._jobs.remove_unserved(claimed, "failed")
                case Deferred(claimed):
                    self._output.defer(claimed)
                    self._jobs.remove_unserved(claimed, "released")
                case Abort(job_id, state):
                    self._abort(job_id, state)
                case Watch(job_id):
                    self._watch(job_id)
                case Lost(job_id, lease):
                    self._drop_lost(job_id, lease)
                case SetSleepLevel(level) if not self._engine.is_draining:
                    self._set_sleep_level(level)
                case ResetCache(number) if number > self._reset_number:
                    self._reset_number = number
                    self._engine.scheduler.pool.reset_cache()
                    logger.info("the prefix cache is reset")

    def _add_pending(self, job: PendingJob) -> None:
        self._drop_lost(job.claimed.job_id, lease=None)  # an older lease whose loss has not been reported yet
        self._jobs.add_pending(job)
        if self._capacity.is_shut:  # claimed while the engine fell asleep
            self._release_pending()
        elif isinstance(early := self._early.get(job.claimed.job_id), Abort):
            self._abort(early.job_id, early.state)

    def _start(self, job: ServedJob) -> None:
        self._drop_lost(job.job_id, lease=None)
        self._jobs.add(job)
        if job.has_ended:  # the checkpoints already hold the whole output
            self._finish(job)
        elif self._capacity.is_shut or (job.is_alone and not self._has_begun(job)):
            self._release([job])
        else:
            if self._prefixes is not None and job.prompt_digest is not None:
                pool = self._engine.scheduler.pool
                self._prefixes.note(job.prompt_digest, job.generations[0].sequence, pool.layout.block_size)
            for generation in job.generations:  # in this order: the first one computes the prompt that all share
                if generation.finish_reason is None:
                    self._engine.add(generation)
        if (early := self._early.pop(job.job_id, None)) is not None:
            self._handle([early])

    def _has_begun(self, job: ServedJob) -> bool:
        """Record in Redis that a job which runs alone begins: from then on a death of this engine counts against the job.

        Waits while Redis is not reachable, since such a job runs alone. Returns False if the service drains before that.
        """
        if self._engine.is_draining:
            return False
        if not self._engine.has_work:
            self._engine.check_workers()  # before the begin: the job is not the cause of what happens in a restart
        self._output.begin(job)
        while not self._engine.is_draining:
            if self._writer.flush(_FULL_WRITER_S):
                return True
        return False

    def _abort(self, job_id: JobId, state: Literal["cancelled", "expired"]) -> None:
        if (job := self._jobs.served.get(job_id)) is not None:
            self._stop_candidates(job)
            self._output.abort(job, state)
            self._jobs.remove(job, state)
        elif (pending := self._jobs.pending.get(job_id)) is not None:
            self._output.give_back(pending.claimed)  # the queue ends a job that is cancelled or expired
            self._jobs.withdraw(pending, state)
        elif self._is_held(job_id):
            self._early[job_id] = Abort(job_id, state)

    def _watch(self, job_id: JobId) -> None:
        job = self._jobs.served.get(job_id)
        if job is not None and not job.is_watched:
            self._jobs.watch(job)
            self._output.save(job, time.monotonic())
        elif job is None and self._is_held(job_id):
            self._early.setdefault(job_id, Watch(job_id))

    def _forget(self, job_id: JobId, lease: Lease) -> None:
        self._early.pop(job_id, None)
        self._on_over(job_id, lease)

    def _drop_lost(self, job_id: JobId, lease: Lease | None) -> None:
        """Drop a job and write nothing. `lease` is the lost one; None: whichever is held."""
        if (job := self._jobs.served.get(job_id)) is not None and lease in (None, job.lease):
            self._lost.append(job_id)
            self._stop_candidates(job)
            self._jobs.remove(job, "lost")
        if (pending := self._jobs.pending.get(job_id)) is not None and lease in (None, pending.claimed.lease):
            self._jobs.withdraw(pending, "lost")

    def _release(self, jobs: Iterable[ServedJob]) -> None:
        for job in list(jobs):
            self._stop_candidates(job)
            self._output.release(job)
            self._jobs.remove(job, "released")

    def _release_pending(self) -> None:
        for job in list(self._jobs.pending.values()):
            self._output.give_back(job.claimed)
            self._jobs.withdraw(job, "released")

    # --- sleep ---

    def _set_sleep_level(self, level: int) -> None:
        """Fall asleep or wake up if the level is not the current one. A failure is tried again at the next heartbeat."""
        if level > self._engine.sleep_level:
            self._fall_asleep(level)
        elif level == 0 and self._capacity.is_shut:
            self._wake_up()

    def _fall_asleep(self, level: int) -> None:
        self._capacity.shut(True)
        self._release_pending()
        self._release(self._jobs.served.values())
        try:
            self._engine.sleep(level)
        except (EngineDead, WorkersLost):
            raise
        except EngineError as error:
            logger.error("%s; trying again", error)
            return
        logger.info("asleep, level %d; jobs wait in the queue or go to other engines", level)
        self._on_sleep_change()

    def _wake_up(self) -> None:
        self._engine.wake_up()
        self._capacity.shut(False)
        logger.info("awake")
        self._on_sleep_change()


def _has_started(job: ServedJob) -> bool:
    return any(generation.sequence.num_computed for generation in job.generations)
