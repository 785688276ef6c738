"""A generation request: the prompt, the sampling parameters, and its place in the queue. Checked when it is created."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec

from millrace.producer.chat import messages, template_kwargs, tool_choice, tools
from millrace.producer.checks import (
    NamesUnknown,
    boolean,
    check_fields,
    field_checks,
    integer,
    mapping,
    matching,
    number,
    small_object,
    text,
    token_ids,
)
from millrace.producer.errors import InvalidRequest
from millrace.producer.sampling import SamplingParams
from millrace.producer.structured import class_remedy, from_response_format
from millrace.results.errors import shown
from millrace.results.keys import NAME_PATTERN
from millrace.results.messages import DEFAULT_RETRIES

ID_PATTERN = r"[A-Za-z0-9._-]{1,128}"
TENANT_PATTERN = BATCH_PATTERN = NAME_PATTERN
MAX_SECONDS = 1e10
"""The largest time and duration: as seconds since the epoch, the year 2286."""
MAX_RETRIES = 100

_OF_DURATIONS = {timedelta: "; use its .total_seconds()"}
_OF_TIMES = {datetime: "; use its .timestamp()"}


class GenerationRequest(
    msgspec.Struct, metaclass=NamesUnknown, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True
):
    """One generation: exactly one of prompt, prompt_token_ids and messages, and the sampling parameters. As JSON it has at
    most 1 MiB.

    Raises InvalidRequest, a ValueError, which names the field.
    """

    id: Annotated[str | None, matching(ID_PATTERN)] = None
    """The job's id. None: a random one. The same request under the same id is the same job."""
    model: Annotated[str | None, text] = None
    """The name of the model that the queue must serve. None: any."""
    prompt: Annotated[str | None, text] = None
    """The text to continue."""
    prompt_token_ids: Annotated[list[int] | None, _prompt_ids] = None
    """The token ids to continue: at most 200,000, together with the other numbers and fields of the request."""
    messages: Annotated[list[dict[str, Any]] | None, messages] = None
    """A chat for the model's chat template: objects with `role` and `content`."""
    tools: Annotated[list[dict[str, Any]] | None, tools] = None
    """The functions that the model may call, in OpenAI's form: {"type": "function", "function": {"name": ...}}."""
    tool_choice: Annotated[str | dict[str, Any] | None, tool_choice] = "auto"
    """"auto": the model may call `tools`. "none": the prompt contains them, and calls stay text. "required": it calls at
    least one. {"type": "function", "function": {"name": ...}}: it calls this one. Arguments of the last two fit the
    schemas."""
    parallel_tool_calls: Annotated[bool, boolean] = True
    """False: only the first tool call of an output counts."""
    add_generation_prompt: Annotated[bool, boolean] = True
    """Whether the chat template ends the prompt with the beginning of the assistant's message."""
    continue_final_message: Annotated[bool, boolean] = False
    """Whether the output continues the text of the last message; needs `add_generation_prompt` to be false."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, template_kwargs] = None
    """Variables for the chat template, such as {"enable_thinking": false}. At most 16 KiB as JSON."""
    response_format: Annotated[dict[str, Any] | None, _response_format] = None
    """The form of the output as OpenAI's API names it. It becomes `SamplingParams.structured_outputs`."""
    sampling: Annotated[SamplingParams, _sampling] = msgspec.field(default_factory=SamplingParams)
    """How tokens are sampled, and when the text ends."""
    tenant: Annotated[str, matching(TENANT_PATTERN)] = "default"
    """The account that the job belongs to. Tenants share the engines fairly."""
    priority: Annotated[int, integer(-(2**31), 2**31 - 1)] = 0
    """Order within the tenant: lower numbers first."""
    stream: Annotated[bool, boolean] = False
    """Publish output while it is generated, also if nobody reads it."""

    deadline_s: Annotated[float | None, number(0.0, MAX_SECONDS, above_low=True, remedies=_OF_DURATIONS)] = None
    """Seconds from the submission until the job expires, also while it runs."""
    delay_s: Annotated[float | None, number(0.0, MAX_SECONDS, remedies=_OF_DURATIONS)] = None
    """Seconds from the submission until the job may start."""
    run_at: Annotated[float | None, number(0.0, MAX_SECONDS, remedies=_OF_TIMES)] = None
    """When the job may start, in seconds since the epoch. A time in the past means now."""
    meta: Annotated[dict[str, Any] | None, small_object] = None
    """Your own data: kept with the job and returned in `Job.meta`. At most 16 KiB as JSON."""
    cache_salt: Annotated[str | None, text] = None
    """Prompts share cached blocks only with prompts of the same salt. A salt for each tenant separates the tenants."""
    max_retries: Annotated[int, integer(0, MAX_RETRIES)] = DEFAULT_RETRIES
    """How often the job is tried again after a temporary failure, with growing delays."""

    def __post_init__(self) -> None:
        given = check_fields(self, _CHECKS)
        num_prompts = (self.prompt is not None) + (self.prompt_token_ids is not None) + (self.messages is not None)
        if num_prompts != 1:
            amount = "none" if num_prompts == 0 else "more than one"
            raise InvalidRequest("prompt", f"give exactly one of prompt, prompt_token_ids and messages, got {amount}")
        if self.response_format is not None:
            self._take_response_format(self.response_format)
        if not _TIMES.isdisjoint(given):
            self._check_times()
        if not CHAT_FIELDS.isdisjoint(given):
            self._check_chat()

    def _take_response_format(self, response_format: dict[str, Any]) -> None:
        wanted = from_response_format(response_format)
        if wanted is not None:
            if (other := self.sampling.structured_outputs) is not None:
                raise InvalidRequest("response_format", f"cannot be combined with {other.field}; give one of them")
            msgspec.structs.force_setattr(
                self, "sampling", msgspec.structs.replace(self.sampling, structured_outputs=wanted)
            )
        msgspec.structs.force_setattr(self, "response_format", None)

    def _check_chat(self) -> None:
        if self.messages is None:
            for name, default in _CHAT_DEFAULTS:
                if (value := getattr(self, name)) != default and value not in ([], {}):
                    raise InvalidRequest(name, "needs messages; leave it out for a prompt")
        elif self.continue_final_message:
            self._check_continuation(self.messages[-1])
        for name in ("tools", "chat_template_kwargs"):
            if not getattr(self, name):
                msgspec.structs.force_setattr(self, name, None)  # an empty one means the same
        self._check_tool_choice()
        if self.tools is None:  # without tools these mean nothing
            msgspec.structs.force_setattr(self, "tool_choice", "auto")
            msgspec.structs.force_setattr(self, "parallel_tool_calls", True)

    def _check_tool_choice(self) -> None:
        if self.tool_choice in ("auto", "none"):
            return
        if (form := self.sampling.structured_outputs) is not None:
            raise InvalidRequest("tool_choice", f"cannot be combined with {form.field}; use auto or none")
        if not self.tools:
            raise InvalidRequest(
                "tool_choice", f"{shown(self.tool_choice)} needs `tools`; give some, or use auto or none"
            )
        names = [tool["function"]["name"] for tool in self.tools]
        if isinstance(self.tool_choice, dict) and self.tool_choice["function"]["name"] not in names:
            raise InvalidRequest("tool_choice", f"{shown(self.tool_choice)} names no tool of `tools`; use auto or none")

    def _check_continuation(self, last_message: dict[str, Any]) -> None:
        name = "continue_final_message"
        if self.add_generation_prompt:
            raise InvalidRequest(name, "cannot be combined with add_generation_prompt; set that one to false")
        if not last_message.get("content"):
            raise InvalidRequest(name, "needs a last message with content")

    def _check_times(self) -> None:
        for name in ("deadline_s", "delay_s", "run_at"):
            if (value := getattr(self, name)) is not None:
                msgspec.structs.force_setattr(self, name, float(value))  # 5 and 5.0 are equal on the wire
        if self.delay_s is not None and self.run_at is not None:
            raise InvalidRequest("run_at", "cannot be combined with delay_s; give one of them")
        if self.deadline_s is not None and self.delay_s is not None and self.deadline_s <= self.delay_s:
            raise InvalidRequest("deadline_s", f"is {self.deadline_s:g}, but must be above delay_s, {self.delay_s:g}")


def _prompt_ids(value: Any) -> str | None:
    return token_ids(value) or (None if value else "must not be empty")


def _response_format(value: Any) -> str | None:
    return f"{wrong}{class_remedy(value)}" if (wrong := mapping(value)) else None


def _sampling(value: Any) -> str | None:
    return None if isinstance(value, SamplingParams) else f"must be SamplingParams, got {shown(value)}"


_CHECKS = field_checks(GenerationRequest)
CHAT_FIELDS = {
    *("tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message"),
    "chat_template_kwargs",
}
_CHAT_DEFAULTS = [(name, default) for name, (default, _) in _CHECKS.items() if name in CHAT_FIELDS]
"""The defaults of the fields that need messages."""
_TIMES = {"deadline_s", "delay_s", "run_at"}
