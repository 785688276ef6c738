"""The command on the run's private server, and an engine's part played by hand, so that no model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import redis

from millrace.results.connection import connect
from millrace.results.keys import QueueKeys
from millrace.results.messages import (
    Append,
    ClaimedJob,
    EndReason,
    EngineId,
    Event,
    Finish,
    JobError,
    NewOutput,
    Reconciliation,
    Usage,
)
from millrace.results.queue import JobQueue
from tests.millrace.cli.command import Command

ENGINE = EngineId("by-hand")


class EngineByHand:
    """Claims and ends jobs when it is told to."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._num_claims = 0

    def claim(self) -> list[ClaimedJob]:
        self._queue.heartbeat(ENGINE, 60_000, {})
        self._num_claims += 1
        claim = self._queue.claim(
            ENGINE, f"claim-{self._num_claims}", max_jobs=100, kv_token_budget=10**6, num_held=0, fingerprint="none"
        )
        assert claim
        return claim.jobs

    def beat(self, sleep_level: int) -> Reconciliation:
        return self._queue.heartbeat(ENGINE, 60_000, {}, sleep_level, "tiny")

    def hear(self) -> object:
        return self._queue.wait_for_signal(ENGINE, 1.0, include_wake=False)

    def show(self, job: ClaimedJob, text: str) -> None:
        tokens = list(text.encode())
        output = NewOutput(offset=0, token_ids=tokens, event=Event(offset=0, token_ids=tokens, text=text))
        append = Append(job_id=job.job_id, lease=job.lease, fingerprint="none", outputs=[output])
        assert self._queue.write([append]) == ["ok"]

    def finish(self, job: ClaimedJob, *texts: str, reason: EndReason = "stop") -> None:
        """`texts`: one for each candidate."""
        indices = range(len(texts)) if len(texts) > 1 else [None]
        events = [
            Event(offset=0, token_ids=list(text.encode()), text=text, index=index)
            for text, index in zip(texts, indices, strict=True)
        ]
        num_tokens = sum(len(event.token_ids) for event in events)
        self._write(job, Usage(prompt_tokens=3, completion_tokens=num_tokens), reason, events=events)

    def fail(self, job: ClaimedJob, message: str, *, kind: str = "internal") -> None:
        error = JobError(kind=kind, message=message)
        self._write(job, Usage(prompt_tokens=3, completion_tokens=0), "error", error=error)

    def _write(
        self,
        job: ClaimedJob,
        usage: Usage,
        reason: EndReason,
        *,
        events: Sequence[Event] = (),
        error: JobError | None = None,
    ) -> None:
        finish = Finish(
            job_id=job.job_id,
            lease=job.lease,
            state="failed" if error else "finished",
            finish_reason=reason,
            usage=usage,
            events=list(events),
            error=error,
        )
        assert self._queue.write([finish]) == ["ok"]


@pytest.fixture
def millrace(redis_url: str, redis_client: redis.Redis, queue_name: str) -> Command:
    """On a queue that an engine has served, but none serves now."""
    redis_client.hset(QueueKeys(queue_name).prefix + "counts", "served", 1)
    return Command(redis_url, queue_name)


@pytest.fixture
def engine(redis_url: str, queue_name: str) -> Iterator[EngineByHand]:
    queue = JobQueue(connect(redis_url), queue_name)
    yield EngineByHand(queue)
    queue.close()
