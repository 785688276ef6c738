"""The keyword arguments of `submit`, shared by both clients, and the request that they form."""

from __future__ import annotations

from typing import Any, TypedDict

from millrace.producer.checks import remedy
from millrace.producer.errors import InvalidRequest
from millrace.producer.request import GenerationRequest
from millrace.producer.sampling import SamplingParams
from millrace.producer.structured import StructuredOutputs, for_model


class SubmitOptions(TypedDict, total=False):
    """Fields of GenerationRequest and of SamplingParams; see there for their meaning and defaults."""

    job_id: str | None
    """`GenerationRequest.id`."""
    prompt_token_ids: list[int] | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None
    response_format: dict[str, Any] | None
    response_model: Any
    """A pydantic model, a type with models in it such as `list[Model]`, or another type that msgspec decodes: the output is
    JSON of its schema. See `Job.parsed`."""
    model: str | None
    tenant: str
    priority: int
    stream: bool
    deadline_s: float | None
    delay_s: float | None
    run_at: float | None
    meta: dict[str, Any] | None
    cache_salt: str | None
    max_retries: int

    sampling: SamplingParams
    """Either all sampling parameters together, or some of the following."""
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | list[str] | None
    stop_token_ids: list[int]
    ignore_eos: bool
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    truncate_prompt_tokens: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[Any, float] | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    thinking_token_budget: int | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    structured_outputs: StructuredOutputs | dict[str, Any] | None


_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__)
_REQUEST_NAMES = frozenset(GenerationRequest.__struct_fields__) - {"id", "prompt"}


def build_request(prompt: str | None, options: SubmitOptions) -> GenerationRequest:
    """Return the request for the arguments of `submit`. Raises InvalidRequest, also for an unknown name."""
    if options.get("response_model") is not None and options.get("structured_outputs") is not None:
        raise InvalidRequest("response_model", "cannot be combined with structured_outputs; give one of them")
    fields: dict[str, Any] = {"prompt": prompt}
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name == "job_id":
            fields["id"] = value
        elif name == "response_model":
            own |= {} if value is None else {"structured_outputs": for_model(value)}
        elif name in _SAMPLING_NAMES:
            own[name] = value
        elif name in _REQUEST_NAMES:
            fields[name] = value
        else:
            todo = "use job_id" if name == "id" else remedy(name, SubmitOptions.__annotations__)
            raise InvalidRequest(name, f"is not an argument of submit; {todo}")
    if own:
        if fields.get("sampling") is not None:
            name = next(name for name in options if name in own or name == "response_model")
            raise InvalidRequest(name, "cannot be combined with sampling; give one of them")
        fields["sampling"] = SamplingParams(**own)
    try:
        return GenerationRequest(**fields)
    except InvalidRequest as error:
        if error.field == "id":
            raise InvalidRequest("job_id", error.message) from None
        raise
