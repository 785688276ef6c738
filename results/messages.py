"""The types of the job record: states, claims, writes, events, and the job as a reader gets it.

Standard library and msgspec only. A job's body is raw JSON here; the producer package defines its fields.

A job yields one text, or several: its candidates, with the index 0 to n - 1. What is written of the only candidate of a job
has no index (None).

Offsets count output tokens of one candidate from 0. An event covers the half-open range [offset, offset + len(token_ids))
and its text is exactly what those tokens added; the events of a candidate cover its output without gap or overlap.
"""

from __future__ import annotations

from typing import Any, Literal, NewType, get_args

import msgspec

from millrace.results.errors import OutputNotParsed
from millrace.results.logprobs import LazyJson, TokenLogprobs

JobId = NewType("JobId", str)
EngineId = NewType("EngineId", str)
"""One run of an engine service: a restarted engine has another id."""
Lease = NewType("Lease", int)
"""Fencing token of one claim of one job: grows with every claim, and a write that carries an old one is refused."""

PROTOCOL = 1
"""The version that `docs/protocol.md` describes; each record has its own."""
DEFAULT_RETRIES = 2

EndState = Literal["finished", "failed", "cancelled", "expired"]
TERMINAL_STATES: frozenset[str] = frozenset(get_args(EndState))

Obstacle = Literal["never_served", "no_engine", "paused", "asleep"]
"""Why no job of a queue begins."""

EndReason = Literal["stop", "length", "error", "cancelled", "expired"]


class JobError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a job failed: a sentence for people and a kind for programs."""

    kind: str
    """"invalid_request", "model_mismatch", "fingerprint_mismatch", "crashed", "nan_logits" or "internal"."""
    message: str
    field: str | None = None
    """The request's field at fault, where there is one."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    """Of all candidates."""
    cached_tokens: int = 0
    """Of the prompt tokens, those whose keys and values the engine's prefix cache had."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a model calls."""

    name: str
    arguments: str
    """A JSON object. The model has written it: it may not fit the function."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool in the output of a chat, in OpenAI's form."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of a chat consists of."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A new job: its body, and what the queue has to know about it."""

    job_id: JobId
    body: bytes
    """The request as JSON, in its canonical form."""
    digest: str
    """SHA-256 of the canonical body, hexadecimal: the same id with the same digest is the same job."""
    cost: int
    """Estimated tokens, for fair share and the claim budget."""
    seed: int
    prompt_digest: str | None = None
    """How the prompt begins: a claim may prefer jobs that begin like others. 8 hexadecimal digits, or None."""
    tenant: str = "default"
    priority: int = 0
    is_streamed: bool = False
    delay_ms: int = 0
    run_at_ms: int | None = None
    """The job begins not before, in ms since the epoch; a past time is now. Takes precedence over `delay_ms`."""
    deadline_ms: int | None = None
    """From the submission until the job expires, in any state."""
    max_retries: int | None = None
    """Most attempts after retryable failures; None: DEFAULT_RETRIES."""
    meta: bytes | None = None
    """A JSON object that readers get back unchanged."""
    batch: str | None = None
    n: int = 1
    """Candidates."""


class Checkpoint(msgspec.Struct, frozen=True):
    """What earlier attempts have produced of one candidate."""

    token_ids: list[int]
    num_published: int
    """Of those, the tokens in events."""


class ClaimedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that an engine now owns, with the output of earlier attempts."""

    job_id: JobId
    lease: Lease
    attempt: int
    body: bytes
    seed: int
    cost: int
    crash_count: int
    """Engines that died with this job since its last progress. From 2 on it has to run alone."""
    token_ids: list[int]
    """The checkpoint of candidate 0: the output tokens that Redis has."""
    num_published: int
    """Its output tokens in events; at most as many as in the checkpoint."""
    is_watched: bool
    """A reader follows it live: publish output without delay."""
    created_ms: int
    protocol: int = PROTOCOL
    """The record's version. A job with one above PROTOCOL is released, with a delay, for a newer engine."""
    tenant: str = "default"
    priority: int = 0
    """Within the tenant; lower numbers first."""
    corruption: str | None = None
    """What is wrong with a record that was changed so that the job cannot run: the job fails with this message."""
    others: list[Checkpoint] = []
    """Of the candidates from the second on."""
    logprobs: list[list[bytes]] = []
    """Of each candidate the JSON of each token in its checkpoint, see `results.logprobs`. Empty without any."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Of all candidates, by index."""
        return [Checkpoint(self.token_ids, self.num_published), *self.others]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[ClaimedJob]
    num_ready: int
    """Jobs still ready after this claim."""
    num_set_aside: int
    """Jobs in front that nobody can run now, after their deadline or of another model. After a claim with no others, claim
    again for the jobs behind them."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Output that becomes visible; the text is exactly what the token ids add."""

    offset: int
    token_ids: list[int]
    text: str
    index: int | None = None
    logprobs: bytes | None = None
    """The JSON list of the tokens, see `results.logprobs`, where they are wanted."""


class NewOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint `token_ids` of a candidate at `offset`, and publish `event` if given. Known tokens are skipped."""

    offset: int
    token_ids: list[int]
    event: Event | None = None
    index: int | None = None
    logprobs: list[bytes] = []
    """The JSON of each token, where they are wanted."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """Keep new output of candidates. Idempotent."""

    job_id: JobId
    lease: Lease
    fingerprint: str
    outputs: list[NewOutput]


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The engine begins to compute a job that runs alone: its death counts against the job from now on. Idempotent."""

    job_id: JobId
    lease: Lease


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """End the job: the last event of each candidate (all unpublished output), then the terminal entry.

    A failure with `is_retryable` ends the job only without retries left. Otherwise the outcome is "retrying": the job keeps
    its checkpoints and waits for its next attempt, and no event is published.
    """

    job_id: JobId
    lease: Lease
    state: EndState
    finish_reason: EndReason
    """Of the job, and of candidate 0 when the job has finished."""
    usage: Usage
    events: list[Event] = []
    finish_reasons: list[EndReason] = []
    """Of each candidate, where there are several."""
    error: JobError | None = None
    is_retryable: bool = False
    chat: list[ChatOutput | None] = []
    """Of each candidate; None, or an empty list: the text is the content."""
    first_token_age_ms: int | None = None
    """How long ago the first token came; None where this engine has not sampled it."""
    prompt_logprobs: LazyJson | None = None
    """The JSON list of the prompt's tokens, see `results.logprobs`, where they are wanted."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Give the job back with its output so far; the attempt does not count."""

    job_id: JobId
    lease: Lease
    fingerprint: str
    outputs: list[NewOutput] = []
    """No event of them is published."""
    delay_ms: int = 0


Write = Append | Begin | Finish | Release


class Recovery(msgspec.Struct, frozen=True):
    """What `recover` has done with the jobs of one dead engine."""

    engine_id: EngineId
    num_jobs: int
    """All jobs, also those that failed."""
    failed: list[JobId]
    """Jobs with which too many engines have died."""


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a heartbeat: what changed for the jobs that the engine holds."""

    lost: list[JobId]
    """No longer the engine's: drop them, write nothing."""
    cancelled: list[JobId]
    """To be cancelled."""
    watched: list[JobId]
    """Readers follow them live."""
    expired: list[JobId] = []
    """Their deadline has passed: end them as expired."""
    sleep_level: int = 0
    """The requested sleep level: 0 (awake), 1 or 2."""
    next_lapse_ms: int = 2**31
    """Until the next heartbeat of any engine expires."""
    reset_number: int = 0
    """Of the last requested reset of the prefix cache; grows with each request. 0: there was none."""


SignalKind = Literal["cancel", "watch", "expire", "mismatch", "mismatch_failed"]


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A notice to the engine that runs a job, sooner than the reply to its next heartbeat. "mismatch" and "mismatch_failed"
    are for the log of an engine that could not continue a job of another model: it waits for another one, or has failed."""

    kind: SignalKind
    job_id: JobId


class InboxEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the inbox, not yet parsed."""

    entry_id: str
    """Where to continue reading, and what `accept` and `reject` take."""
    raw: bytes
    """The field `job`; empty when the entry has none. Only its beginning when it is longer than the reader accepts."""
    num_bytes: int
    """Of the whole field."""


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job, as `stream()` yields it."""

    id: str
    """Where a reader can resume: `stream(job_id, after=event.id)`."""
    offset: int
    """Of the first token in the output of its candidate. Of the terminal event: the tokens in all events."""
    token_ids: list[int]
    text: str
    """What this event adds; the texts of the events of a candidate join to its text. The terminal event adds none."""
    index: int = 0
    """The candidate."""
    state: str | None = None
    """Set on the terminal event: finished, failed, cancelled or expired."""
    is_restart: bool = False
    """Set when the entries after `after` were trimmed from the stream: this event starts at offset 0 and replaces all that
    was read before, of every candidate."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`; None where they are not wanted, and in the terminal event."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Server times in milliseconds since the epoch; None before the event, or where there is none."""

    created_ms: int
    started_ms: int | None = None
    first_token_ms: int | None = None
    """Known at the end; None also where an earlier attempt has sampled it."""
    ended_ms: int | None = None
    due_ms: int | None = None
    """When a delayed job may begin."""
    deadline_ms: int | None = None

    @property
    def queued_s(self) -> float | None:
        """From the submission to the first attempt, with the delay of a delayed job."""
        return _seconds(self.created_ms, self.started_ms)

    @property
    def prefill_s(self) -> float | None:
        """From the first attempt to the first token."""
        return _seconds(self.started_ms, self.first_token_ms)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end."""
        return _seconds(self.first_token_ms, self.ended_ms)

    @property
    def total_s(self) -> float | None:
        """From the submission to the end."""
        return _seconds(self.created_ms, self.ended_ms)


