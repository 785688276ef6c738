"""Decides when the tokens of running jobs become safe and when they become visible, and ends their records.

    published      saved          produced
    [0 ......... p)[p ...... s)[s ........ t)     p <= s <= t, in output tokens
    readers see it
    the checkpoint holds it

One write moves both bounds: the event that it publishes is in the checkpoint that it saves. Each candidate of a job has
bounds of its own, and one write moves those of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from millrace.engine_service.generation import Generation
from millrace.engine_service.serving.jobs import Candidate, ServedJob
from millrace.executor.wire.messages import record_bytes
from millrace.results.logprobs import LazyJson, encode_tokens, join_lines, join_tokens
from millrace.results.messages import (
    Append,
    Begin,
    ChatOutput,
    ClaimedJob,
    EndReason,
    EndState,
    Event,
    Finish,
    JobError,
    JobId,
    Lease,
    NewOutput,
    Release,
    Usage,
    Write,
)

_EVENT_INTERVAL_S, _EVENT_S = 0.05, 0.002
"""A watched job publishes its new tokens after the first time, or after the second one for each watched job where that is
shorter: so few readers get each token at once, and many do not cost more than the tokens. The first token is published at
once."""
CHECKPOINT_INTERVAL_S = 1.0
CHECKPOINT_TOKENS = 64
"""An unwatched job is saved before it is further ahead of its checkpoint, in time or in tokens."""
SAVE_EVERY_STEPS = 16
"""Steps between two calls of `save_due`, at most."""
DEFER_MS = 1000
"""How long a job that needs a newer or larger engine is delayed before it can be claimed again."""
MAX_DEFER_MS = 15_000
"""The longest such delay, for an old job that needs a newer engine. It comes back in front of the queue: if many came back
each second, an engine would have no time for the jobs behind them."""
_JSON_BYTES_PER_RECORD_BYTE = 4
"""How much longer the JSON of log-probabilities is than the workers' records, about."""


