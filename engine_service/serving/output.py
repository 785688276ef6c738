"""Decides when the tokens of running jobs become safe and when they become visible, and ends their records.

    published      saved          produced
    [0 ......... p)[p ...... s)[s ........ t)     p <= s <= t, in output tokens
    readers see it
    the checkpoint holds it

One write moves both bounds: the event that it publishes is in the checkpoint that it saves.
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
    JobId,
    Lease,
    Release,
    Usage,
    Write,
)

EVENT_INTERVAL_S = 0.05
"""How often a watched job publishes its new tokens; the first token is published at once."""
CHECKPOINT_INTERVAL_S = 1.0
CHECKPOINT_TOKENS = 64
"""An unwatched job is saved when it is this far ahead of its checkpoint, in time or in tokens."""
DEFER_MS = 1000
"""How long a job that needs a newer or larger engine is delayed before it can be claimed again."""
MAX_DEFER_MS = 15_000
"""The longest such delay, for an old job that needs a newer engine. It comes back in front of the queue: if many came back
each second, an engine would have no time for the jobs behind them."""


class Output:
    """Turns the progress of jobs into writes. `put` takes them and never blocks."""

    def __init__(self, put: Callable[[Write], None], fingerprint: str) -> None:
        self._put = put
        self._fingerprint = fingerprint

    def begin(self, job: ServedJob) -> None:
        """Record that a job which runs alone is about to be computed."""
        self._put(Begin(job_id=job.job_id, lease=job.lease))

    def advance(self, job: ServedJob, now_s: float) -> None:
        """Write the new tokens of a job if an event or a checkpoint is due."""
        if job.is_watched:
            if job.is_alone or job.num_published == 0 or now_s - job.saved_at_s >= EVENT_INTERVAL_S:
                self._append(job, now_s, self._next_event(job))
        elif self._is_checkpoint_due(job, now_s):
            self._append(job, now_s, event=None)

    def finish(self, job: ServedJob, reason: StopReason) -> None:
        """End a job that has its whole output."""
        self._end(job, "finished", reason)

    def abort(self, job: ServedJob, state: Literal["cancelled", "expired"]) -> None:
        """End a job that was cancelled or whose deadline has passed. Its output so far is its result."""
        self._end(job, state, state)

    def fail(self, job: ServedJob, error: JobError) -> None:
        """End a job that can't continue. Its output so far stays readable."""
        self._end(job, "failed", "error", error)

    def refuse(self, claimed: ClaimedJob, error: JobError) -> None:
        """End a job that could not start. It is tried again after an error of ours, but not after one of the request."""
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
        """Leave a job to an engine of a newer version, for a quarter of the job's age each time."""
        age_ms = int(time.time() * 1000) - claimed.created_ms  # the clocks may differ, so it may have any value
        self.give_back(claimed, min(max(age_ms // 4, DEFER_MS), MAX_DEFER_MS))

    def give_back(self, claimed: ClaimedJob, delay_ms: int = 0) -> None:
        """Release a job that was not started."""
        self._release(claimed.job_id, claimed.lease, len(claimed.token_ids), [], delay_ms)

    def release(self, job: ServedJob, delay_ms: int = 0) -> None:
        """Save the output so far and let any engine continue the job, after this delay."""
        unsaved = job.generation.token_ids[job.num_saved :]
        self._release(job.job_id, job.lease, job.num_saved, unsaved, delay_ms)

    def _release(self, job_id: JobId, lease: Lease, offset: int, token_ids: list[int], delay_ms: int) -> None:
        self._put(
            Release(
                job_id=job_id,
                lease=lease,
                offset=offset,
                token_ids=token_ids,
                fingerprint=self._fingerprint,
                delay_ms=delay_ms,
            )
        )

    def _end(self, job: ServedJob, state: EndState, reason: EndReason, error: JobError | None = None) -> None:
        sequence = job.generation.sequence
        usage = Usage(
            prompt_tokens=sequence.num_prompt_tokens,
            completion_tokens=len(sequence.output_token_ids),
            cached_tokens=min(sequence.num_cached_tokens or 0, sequence.num_prompt_tokens),
        )
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
        if job.is_alone:  # engines have died with it: each saved token shows that the job is not the cause
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
