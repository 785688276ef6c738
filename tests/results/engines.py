"""An engine as the queue sees one, for tests: it claims and writes what it is told to, and computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from millrace.producer import Client
from millrace.producer.prompt_start import prompt_digest
from millrace.results.messages import (
    Append,
    Begin,
    ChatOutput,
    ClaimedJob,
    EndReason,
    EndState,
    EngineId,
    Event,
    Finish,
    JobError,
    JobId,
    Lease,
    NewOutput,
    Reconciliation,
    Release,
    Submission,
    Usage,
)
from millrace.results.queue import JobQueue
from millrace.results.replies import Outcome
from millrace.results.replies import outcomes as decode_outcomes

FINGERPRINT = "model-a"
_numbers = itertools.count(1)


def submission(job_id: str | None = None, *, body: bytes = b'{"prompt":"hi"}', **fields: Any) -> Submission:
    values = {"digest": sha256(body).hexdigest(), "prompt_digest": prompt_digest(body), "cost": 10, "seed": 7, **fields}
    return Submission(job_id=JobId(job_id or f"job-{next(_numbers)}"), body=body, **values)


def submit(queue: JobQueue, *job_ids: str, **fields: Any) -> None:
    assert queue.submit([submission(job_id, **fields) for job_id in job_ids]) == outcomes(["created"] * len(job_ids))


def outcomes(replies: list[str]) -> list[Outcome]:
    """Return what `JobQueue.submit` returns for these replies."""
    return decode_outcomes([reply.encode() for reply in replies])


def listed(queue: JobQueue, state: str, limit: int = 10) -> list[str]:
    """The ids of the jobs that a client lists."""
    return [job.id for job in Client(queue._transport._client, queue.keys.queue).list_jobs(state, limit)]


class Engine:
    """Owns one engine id, and what it believes to hold."""

    def __init__(
        self, queue: JobQueue, name: str = "engine", *, fingerprint: str = FINGERPRINT, calls_begin: bool = True
    ) -> None:
        self.id = EngineId(f"{name}-{next(_numbers)}")
        self.held: dict[JobId, Lease] = {}
        self.queue = queue
        self.fingerprint = fingerprint
        self.calls_begin = calls_begin
        self._claim_numbers = itertools.count(1)
        self.beat()

    def beat(self, ttl_ms: int = 60_000) -> Reconciliation:
        return self.queue.heartbeat(self.id, ttl_ms, self.held)

    def claim(
        self,
        max_jobs: int = 256,
        *,
        budget: int = 10**9,
        claim_id: str | None = None,
        num_held: int | None = None,
        cached_prompts: Sequence[str] = (),
        is_fair: bool = False,
    ) -> list[ClaimedJob]:
        claim = self.queue.claim(
            self.id,
            claim_id or f"c{next(self._claim_numbers)}",
            max_jobs=max_jobs,
            kv_token_budget=budget,
            num_held=len(self.held) if num_held is None else num_held,
            fingerprint=self.fingerprint,
            calls_begin=self.calls_begin,
            cached_prompts=cached_prompts,
            is_fair=is_fair,
        )
        assert claim is not None, "not registered"
        self.held.update((job.job_id, job.lease) for job in claim.jobs)
        return claim.jobs

    def claim_one(self) -> ClaimedJob:
        (job,) = self.claim(1)
        return job

    def claim_ids(self, max_jobs: int = 256, **options: Any) -> list[str]:
        return [job.job_id for job in self.claim(max_jobs, **options)]

    def begin(self, job: ClaimedJob) -> str:
        return self.queue.write([Begin(job_id=job.job_id, lease=job.lease)])[0]

    def append(
        self,
        job: ClaimedJob,
        offset: int,
        token_ids: list[int],
        event: Event | None = None,
        index: int | None = None,
    ) -> str:
        """`index`: of a job with several candidates."""
        write = append_of(job, offset, token_ids, event, index, fingerprint=self.fingerprint)
        return self.queue.write([write])[0]

    def show(
        self,
        job: ClaimedJob,
        offset: int,
        token_ids: list[int],
        text: str,
        index: int | None = None,
        chat: ChatOutput | None = None,
    ) -> str:
        """Keep tokens and show them."""
        event = Event(offset=offset, token_ids=token_ids, text=text, index=index, chat=chat)
        return self.append(job, offset, token_ids, event, index)

    def finish(self, job: ClaimedJob, *events: Event | None, **fields: Any) -> str:
        outcome = self.queue.write([finish_of(job, *events, **fields)])[0]
        self.held.pop(job.job_id, None)
        return outcome

    def release(self, job: ClaimedJob, offset: int = 0, token_ids: list[int] | None = None, delay_ms: int = 0) -> str:
        write = Release(
            job_id=job.job_id,
            lease=job.lease,
            outputs=[NewOutput(offset=offset, token_ids=token_ids or [])],
            fingerprint=self.fingerprint,
            delay_ms=delay_ms,
        )
        self.held.pop(job.job_id, None)
        return self.queue.write([write])[0]

    def die(self) -> None:
        """Its heartbeat has run out, in no time."""
        self.queue._transport.send(("DEL", self.queue.keys.prefix + "engine:" + self.id))


def append_of(
    job: ClaimedJob,
    offset: int,
    token_ids: list[int],
    event: Event | None = None,
    index: int | None = None,
    *,
    fingerprint: str = FINGERPRINT,
) -> Append:
    output = NewOutput(offset=offset, token_ids=token_ids, event=event, index=index)
    return Append(job_id=job.job_id, lease=job.lease, fingerprint=fingerprint, outputs=[output])


def finish_of(
    job: ClaimedJob,
    *events: Event | None,
    state: EndState = "finished",
    reason: EndReason = "stop",
    usage: Usage | None = None,
    error: JobError | None = None,
    is_retryable: bool = False,
    reasons: Sequence[EndReason] = (),
    stop_reasons: Sequence[int | str | None] = (),
) -> Finish:
    """`reasons`: of each candidate, where there are several."""
    shown = [event for event in events if event is not None]
    return Finish(
        job_id=job.job_id,
        lease=job.lease,
        state=state,
        finish_reason=reason,
        usage=usage or Usage(prompt_tokens=2, completion_tokens=sum(len(event.token_ids) for event in shown)),
        events=shown,
        finish_reasons=list(reasons),
        stop_reasons=list(stop_reasons),
        error=error,
        is_retryable=is_retryable,
    )
