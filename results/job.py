"""A job and its events, as readers get them."""

from __future__ import annotations

from typing import Any, Self, TypeVar, overload

import msgspec

from millrace.results.errors import JobFailed, OutputNotParsed, shown
from millrace.results.logprobs import TokenLogprobs
from millrace.results.messages import TERMINAL_STATES, JobError, ToolCall, Usage
from millrace.results.models import adapter

MAX_SHOWN_TEXT = 80
"""Characters of a text that the repr of a job has."""

Model = TypeVar("Model")


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job, as `stream()` yields it."""

    id: str
    """Where a reader can resume: `stream(job_id, after=event.id)`."""
    offset: int
    """Position of its first token in the output of its candidate. In the terminal event: number of tokens in all events."""
    token_ids: list[int]
    text: str
    """The text that this event adds. The joined texts of a candidate's events are its text. Empty in the terminal event."""
    index: int = 0
    """The candidate."""
    content: str | None = None
    """What this event adds to the candidate's `content`: its text, and in a chat what of it is neither reasoning nor a tool
    call. None for nothing. Joined, those of all events are what `Job` has; so are the next two."""
    reasoning: str | None = None
    """What it adds to the reasoning. None for nothing."""
    tool_calls: list[ToolCall] = []
    """The tool calls that it completes."""
    state: str | None = None
    """Set on the terminal event: finished, failed, cancelled or expired."""
    is_restart: bool = False
    """Set when the entries after `after` were trimmed from the stream: this event starts at offset 0 and replaces all that
    was read before, of every candidate."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`. None if the request wants none, and in the terminal event."""
    finish_reason: str | None = None
    """In the terminal event: what `Job.finish_reason` is. None before; so are `usage` and `error`."""
    finish_reasons: list[str] = []
    """In the terminal event: that of each candidate, if there are several."""
    usage: Usage | None = None
    """In the terminal event: what `Job.usage` is. None if no engine ended the job."""
    error: JobError | None = None
    """In the terminal event of a failed job: why it failed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON objects, as `millrace tail --json` prints it."""
        fields: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return fields


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

    @property
    def durations(self) -> dict[str, float | None]:
        """All four by name."""
        return {name: getattr(self, name) for name in ("queued_s", "prefill_s", "decode_s", "total_s")}


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
    """The stop string, or the id in `stop_token_ids`, at which the text ended. None if it ended otherwise, also at an end
    token of the model."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`. None if the request wants none."""
    cumulative_logprob: float | None = None
    """The log-probability of all tokens together."""
    content: str | None = None
    """The text without reasoning and tool calls. None if nothing is left, and in `LLM`."""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    """The tool calls in a chat with `tools`."""

    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None

    @overload
    def parsed(self, response_model: None = None) -> Any: ...
    @overload
    def parsed(self, response_model: type[Model]) -> Model: ...
    @overload
    def parsed(self, response_model: Any) -> Any: ...
    def parsed(self, response_model: Any = None) -> Any:
        """Return the value of the text, which must be JSON: an object of `response_model`, or without it what JSON gives.

        `response_model` is a pydantic model, a type with models in it such as `list[Model]`, or another type that msgspec
        decodes. Raises OutputNotParsed for an output that a limit has cut, or that does not parse.
        """
        if self.finish_reason != "stop":
            raise OutputNotParsed(self.finish_reason)
        text = self.text if self.content is None else self.content
        try:
            if hasattr(response_model, "model_validate_json"):
                return response_model.model_validate_json(text)
            if (by_pydantic := adapter(response_model)) is not None:
                return by_pydantic.validate_json(text)
            return msgspec.json.decode(text, type=Any if response_model is None else response_model)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise OutputNotParsed(self.finish_reason, f"{self._stopped}{error}") from error

    @property
    def _stopped(self) -> str:
        """What may have cut the text, for an error; "" if it ended by itself."""
        if self.stop_reason is None:
            return ""
        what = "stop string" if type(self.stop_reason) is str else "stop token"
        return f"the {what} {shown(self.stop_reason)} has ended the output: "


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job as a reader gets it."""

    id: str
    state: str
    """delayed, queued or running, and at last finished, failed, cancelled or expired. Reading a job raises no error
    in any of them; `raise_for_state` does."""
    text: str
    """The text of candidate 0. The token ids are also those of candidate 0."""
    token_ids: list[int]
    outputs: list[CompletionOutput]
    """All candidates, by index."""
    finish_reason: str | None
    """Of candidate 0: stop, length, error, cancelled or expired. None until it has ended."""
    stop_reason: int | str | None = None
    """Of candidate 0: the stop string, or the id in `stop_token_ids`, at which the text ended, if it did."""
    usage: Usage | None
    """Counted tokens. None until it has ended."""
    error: JobError | None
    """Why it failed. None for a job in any other state."""
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
    """False if the result has expired and the record has not: the text is lost, not empty."""
    engine: str | None = None
    """The engine that runs the job, or has ended it."""
    tenant: str = "default"
    num_tokens: int = 0
    """Output tokens so far, of all candidates. Updated every second, or every 64 tokens, while the job runs."""
    prompt: str = ""
    """The beginning of the prompt. Only `get` and `list_jobs` return it."""
    content: str | None = None
    """The text of candidate 0 without reasoning and tool calls. None if nothing is left."""
    reasoning: str | None = None
    """The reasoning of candidate 0."""
    tool_calls: list[ToolCall] = []
    """The tool calls of candidate 0, in a chat with `tools`."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, None for the first one. None if the request wants none, and before the end."""

    @property
    def is_done(self) -> bool:
        """Whether the state is terminal."""
        return self.state in TERMINAL_STATES

    def raise_for_state(self) -> Self:
        """Return the job itself if it is finished. Raises JobFailed if it has failed, was cancelled, has expired, or has not
        ended yet."""
        if self.state == "finished":
            return self
        kind, reason = (self.error.kind, self.error.message) if self.error else (None, "")
        raise JobFailed(self.id, self.state, kind, reason)

    def __repr__(self) -> str:
        """One line, without most of a long text."""
        text = self.text if len(self.text) <= MAX_SHOWN_TEXT else f"{self.text[: MAX_SHOWN_TEXT - 3]}..."
        names = ("id", "state", "finish_reason", "num_tokens")
        return f"Job({', '.join(f'{name}={getattr(self, name)!r}' for name in names)}, {text=})"

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON objects, as `millrace get --json` prints it; `timings` has the durations too.

        `outputs` and `content` are left out if they only repeat `text`, and `prompt` if it was not read.
        """
        fields: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        fields["timings"] |= self.timings.durations
        if len(self.outputs) == 1 and self.outputs[0].logprobs is None:
            del fields["outputs"]
        if self.content == self.text:
            del fields["content"]
        if not self.prompt:
            del fields["prompt"]
        return fields

    @overload
    def parsed(self, response_model: None = None) -> Any: ...
    @overload
    def parsed(self, response_model: type[Model]) -> Model: ...
    @overload
    def parsed(self, response_model: Any) -> Any: ...
    def parsed(self, response_model: Any = None) -> Any:
        """Return what `CompletionOutput.parsed` returns for candidate 0. Raises OutputNotParsed."""
        if not self.has_result:
            raise OutputNotParsed(None, f"the result of job {self.id!r} has expired, and its output with it")
        if self.error is not None:
            error = f"job {self.id!r} has failed: {self.error.kind}: {self.error.message}"
            raise OutputNotParsed(self.finish_reason, error)
        if not self.outputs:
            raise OutputNotParsed(self.finish_reason)
        return self.outputs[0].parsed(response_model)
