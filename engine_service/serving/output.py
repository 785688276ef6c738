"""Decides when the tokens of running jobs become safe and when they become visible, and ends their records.

    published      saved          produced
    [0 ......... p)[p ...... s)[s ........ t)     p <= s <= t, in output tokens
    readers have it
    the checkpoint has it

One write makes both bounds move: what it shows is in the checkpoint that it writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from millrace.engine_service.core.sequence import StopReason
from millrace.engine_service.serving.jobs import ServedJob
from millrace.results.messages import (
    Append,
    Begin,
    ClaimedJob,
    EndReason,
    EndState,
    Event,
    Finish,
    JobError,
    Release,
    Usage,
    Write,
)

EVENT_INTERVAL_S = 0.05
"""A watched job shows what it has this often; the first token at once."""
CHECKPOINT_INTERVAL_S = 1.0
CHECKPOINT_TOKENS = 64
"""An unwatched job is saved when it is this far ahead of its checkpoint, in time or tokens."""
DEFER_MS = 1000
"""How long a job that needs a newer or larger engine is out of everybody's way before it is offered again."""
MAX_DEFER_MS = 15_000
"""The same at most, for a job that has long been there and needs a newer engine. It comes back in front, so if many came
back each second, an engine would have no time for the jobs behind them that it can run."""


class Output:
    """Turns progress into writes; `put` takes them and never blocks."""

    def __init__(self, put: Callable[[Write], None], fingerprint: str) -> None:
        self._put = put
        self._fingerprint = fingerprint

    def begin(self, job: ServedJob) -> None:
        """The job runs alone and is about to be computed."""
        self._put(Begin(job_id=job.job_id, lease=job.lease))

    def advance(self, job: ServedJob, now_s: float) -> None:
        """The job has new tokens: write when it is time to."""
        if job.is_watched:
            if job.is_alone or job.num_published == 0 or now_s - job.saved_at_s >= EVENT_INTERVAL_S:
                self._append(job, now_s, self._next_event(job))
        elif self._is_checkpoint_due(job, now_s):
            self._append(job, now_s, event=None)

    def finish(self, job: ServedJob, reason: StopReason) -> None:
        """The job has its whole output."""
        self._end(job, "finished", reason)

    def abort(self, job: ServedJob, state: Literal["cancelled", "expired"]) -> None:
        """The job ends here, because somebody asked for it or its time is up; what it has is its result."""
        self._end(job, state, state)

    def fail(self, job: ServedJob, error: JobError) -> None:
        """The job can't go on; what it has stays readable."""
        self._end(job, "failed", "error", error)

    def refuse(self, claimed: ClaimedJob, error: JobError) -> None:
        """The job could not even start. An error of ours may pass and is worth another attempt; the request's own is not."""
        self._put(
            Finish(
                job_id=claimed.job_id,
                lease=claimed.lease,
                state="failed",
                finish_reason="error",
                usage=Usage(prompt_tokens=0, completion_tokens=len(claimed.token_ids)),
                error=error,
                is_retryable=error.kind == "internal",
            )
        )

    def defer(self, claimed: ClaimedJob) -> None:
        """The job is for an engine of a newer version: leave it to one, for a quarter of the job's age each time."""
        age_ms = int(time.time() * 1000) - claimed.created_ms  # by two clocks, so it may be anything
        self._put(
            Release(
                job_id=claimed.job_id,
                lease=claimed.lease,
                offset=len(claimed.token_ids),
                token_ids=[],
                fingerprint=self._fingerprint,
                delay_ms=min(max(age_ms // 4, DEFER_MS), MAX_DEFER_MS),
            )
        )

    def release(self, job: ServedJob, delay_ms: int = 0) -> None:
        """Another engine shall go on where this one stands, after this time."""
        self._put(
            Release(
                job_id=job.job_id,
                lease=job.lease,
                offset=job.num_saved,
                token_ids=job.generation.token_ids[job.num_saved :],
                fingerprint=self._fingerprint,
                delay_ms=delay_ms,
            )
        )

    def _end(self, job: ServedJob, state: EndState, reason: EndReason, error: JobError | None = None) -> None:
        sequence = job.generation.sequence
        usage = Usage(prompt_tokens=sequence.num_prompt_tokens, completion_tokens=len(sequence.output_token_ids))
        self._put(
            Finish(
                job_id=job.job_id,
                lease=job.lease,
                state=state,
                finish_reason=reason,
                usage=usage,
                event=self._last_event(job),
                error=error,
            )
        )

    def _is_checkpoint_due(self, job: ServedJob, now_s: float) -> bool:
        if job.is_alone:  # engines have died with it: each token that it gets shows that it is not to blame
            return True
        num_unsaved = len(job.generation.token_ids) - job.num_saved
        return num_unsaved >= CHECKPOINT_TOKENS or now_s - job.saved_at_s >= CHECKPOINT_INTERVAL_S

    def _append(self, job: ServedJob, now_s: float, event: Event | None) -> None:
        token_ids = job.generation.token_ids
        self._put(
            Append(
                job_id=job.job_id,
                lease=job.lease,
                offset=job.num_saved,
                token_ids=token_ids[job.num_saved :],
                fingerprint=self._fingerprint,
                event=event,
            )
        )
        job.num_saved = len(token_ids)
        job.saved_at_s = now_s
        if event is not None:
            job.num_published = event.offset + len(event.token_ids)

    def _next_event(self, job: ServedJob) -> Event | None:
        start, end = job.num_published, job.generation.num_settled()
        if end <= start:
            return None
        text = job.generation.text_between(start, end)
        return Event(offset=start, token_ids=job.generation.token_ids[start:end], text=text)

    def _last_event(self, job: ServedJob) -> Event | None:
        start = job.num_published
        token_ids = job.generation.token_ids[start:]
        text = job.generation.final_text_after(start)
        return Event(offset=start, token_ids=token_ids, text=text) if token_ids else None
