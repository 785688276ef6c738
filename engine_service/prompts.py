"""The prompts and sampling parameters of a call of the offline API, in the forms that vLLM takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict, TypeGuard

from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams
from millrace.results.errors import shown


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


def as_prompts(prompts: Any) -> list[Any]:
    """Return the prompts of a call, which has one prompt or several."""
    prompts = as_list(prompts)
    if hasattr(prompts, "columns"):  # which its iterator yields
        raise InvalidRequest(
            "prompts", "must be a prompt or a list of prompts, not a whole table; give one of its columns"
        )
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list_like(prompts):
        raise InvalidRequest("prompts", f"must be a prompt or a list of prompts, got {shown(prompts)}")
    found = list(prompts)
    return [found] if found and isinstance(found[0], int) else found


def as_request(prompt: Any) -> GenerationRequest:
    """Return the request for one prompt: a string, token ids, or an object with one of them."""
    prompt = as_list(prompt)
    if isinstance(prompt, str):
        return GenerationRequest(prompt=prompt)
    if isinstance(prompt, Mapping):
        for name in prompt.keys() - _PROMPT_KEYS:
            raise InvalidRequest("prompt", f"may have {', '.join(_PROMPT_KEYS)} and nothing else, got {shown(name)}")
        ids = as_list(prompt.get("prompt_token_ids"))
        return GenerationRequest(**{**prompt, "prompt_token_ids": list(ids) if _is_list_like(ids) else ids})
    if not _is_list_like(prompt):
        raise InvalidRequest("prompt", f"must be a string, a list of token ids or an object, got {shown(prompt)}")
    return GenerationRequest(prompt_token_ids=list(prompt))


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages", "cache_salt")


def as_list(value: Any) -> Any:
    """Return an array of NumPy, or a tensor, as a list, and a list of such or of their numbers as one without them."""
    if isinstance(value, list) and value and hasattr(value[0], "tolist"):
        return [as_list(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list_like(value: Any) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def as_params(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters of each prompt."""
    sampling_params = as_list(sampling_params)
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    is_list = isinstance(sampling_params, SequenceOf)
    if not is_list or not all(isinstance(params, SamplingParams) for params in sampling_params):
        rule = "must be SamplingParams or a list of them"
        raise InvalidRequest("sampling_params", f"{rule}, got {shown(sampling_params)}")
    if len(sampling_params) != num_prompts:
        message = (
            f"must be one for all prompts or a list with one for each, got {len(sampling_params)} for {num_prompts}"
        )
        raise InvalidRequest("sampling_params", message)
    return list(sampling_params)


@contextmanager
def number_in_errors(number: int) -> Iterator[None]:
    """Add the number of the prompt, from 0, to the errors of the block."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(error.field, f"{error.message} (prompt number {number})") from error