def _seconds(begin_ms: int | None, end_ms: int | None) -> float | None:
    return None if begin_ms is None or end_ms is None else max(0, end_ms - begin_ms) / 1000


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generated text: a candidate of a job, or of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """None while the job is not done."""
    stop_reason: int | str | None = None
    """Only of `LLM`: the stop string, or the id in `stop_token_ids`, at which the text ended."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`; None where they are not wanted."""
    cumulative_logprob: float | None = None
    """The log-probability of all tokens together."""
    content: str | None = None
    """The text without reasoning and tool calls; None where nothing is left, and in `LLM`."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    """Of a chat with `tools`."""

    def parsed(self, response_model: Any = None) -> Any:
        """Return the value of the text, which must be JSON: an object of `response_model`, or without it what JSON gives.

        `response_model` is a pydantic model or another type that msgspec decodes. Raises OutputNotParsed for an output that
        a limit has cut, or that does not parse.
        """
        if self.finish_reason != "stop":
            raise OutputNotParsed(self.finish_reason)
        text = self.text if self.content is None else self.content
        try:
            if hasattr(response_model, "model_validate_json"):
                return response_model.model_validate_json(text)
            return msgspec.json.decode(text, type=Any if response_model is None else response_model)
        except (ValueError, msgspec.DecodeError) as error:
            raise OutputNotParsed(self.finish_reason, str(error)) from error


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a reader gets it."""

    id: str
    state: str
    text: str
    """Of candidate 0, as are `token_ids`."""
    token_ids: list[int]
    outputs: list[CompletionOutput]
    """All candidates, by index."""
    finish_reason: str | None
    usage: Usage | None
    error: JobError | None
    timings: Timings
    """Times such as `started_ms` and `first_token_ms`, and durations: `queued_s`, `prefill_s`, `decode_s`, `total_s`."""
    attempt: int = 0
    num_retries: int = 0
    """Attempts after retryable failures so far."""
    meta: dict[str, Any] | None = None
    batch: str | None = None
    redrive_of: str | None = None
    """The job of which this is the redrive."""
    redriven_as: str | None = None
    """The redrive of this job."""
    has_result: bool = True
    """False when the result has expired and the record has not: the text is lost, not empty."""
    engine: str | None = None
    """The engine that runs the job, or has ended it."""
    tenant: str = "default"
    num_tokens: int = 0
    """Output tokens so far, of all candidates. A running job's grow every second, or every 64 tokens."""
    prompt: str = ""
    """How the prompt begins; only of `get` and `list_jobs`."""
    content: str | None = None
    """The text without reasoning and tool calls; None where nothing is left. Of candidate 0, as are the next two."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    """What the model calls, of a chat with `tools`."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each token of the prompt, None for the first one; None where they are not wanted, and before the end."""

    @property
    def is_done(self) -> bool:
        """Whether the state is terminal."""
        return self.state in TERMINAL_STATES

    def parsed(self, response_model: Any = None) -> Any:
        """Return what `CompletionOutput.parsed` returns for candidate 0. Raises OutputNotParsed."""
        if not self.outputs:
            raise OutputNotParsed(self.finish_reason)
        return self.outputs[0].parsed(response_model)


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one queue."""

    queued: int
    delayed: int
    running: int
    engines: int
    finished: int
    failed: int
    cancelled: int
    expired: int
    generated_tokens: int
    stale_writes: int = 0
    """Writes refused because the job was no longer the writer's."""
    waiting_tokens: int = 0
    """Expected tokens of the queued and the delayed jobs."""
    oldest_queued_ms: int = 0
    """Age of the oldest queued job; 0 without one."""
    is_paused: bool = False
    sleep_levels: dict[str, int] = {}
    """By the id of each engine alive: 0 awake, 1 asleep with its weights in host memory, 2 without them."""
    rejected: int = 0
    """Inbox entries that could not become a job; `list_rejected` returns the last ones."""
    was_served: bool = True
    """False when no engine has ever served the queue: its name may be mistyped."""

    @property
    def obstacle(self) -> Obstacle | None:
        """Why no job begins now; None where engines claim jobs."""
        if not self.engines:
            return "no_engine" if self.was_served else "never_served"
        if self.is_paused:
            return "paused"
        return "asleep" if all(self.sleep_levels.values()) else None


class RejectedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An inbox entry that could not become a job, not even a failed one."""

    rejected_ms: int
    """When, server time."""
    id: str | None
    """The id in the entry, where it belongs to another job."""
    error: JobError
    raw: str
    """The beginning of the entry."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of when a job begins; fair share and new jobs change it."""

    state: str
    num_ahead: int | None
    """Jobs that are likely to begin before it; None unless it is queued."""
    eta_s: float | None
    """Seconds until it begins, at the pace of the last completions; None where there were none lately."""


class BatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one batch, by state."""

    batch: str
    created_ms: int
    queued: int
    delayed: int
    running: int
    finished: int
    failed: int
    cancelled: int
    expired: int
    eta_s: float | None
    """Seconds until all have ended, at the pace of the last completions; None where there were none lately."""

    @property
    def total(self) -> int:
        return self.num_open + self.finished + self.failed + self.cancelled + self.expired

    @property
    def num_open(self) -> int:
        return self.queued + self.delayed + self.running

    @property
    def is_done(self) -> bool:
        return self.num_open == 0
