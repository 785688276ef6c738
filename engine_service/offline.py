"""The offline face: generate from a list of prompts in this process, without Redis.

    from millrace import LLM, SamplingParams

    with LLM(model="examples/tiny_model") as llm:
        for output in llm.generate(["3 + 4 =", "20 + 22 ="], SamplingParams(temperature=0, max_tokens=8)):
            print(output.outputs[0].text)

Arguments and outputs have the names that vLLM's offline class gives them, so that scripts move over by their import.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import msgspec

from millrace.engine_service.build import build_engine
from millrace.engine_service.config import EngineConfig, checked
from millrace.engine_service.core.scheduler import SchedulerStats
from millrace.engine_service.engine import EngineMetrics, Progress
from millrace.engine_service.errors import ConfigurationError, EngineError
from millrace.engine_service.generation import Generation
from millrace.engine_service.model_files import eos_token_ids, resolve_model
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.text import Tokenizer
from millrace.producer.checks import shown
from millrace.producer.messages import GenerationRequest, InvalidRequest, SamplingParams

logger = logging.getLogger("millrace.engine")

Prompt: TypeAlias = str | list[int] | Mapping[str, Any]


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One generated text."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """Owns an engine with its workers for as long as it lives. Use it from one thread; close it with `shutdown()`."""

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        executor: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | str | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        max_parallel_loading_workers: int | None = None,
    ) -> None:
        """Load the model. Raises `ConfigurationError` when an option or the model can't work.

        `enforce_eager` is accepted for scripts that say it: every step runs eagerly in this version.
        """
        options: dict[str, Any] = {
            "model": str(model) if isinstance(model, Path) else model,
            "tokenizer": str(tokenizer) if isinstance(tokenizer, Path) else tokenizer,
            "dtype": dtype,
            "device": device,
            "executor": executor,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "kv_cache_memory": kv_cache_memory,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "max_parallel_loading_workers": max_parallel_loading_workers,
        }
        config = checked(options, EngineConfig)
        if not isinstance(seed, int):
            raise ConfigurationError(f"seed: expected `int`, got `{type(seed).__name__}`")
        path = resolve_model(config.model)
        self._tokenizer = Tokenizer(Path(config.tokenizer)) if config.tokenizer else _own_tokenizer(path)
        self._engine = build_engine(config, path, is_service=False)
        self._seeds = random.Random(seed)
        try:
            facts = self._engine.start()
        except BaseException:
            self._engine.shutdown()
            raise
        self._admission = Admission(facts, self._tokenizer, eos_token_ids(path))

    def __repr__(self) -> str:
        return f"LLM({self._engine})"

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt; the outputs come in the prompts' order.

        A prompt is a string, a list of token ids, or {"prompt_token_ids": [...]} or {"prompt": "..."}; the sampling
        parameters are one for all or a list, one for each. Raises `InvalidRequest`, before anything runs, for a prompt that
        can't be served, and `EngineError` when a generation is lost with its workers for good.
        """
        requests = []
        for number, prompt in enumerate(_as_prompts(prompts)):
            with _named(number):
                requests.append(_as_request(prompt))
        generations = []
        for number, (request, sampling) in enumerate(
            zip(requests, _as_params(sampling_params, len(requests)), strict=True)
        ):
            with _named(number):
                generations.append(self._admit(request, sampling))
        self._run(generations, use_tqdm)
        return [_output(number, *pair) for number, pair in enumerate(zip(requests, generations, strict=True))]

    def stats(self) -> SchedulerStats:
        """Counts of the scheduler: running, waiting, free blocks, preemptions so far."""
        return self._engine.scheduler.stats()

    def metrics(self) -> EngineMetrics:
        """Figures of the engine and its executor: times, rates, pool use, restarts."""
        return self._engine.metrics()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back: the KV pool, and the weights (1: kept in host memory, 2: dropped)."""
        self._engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take back what `tags` name of "weights" and "kv_cache", or both. `generate` works when both are there."""
        self._engine.wake_up(tags)

    def shutdown(self) -> None:
        """Stop the workers and give their memory back."""
        self._engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _admit(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        prompt_token_ids = self._admission.prompt_token_ids(request)
        drawn_seed = self._seeds.getrandbits(64)
        return self._admission.admit(prompt_token_ids, params, drawn_seed=drawn_seed)

    def _run(self, generations: list[Generation], use_tqdm: bool) -> None:
        from tqdm.auto import tqdm

        self._engine.check_workers()  # what happened to them since the last call is not these generations' doing
        for generation in generations:
            self._engine.add(generation)
        try:
            with tqdm(total=len(generations), desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while self._engine.has_work:
                    bar.update(sum(_is_over(progress) for progress in self._engine.step()))
        finally:
            for generation in generations:
                self._engine.abort(generation)  # nothing is left when all went well


def _is_over(progress: Progress) -> bool:
    if progress.failure is not None:
        raise EngineError(f"{progress.failure.kind}: {progress.failure.message}")
    return progress.finish_reason is not None


def _own_tokenizer(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer(path)
    except ConfigurationError as error:
        if (path / "tokenizer.json").exists():
            raise
        logger.warning("%s; prompts must be token ids", error)
        return None


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Errors of the block name the prompt that is at fault, from 0."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(error.field, f"{error.message} (prompt number {number})") from error


def _as_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequest("prompts", f"must be a prompt or a list of prompts, got {shown(prompts)}")
    found = list(prompts)
    return [found] if found and isinstance(found[0], int) else found


def _as_request(prompt: Any) -> GenerationRequest:
    if isinstance(prompt, str):
        return GenerationRequest(prompt=prompt)
    if isinstance(prompt, Mapping):
        for name in prompt.keys() - _PROMPT_KEYS:
            raise InvalidRequest(str(name), f"a prompt has one of {', '.join(_PROMPT_KEYS)}, and nothing else")
        return GenerationRequest(**prompt)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise InvalidRequest("prompt", f"must be a string, a list of token ids or an object, got {shown(prompt)}")
    return GenerationRequest(prompt_token_ids=list(prompt))


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


def _as_params(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    is_list = isinstance(sampling_params, SequenceOf)
    if not is_list or not all(isinstance(params, SamplingParams) for params in sampling_params):
        rule = "must be SamplingParams or a list of them"
        raise InvalidRequest("sampling_params", f"{rule}, got {shown(sampling_params)}")
    if len(sampling_params) != num_prompts:
        message = f"must be one or as many as the prompts, got {len(sampling_params)} for {num_prompts} prompts"
        raise InvalidRequest("sampling_params", message)
    return list(sampling_params)


def _output(number: int, request: GenerationRequest, generation: Generation) -> RequestOutput:
    assert generation.finish_reason is not None
    completion = CompletionOutput(
        index=0,
        text=generation.final_text(),
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
    )
    prompt_token_ids = generation.sequence.prompt_token_ids
    return RequestOutput(
        request_id=str(number), prompt=request.prompt, prompt_token_ids=prompt_token_ids, outputs=[completion]
    )
