"""Claims the jobs that fit into the engine, and receives the signals about its jobs.

Each thread waits for something else: `claim` for capacity and for the queue, `signals` for cancellations and readers,
`prepare` for those that are slow to prepare. They post events to the engine loop, in order.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from millrace.engine_service.chat.renderer import NotQuick
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.serving.capacity import Capacity, ClaimBudget
from millrace.engine_service.serving.jobs import (
    Abort,
    Arrived,
    Deferred,
    EngineEvent,
    PendingJob,
    Prepared,
    Refused,
    ServedJob,
    Watch,
    is_alone,
)
from millrace.engine_service.serving.leases import Leases
from millrace.engine_service.serving.preparation import Preparation
from millrace.producer import InvalidRequest
from millrace.producer.wire import parse_body
from millrace.results.errors import one_line, shown
from millrace.results.messages import PROTOCOL, Claim, ClaimedJob, JobError, Signal
from millrace.results.outage import RETRY_S, Outage
from millrace.results.queue import JobQueue
from millrace.results.writer import THREAD_NAME as RESULTS_WRITER

logger = logging.getLogger("millrace.engine")

MAX_JOBS_PER_CLAIM = 128
LARGE_BODY_BYTES = 4096
"""A job with a larger body is admitted in the `prepare` thread, as one with a slow chat or a grammar to check. 128 bodies of
this size take the claim thread up to 0.5 s."""
_GATHER_S = 0.005
"""How long admitted jobs of one claim wait for the next ones, so that an idle engine's first step has many of them."""
_BLOCK_S = 1.0
_FAIR_WAIT_S = 0.5
"""Time for other engines to claim their part of the ready jobs, before this engine takes what is left."""
_MISMATCH = "was begun by engines with another model, tokenizer or dtype"
_STOP_S = 3.0
_MAX_SLOW_TENANTS = 1000


