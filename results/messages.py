"""What producers and engines write into the queue and get from it: submissions, claims, writes, signals.

Standard library and msgspec only. A job's body is raw JSON here; the producer package defines its fields.

A job yields one text, or several: its candidates, with the index 0 to n - 1. What is written of the only candidate of a job
has no index (None).

Offsets count output tokens of one candidate from 0. An event covers the half-open range [offset, offset + len(token_ids))
and its text is exactly what those tokens added; the events of a candidate cover its output without gap or overlap.
"""

from __future__ import annotations

from typing import Literal, NewType, get_args

import msgspec

from millrace.results.logprobs import LazyJson

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
WITHOUT_RESULT = TERMINAL_STATES - {"finished"}
"""States of jobs that can be run again."""


EndReason = Literal["stop", "length", "error", "cancelled", "expired"]


class JobError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a job failed: a sentence for people and a kind for programs."""

    kind: str
    """"invalid_request", "model_mismatch", "fingerprint_mismatch", "crashed", "nan_logits" or "internal"."""
    message: str
    field: str | None = None
    """The request's field at fault, where there is one."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of tokens of a job."""

    prompt_tokens: int
    completion_tokens: int
    """Output tokens of all candidates."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the engine's prefix cache."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a model calls."""

    name: str
    arguments: str
    """A JSON object. The model has written it: it may not fit the function."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool in the output of a chat, in OpenAI's form."""

    index: int = 0
    """Which call of the output it is, from 0."""
    id: str
    type: str = "function"
    function: FunctionCall


class ChatOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of a chat consists of, or what an event adds to it."""

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
    """The number of these tokens that are in events."""


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
    checkpoints: list[Checkpoint]
    """Of all candidates, by index."""
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
    logprobs: list[list[bytes]] = []
    """For each candidate the JSON of each token in its checkpoint, see `results.logprobs`. Empty if there is none."""


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
    logprobs: LazyJson | None = None
    """The JSON list of the tokens, see `results.logprobs`, where they are wanted."""
    chat: ChatOutput | None = None
    """What the event adds to the parts of a chat's output. None: the text is content."""


class NewOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint `token_ids` of a candidate at `offset`, and publish `event` if given. Known tokens are skipped."""

    offset: int
    token_ids: list[int]
    event: Event | None = None
    index: int | None = None
    logprobs: LazyJson | None = None
    """The JSON of each token in a line, where they are wanted."""


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
    """Reason of the job, and of candidate 0 if the job has finished."""
    usage: Usage
    events: list[Event] = []
    finish_reasons: list[EndReason] = []
    """Reason of each candidate, if there are several."""
    stop_reasons: list[int | str | None] = []
    """Of each candidate the stop string or the stop token at which it ended, if any has ended at one."""
    error: JobError | None = None
    is_retryable: bool = False
    first_token_s: float | None = None
    """When the first token came (`time.monotonic`); None where this engine has not sampled it."""
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
    next_beat_ms: int = 2**31
    """Until the next heartbeat should come: that of another engine may expire, or a delay or deadline is over."""
    reset_number: int = 0
    """Number of the last requested reset of the prefix cache. It grows with each request. 0: there was none."""


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
    """Size of the whole field."""