class Output:
    """Turns the progress of jobs into writes. `put` takes them and never blocks."""

    def __init__(self, put: Callable[[Write], None], fingerprint: str) -> None:
        self._put = put
        self._fingerprint = fingerprint

    def begin(self, job: ServedJob) -> None:
        """Record that a job which runs alone is about to be computed."""
        self._put(Begin(job_id=job.job_id, lease=job.lease))

    def advance(self, job: ServedJob, candidate: Candidate, now_s: float, num_watched: int) -> None:
        """Write the new tokens of a job if an event or a checkpoint is due. `candidate` has new ones. `num_watched`: jobs
        that somebody reads."""
        if job.is_watched:
            interval_s = min(_EVENT_INTERVAL_S, _EVENT_S * num_watched)
            if job.is_alone or candidate.num_published == 0 or now_s - job.saved_at_s >= interval_s:
                self.save(job, now_s)
        elif self._is_checkpoint_due(job, candidate, now_s):
            self.save(job, now_s)

    def save_due(self, jobs: Iterable[ServedJob], now_s: float) -> None:
        """Write the new tokens of the jobs that nobody reads and whose checkpoint is due."""
        for job in jobs:
            if not job.is_watched and any(self._is_checkpoint_due(job, one, now_s) for one in job.candidates):
                self.save(job, now_s)

    def save(self, job: ServedJob, now_s: float) -> None:
        """Write the new tokens of all candidates. Publish them if the job is watched."""
        outputs = [output for one in job.candidates if (output := self._new_output(one, is_shown=job.is_watched))]
        job.saved_at_s = now_s
        if outputs:
            self._put(Append(job_id=job.job_id, lease=job.lease, fingerprint=self._fingerprint, outputs=outputs))

    def finish(self, job: ServedJob) -> None:
        """End a job whose candidates have all ended."""
        reason = job.candidates[0].generation.finish_reason
        assert reason is not None
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
                usage=Usage(prompt_tokens=0, completion_tokens=sum(len(one.token_ids) for one in claimed.checkpoints)),
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
        self._release(claimed.job_id, claimed.lease, [], delay_ms)

    def release(self, job: ServedJob, delay_ms: int = 0) -> None:
        """Save the output so far and let any engine continue the job, after this delay."""
        outputs = [output for one in job.candidates if (output := self._new_output(one, is_shown=False))]
        self._release(job.job_id, job.lease, outputs, delay_ms)

    def _release(self, job_id: JobId, lease: Lease, outputs: list[NewOutput], delay_ms: int) -> None:
        self._put(
            Release(job_id=job_id, lease=lease, fingerprint=self._fingerprint, outputs=outputs, delay_ms=delay_ms)
        )

    def _end(self, job: ServedJob, state: EndState, reason: EndReason, error: JobError | None = None) -> None:
        generations = job.generations
        first = generations[0].sequence
        usage = Usage(
            prompt_tokens=first.num_prompt_tokens,
            completion_tokens=sum(len(generation.token_ids) for generation in generations),
            cached_tokens=min(first.num_cached_tokens or 0, first.num_prompt_tokens),
        )
        reasons: list[EndReason] = [generation.finish_reason or reason for generation in generations]
        stop_reasons = [generation.stop_reason for generation in generations]
        self._put(
            Finish(
                job_id=job.job_id,
                lease=job.lease,
                state=state,
                finish_reason=reason,
                usage=usage,
                events=[event for one in job.candidates if (event := self._last_event(one))],
                first_token_s=job.first_token_s,
                prompt_logprobs=_prompt_logprobs(job) if state != "failed" else None,
                finish_reasons=reasons if len(reasons) > 1 else [],
                stop_reasons=[] if all(each is None for each in stop_reasons) else stop_reasons,
                error=error,
            )
        )

    def _is_checkpoint_due(self, job: ServedJob, candidate: Candidate, now_s: float) -> bool:
        if job.is_alone:  # engines have died with it: each saved token shows that the job is not the cause
            return True
        if now_s - job.saved_at_s >= CHECKPOINT_INTERVAL_S:
            return True
        num_tokens, rules = len(candidate.generation.token_ids), candidate.generation.sequence.stop_rules
        num_unsaved = num_tokens - candidate.num_saved
        if num_unsaved <= CHECKPOINT_TOKENS - SAVE_EVERY_STEPS:
            return False
        return rules.max_tokens - candidate.num_saved > CHECKPOINT_TOKENS  # else it ends before it is further ahead

    def _new_output(self, candidate: Candidate, *, is_shown: bool) -> NewOutput | None:
        """Return the tokens that are not saved yet, with an event if they are shown, and count them as saved."""
        token_ids, offset = candidate.generation.token_ids, candidate.num_saved
        event = self._next_event(candidate) if is_shown else None
        if event is None and len(token_ids) == offset:
            return None
        candidate.num_saved = len(token_ids)
        if event is not None:
            candidate.num_published = event.offset + len(event.token_ids)
        return NewOutput(
            offset=offset,
            token_ids=token_ids[offset:],
            event=event,
            index=candidate.index,
            logprobs=_logprobs(candidate.generation, offset, len(token_ids), join_lines),
        )

    def _next_event(self, candidate: Candidate) -> Event | None:
        generation, start = candidate.generation, candidate.num_published
        if generation.finish_reason is not None:
            return self._last_event(candidate)
        end = generation.num_settled()
        if end <= start:
            return None
        text, chat = generation.text_between(start, end), None
        if (parts := candidate.parts) is not None:
            chat = parts.feed(generation.marked_text_between(start, end, parts.hidden_marks))
        return _event(candidate, end, text, chat)

    def _last_event(self, candidate: Candidate) -> Event | None:
        """Return the rest. It may have no token: what a chat's events held back may be content after all."""
        generation, start, parts = candidate.generation, candidate.num_published, candidate.parts
        end = len(generation.token_ids)
        if start == end:
            held_back = ChatOutput() if parts is None else parts.end("")
            return None if held_back == ChatOutput() else _event(candidate, end, "", held_back)
        chat = None
        if parts is not None:
            chat = parts.end(generation.marked_final_text_after(start, parts.hidden_marks))
        return _event(candidate, end, generation.final_text_after(start), chat)


def _event(candidate: Candidate, end: int, text: str, chat: ChatOutput | None) -> Event:
    """Return the event with the tokens from the last published one up to `end`."""
    generation, start = candidate.generation, candidate.num_published
    return Event(
        offset=start,
        token_ids=generation.token_ids[start:end],
        text=text,
        index=candidate.index,
        logprobs=_logprobs(generation, start, end, join_tokens),
        chat=None if chat == ChatOutput(content=text) else chat,
    )


def _logprobs(
    generation: Generation, start: int, end: int, join: Callable[[Iterable[bytes]], bytes]
) -> LazyJson | None:
    """Return the log-probabilities of the output tokens [start, end), if they are wanted. These tokens are final."""
    if (count := generation.sequence.sampling.logprobs) is None or start == end:
        return None
    num_bytes = _JSON_BYTES_PER_RECORD_BYTE * record_bytes(count) * (end - start)
    return LazyJson(lambda: join(generation.logprobs_between(start, end)), num_bytes)


def _prompt_logprobs(job: ServedJob) -> LazyJson | None:
    generation = job.generations[0]
    if not generation.has_prompt_entries:
        return None
    num_bytes = _JSON_BYTES_PER_RECORD_BYTE * generation.sequence.num_prompt_record_bytes
    return LazyJson(lambda: join_tokens([b"null", *encode_tokens(generation.prompt_entries())]), num_bytes)
