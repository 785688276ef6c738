"""The results of the offline API, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.engine_service.errors import EngineError
from millrace.engine_service.generation import Generation
from millrace.results.job import CompletionOutput
from millrace.results.logprobs import TokenLogprobs, as_logprobs, cumulative


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """When a prompt was computed, in seconds since the epoch. The names are those of vLLM's versions 0 and 1."""

    arrival_time: float
    first_scheduled_time: float
    """When the first candidate started."""
    first_token_time: float
    """When the first token of any candidate came."""
    finished_time: float
    num_generation_tokens: int
    """Of all candidates."""

    queued_ts = property(lambda self: self.arrival_time)
    scheduled_ts = property(lambda self: self.first_scheduled_time)
    first_token_ts = property(lambda self: self.first_token_time)
    last_token_time = last_token_ts = property(lambda self: self.finished_time)
    time_in_queue = queued_s = property(lambda self: self.first_scheduled_time - self.arrival_time)
    first_token_latency = property(lambda self: self.first_token_time - self.arrival_time)
    prefill_s = property(lambda self: self.first_token_time - self.first_scheduled_time)
    decode_s = property(lambda self: self.finished_time - self.first_token_time)
    total_s = property(lambda self: self.finished_time - self.arrival_time)


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one prompt."""

    request_id: str
    """Unlike that of any other output of the same `LLM`."""
    prompt: str | None
    """Of a chat, what the template made of it. None for token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The `n` candidates, by index."""
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, None for the first one. None if the request wants none."""
    metrics: RequestMetrics

    def to_dict(self) -> dict[str, Any]:
        """Return the output as JSON objects, such as a line of a file or a row of a table."""
        fields: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return fields


class Times(msgspec.Struct):
    """When one generation had its first token and its end, in seconds since the epoch."""

    first_token_s: float
    finished_s: float = 0.0


class GenerationFailed(EngineError):
    """Raised by `LLM` when generations have failed, after all others have ended. `outputs` has the outputs of all prompts,
    in their order; None where a generation has failed."""

    def __init__(self, message: str, outputs: list[RequestOutput | None]) -> None:
        super().__init__(message)
        self.outputs = outputs


def output_of(
    number: int,
    prompt: str | None,
    candidates: list[Generation],
    arrival_s: float,
    times: Mapping[Generation, Times],
) -> RequestOutput:
    """Return the result of a prompt whose candidates have ended. `arrival_s`: in seconds since the epoch."""
    generation = candidates[0]
    first = generation.sequence
    prompt_logprobs = [None, *map(as_logprobs, generation.prompt_entries())] if generation.has_prompt_entries else None
    return RequestOutput(
        request_id=str(number),
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=[_completion(index, generation) for index, generation in enumerate(candidates)],
        num_cached_tokens=first.num_cached_tokens or 0,
        prompt_logprobs=prompt_logprobs,
        metrics=RequestMetrics(
            arrival_time=arrival_s,
            first_scheduled_time=min(each.scheduled_s or arrival_s for each in candidates),
            first_token_time=min(times[each].first_token_s for each in candidates),
            finished_time=max(times[each].finished_s for each in candidates),
            num_generation_tokens=sum(len(each.token_ids) for each in candidates),
        ),
    )


def _completion(index: int, generation: Generation) -> CompletionOutput:
    text, reason, token_ids = generation.final_text(), generation.finish_reason, generation.token_ids
    assert reason is not None
    logprobs = None
    if generation.sequence.logprobs is not None:
        logprobs = [as_logprobs(generation.entries(number)) for number in range(len(token_ids))]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        finish_reason=reason,
        stop_reason=generation.stop_reason,
        logprobs=logprobs,
        cumulative_logprob=None if logprobs is None else cumulative(logprobs),
    )