class Intake:
    """Owns the threads that read from the queue."""

    def __init__(
        self,
        connect: Callable[[], JobQueue],
        leases: Leases,
        capacity: Capacity,
        admission: Admission,
        *,
        model_names: tuple[str, ...],
        fingerprint: str,
        isolates_tenants: bool = False,
        post: Callable[[EngineEvent], None],
        cached_prompts: Callable[[], list[str]] = list,
        outage: Outage | None = None,
    ) -> None:
        self._leases = leases
        self._capacity = capacity
        self._admission, self._quick_admission = admission, admission.quick()
        self._model_names = model_names
        self._fingerprint = fingerprint
        self._isolates_tenants = isolates_tenants
        self._post = post
        self._cached_prompts = cached_prompts
        self._outage = outage or Outage()
        self._claim_number = 1
        self._fair_until_s = math.inf
        """Until then claims leave to other engines their part."""
        self._slow_tenants: set[str] = set()
        """Tenants with a chat that was too slow for the claim thread: it admits no other chat of them."""
        self._stopping = threading.Event()
        self._preparation = Preparation(self._prepare)
        self.threads = [
            threading.Thread(target=self._repeat, args=(self._claim_once, connect()), name="claim", daemon=True),
            threading.Thread(target=self._repeat, args=(self._receive_signal, connect()), name="signals", daemon=True),
            self._preparation.thread,
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Stop claiming. On return all claimed jobs are posted, unless Redis is not reachable: then a claim that still
        succeeds is released when the engine deregisters, or recovered."""
        self._stopping.set()
        self._preparation.stop()
        self.threads[0].join(_STOP_S)

    def _repeat(self, action: Callable[[JobQueue], None], queue: JobQueue) -> None:
        self._outage.repeat(lambda: action(queue), self._stopping)

    # --- claim ---

    def _claim_once(self, queue: JobQueue) -> None:
        if self._outage.is_seen_by(RESULTS_WRITER):
            # The results would only wait in memory; another engine may do better.
            self._stopping.wait(RETRY_S)
            return
        budget = self._capacity.wait_for_budget(_BLOCK_S)
        if budget is None:
            return
        is_fair = time.monotonic() < self._fair_until_s
        claim = self._claim(budget, is_fair)
        if is_fair and claim.num_ready > 0 and not claim.jobs and not claim.num_set_aside:
            # What is ready is the part of others, or does not fit.
            self._fair_until_s = min(self._fair_until_s, time.monotonic() + _FAIR_WAIT_S)
            self._capacity.wait_for_change(_FAIR_WAIT_S)
            return
        self._fair_until_s = math.inf
        if claim.jobs or claim.num_set_aside:
            return  # there may be more behind them
        if claim.num_ready == 0:
            self._receive_signal(queue, include_wake=True)
        else:
            self._capacity.wait_for_change(_BLOCK_S)

    def _claim(self, budget: ClaimBudget, is_fair: bool) -> Claim:
        """Claim once. After an error the next call repeats the claim id, because perhaps only the reply was lost."""
        max_jobs = min(budget.max_jobs, MAX_JOBS_PER_CLAIM)
        claim = self._leases.claim(
            f"c{self._claim_number}",
            max_jobs,
            budget.kv_token_budget,
            self._fingerprint,
            self._cached_prompts(),
            is_fair=is_fair,
        )
        self._claim_number += 1
        self._take(claim.jobs)
        return claim

    def _take(self, jobs: list[ClaimedJob]) -> None:
        """Admit the jobs and post them, in order."""
        waiting: list[EngineEvent] = []

        def post() -> None:
            for event in waiting:
                self._post(event)
            waiting.clear()

        posted_s = time.monotonic()
        try:
            for claimed in jobs:
                outcome = self._admit_quickly(claimed)
                pending = outcome if isinstance(outcome, PendingJob) else None
                num_candidates, is_slow = len(claimed.checkpoints), pending is not None
                self._capacity.open(claimed.cost, num_candidates, is_alone=is_alone(claimed), is_slow=is_slow)
                waiting.append(outcome)
                if pending or time.monotonic() - posted_s >= _GATHER_S:
                    post()
                    posted_s = time.monotonic()
                if pending:
                    self._preparation.put(pending)  # after its event: its result follows it
        finally:
            post()

    def _prepare(self, job: PendingJob) -> None:
        self._post(Prepared(job, self._admit(job.claimed, self._admission)))

    def _admit_quickly(self, claimed: ClaimedJob) -> Arrived | Refused | Deferred | PendingJob:
        """Return a `PendingJob` for what takes long: the `prepare` thread admits it."""
        is_slow_chat = claimed.tenant in self._slow_tenants and b'"messages":' in claimed.body
        if len(claimed.body) > LARGE_BODY_BYTES or is_slow_chat:
            return PendingJob(claimed)
        try:
            return self._admit(claimed, self._quick_admission)
        except NotQuick as error:
            if error.is_slow_template:
                if len(self._slow_tenants) >= _MAX_SLOW_TENANTS:
                    self._slow_tenants.clear()
                self._slow_tenants.add(claimed.tenant)
            return PendingJob(claimed)

    def _admit(self, claimed: ClaimedJob, admission: Admission) -> Arrived | Refused | Deferred:
        if claimed.protocol > PROTOCOL:
            return Deferred(claimed)
        if claimed.corruption:
            message = f"the job's record was changed and cannot be run: {claimed.corruption}"
            return Refused(claimed, JobError(kind="invalid_request", message=message))
        try:
            return Arrived(self._build(claimed, admission))
        except NotQuick:
            raise
        except InvalidRequest as error:
            kind = "model_mismatch" if error.field == "model" else "invalid_request"
            return Refused(claimed, JobError(kind=kind, message=str(error), field=error.field))
        except BaseException as error:  # one job's bug, or panic of the tokenizer, must not stop others
            logger.exception("job %s could not be admitted", claimed.job_id)
            return Refused(claimed, JobError(kind="internal", message=one_line(f"{type(error).__name__}: {error}")))

    def _build(self, claimed: ClaimedJob, admission: Admission) -> ServedJob:
        request = parse_body(claimed.body)
        if request.model is not None and request.model not in self._model_names:
            name = shown(self._model_names[0])
            remedy = f"set model to {name} or leave it out, or use the queue of the other model"
            raise InvalidRequest("model", f"this queue serves {name}, not {shown(request.model)}; {remedy}")
        n, num_candidates = request.sampling.n, len(claimed.checkpoints)
        if n != num_candidates:
            rule = "submit it with the same n in the request and in the options"
            raise InvalidRequest("n", f"is {n} in the request, but the job's record has {num_candidates}; {rule}")
        num_kept = request.sampling.truncate_prompt_tokens
        prompt_token_ids = admission.prompt_token_ids(request, num_kept)
        counts = [len(checkpoint.token_ids) for checkpoint in claimed.checkpoints]
        if request.sampling.logprobs is not None and list(map(len, claimed.logprobs or [[]] * n)) != counts:
            raise InvalidRequest("logprobs", "are missing in the job's checkpoint; submit the job again under a new id")
        sampling = admission.with_form(request.sampling, request, prompt_token_ids)
        generations = admission.admit(
            prompt_token_ids,
            sampling,
            drawn_seed=claimed.seed,
            outputs=[checkpoint.token_ids for checkpoint in claimed.checkpoints],
            logprobs=claimed.logprobs,
            crash_count=claimed.crash_count,
            # A tenant has no NUL, so no salt of one makes the text of another one.
            cache_salt=f"{claimed.tenant}\0{request.cache_salt or ''}"
            if self._isolates_tenants
            else request.cache_salt,
            tenant=claimed.tenant,
            priority=claimed.priority,
        )
        delayed_s = claimed.created_ms / 1000 + (request.delay_s or 0.0)
        due_s = min(max(delayed_s, request.run_at or 0.0), time.time())  # a redrive does not wait again
        chat = admission.chat_reader(request, prompt_token_ids)
        return ServedJob(claimed, generations, due_s, chat)

    # --- signals ---

    def _receive_signal(self, queue: JobQueue, *, include_wake: bool = False) -> None:
        signal = queue.wait_for_signal(self._leases.engine_id, _BLOCK_S, include_wake=include_wake)
        if isinstance(signal, Signal):
            self._leases.wait_for_claim()  # which may bring the job of this signal
        match signal:
            case Signal(kind="cancel", job_id=job_id):
                self._post(Abort(job_id, "cancelled"))
            case Signal(kind="expire", job_id=job_id):
                self._post(Abort(job_id, "expired"))
            case Signal(kind="watch", job_id=job_id):
                self._post(Watch(job_id))
            case Signal(kind="mismatch", job_id=job_id):
                logger.warning("job %s %s; it waits for an engine with the same ones", job_id, _MISMATCH)
            case Signal(kind="mismatch_failed", job_id=job_id):
                logger.warning(
                    "job %s failed: fingerprint_mismatch: %s, and no engine with those came", job_id, _MISMATCH
                )
            case "beat":
                self._leases.beat_soon()
            case "wake" if self._capacity.is_shut:  # meant for an awake engine: a heartbeat wakes another one
                self._leases.beat_soon()
