"""Brings work in: claims what the engine has room for, and listens for events about running jobs.

Two threads, since each waits for something else: `claim` for room and then for the queue, `signals` for cancellations and
readers. What they find goes to the engine loop as events, in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from millrace.engine_service.generation import Generation
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.serving.capacity import Capacity, ClaimBudget
from millrace.engine_service.serving.jobs import (
    Abort,
    Arrived,
    Deferred,
    EngineEvent,
    Refused,
    ServedJob,
    Watch,
    is_alone,
)
from millrace.engine_service.serving.leases import Leases
from millrace.producer.checks import shown
from millrace.producer.messages import InvalidRequest, parse_body
from millrace.results.errors import QueueError
from millrace.results.messages import PROTOCOL, Claim, ClaimedJob, JobError, Signal
from millrace.results.queue import JobQueue

logger = logging.getLogger("millrace.engine")

MAX_JOBS_PER_CLAIM = 128
_BLOCK_S = 1.0
_RETRY_S = 0.5
_STOP_S = 3.0


class Intake:
    """Owns the threads that read from the queue."""

    def __init__(
        self,
        connect: Callable[[], JobQueue],
        leases: Leases,
        capacity: Capacity,
        admission: Admission,
        *,
        model_name: str,
        fingerprint: str,
        post: Callable[[EngineEvent], None],
    ) -> None:
        self._leases = leases
        self._capacity = capacity
        self._admission = admission
        self._model_name = model_name
        self._fingerprint = fingerprint
        self._post = post
        self._claim_number = 1
        self._stopping = threading.Event()
        self.threads = [
            threading.Thread(target=self._forever, args=(self._claim_once, connect()), name="claim", daemon=True),
            threading.Thread(target=self._forever, args=(self._listen_once, connect()), name="signals", daemon=True),
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Claim nothing more. Jobs claimed before have been told when this returns, unless Redis is away: then a claim that
        still comes through is given back when the engine leaves, or recovered."""
        self._stopping.set()
        self.threads[0].join(_STOP_S)

    def _forever(self, once: Callable[[JobQueue], None], queue: JobQueue) -> None:
        while not self._stopping.is_set():
            try:
                once(queue)
            except QueueError as error:
                logger.warning("%s; trying again", error)
                self._stopping.wait(_RETRY_S)
            except Exception:  # our bug: it must not end what nothing else does
                logger.exception("trying again")
                self._stopping.wait(_RETRY_S)

    # --- claim ---

    def _claim_once(self, queue: JobQueue) -> None:
        budget = self._capacity.wait_for_budget(_BLOCK_S)
        if budget is None:
            return
        claim = self._claim(budget)
        if claim.jobs or claim.num_set_aside:
            return  # there may be more behind them
        if claim.num_ready == 0:
            self._listen(queue, include_wake=True)
        else:
            self._capacity.wait_for_change(_BLOCK_S)

    def _claim(self, budget: ClaimBudget) -> Claim:
        """One claim; after an error the next one repeats its id, in case that only the reply was lost."""
        max_jobs = min(budget.max_jobs, MAX_JOBS_PER_CLAIM)
        claim = self._leases.claim(f"c{self._claim_number}", max_jobs, budget.kv_token_budget, self._fingerprint)
        self._claim_number += 1
        for claimed in claim.jobs:
            self._capacity.open(claimed.cost, is_alone=is_alone(claimed))
            self._post(self._admit(claimed))
        return claim

    def _admit(self, claimed: ClaimedJob) -> EngineEvent:
        if claimed.protocol > PROTOCOL:
            return Deferred(claimed)
        if claimed.corruption:
            message = f"the job's record was changed and cannot be run: {claimed.corruption}"
            return Refused(claimed, JobError(kind="invalid_request", message=message))
        try:
            return Arrived(ServedJob(claimed, self._build(claimed)))
        except InvalidRequest as error:
            kind = "model_mismatch" if error.field == "model" else "invalid_request"
            return Refused(claimed, JobError(kind=kind, message=str(error), field=error.field))
        except Exception as error:  # a job that breaks our code must not break the intake
            logger.exception("job %s could not be admitted", claimed.job_id)
            return Refused(claimed, JobError(kind="internal", message=f"{type(error).__name__}: {error}"))

    def _build(self, claimed: ClaimedJob) -> Generation:
        request = parse_body(claimed.body)
        if request.model is not None and request.model != self._model_name:
            message = (
                f"this queue serves {shown(self._model_name)}, not {shown(request.model)}; use the queue of that model"
            )
            raise InvalidRequest("model", message)
        return self._admission.admit(
            self._admission.prompt_token_ids(request),
            request.sampling,
            drawn_seed=claimed.seed,
            output_token_ids=claimed.token_ids,
            crash_count=claimed.crash_count,
        )

    # --- signals ---

    def _listen_once(self, queue: JobQueue) -> None:
        self._listen(queue, include_wake=False)

    def _listen(self, queue: JobQueue, *, include_wake: bool) -> None:
        match queue.wait_for_signal(self._leases.engine_id, _BLOCK_S, include_wake=include_wake):
            case Signal(kind="cancel", job_id=job_id):
                self._post(Abort(job_id, "cancelled"))
            case Signal(kind="expire", job_id=job_id):
                self._post(Abort(job_id, "expired"))
            case Signal(kind="watch", job_id=job_id):
                self._post(Watch(job_id))
            case "beat":
                self._leases.beat_soon()
            case "wake" if self._capacity.is_shut:  # for another engine: a heartbeat has one woken where jobs are ready
                self._leases.beat_soon()
