"""The offline API: generate from a list of prompts, without Redis.

    from millrace import LLM, SamplingParams

    with LLM(model="examples/tiny_model") as llm:
        for output in llm.generate(["3 + 4 =", "20 + 22 ="], SamplingParams(temperature=0, max_tokens=8)):
            print(output.outputs[0].text)

Arguments and outputs have the names of vLLM's offline class, so that a script only changes its import.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import msgspec

from millrace.engine_service.build import build_engine
from millrace.engine_service.config import EngineConfig, checked
from millrace.engine_service.core.scheduler import SchedulerStats
from millrace.engine_service.engine import EngineMetrics, Progress
from millrace.engine_service.errors import ConfigurationError, EngineError
from millrace.engine_service.generation import Generation
from millrace.engine_service.model_files import default_sampling, eos_token_ids, resolve_model
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.text import Tokenizer
from millrace.engine_service.vllm_arguments import translated
from millrace.executor.phases import timed
from millrace.executor.rank.worker import WAKE_TAGS
from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams
from millrace.producer.checks import shown
from millrace.results.logprobs import TokenLogprobs, as_logprobs, cumulative
from millrace.results.messages import CompletionOutput

logger = logging.getLogger("millrace.engine")

Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
Messages: TypeAlias = list[dict[str, Any]]

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto", "string"),
    "lora_request": (),
    "tokenization_kwargs": ({},),
}
"""Arguments of vLLM's `chat` without an equal here, and the values that change nothing. None changes nothing either."""


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """When a prompt was computed, in seconds since the epoch."""

    arrival_time: float
    first_token_time: float
    """Of the candidate that had its first token first."""
    finished_time: float


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The `n` candidates, by index."""
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each token of the prompt, None for the first one; None where they are not wanted."""
    metrics: RequestMetrics


class LLM:
    """Owns an engine and its workers until `shutdown`. Use it from one thread."""

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
        max_logprobs: int = 20,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | str | None = None,
        kv_cache_dtype: str = "auto",
        swap_space_gib: float = 0.0,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        max_parallel_loading_workers: int | None = None,
        enable_prefix_caching: bool = True,
        run_ahead: bool | None = None,
        **vllm_arguments: Any,
    ) -> None:
        """Load the model. The options are those of `millrace serve`; its --help describes them.

        `seed` seeds the requests that give no seed of their own. `enforce_eager` has no effect: every step runs eagerly in
        this version. Other arguments of vLLM's `LLM` are taken where they change nothing, and otherwise refused. Raises
        `ConfigurationError` when an option or the model can't work.
        """
        given = {name: value for name, value in locals().items() if name in EngineConfig.__struct_fields__}
        given |= translated(vllm_arguments)
        paths = {name: str(value) for name, value in given.items() if isinstance(value, Path)}
        config = checked({**given, **paths}, EngineConfig)
        if not isinstance(seed, int):
            raise ConfigurationError(f"seed: expected `int`, got `{type(seed).__name__}`")
        path = resolve_model(config.model)
        self._engine = build_engine(config, path, is_service=False)
        self._seeds = random.Random(seed)
        self._default_sampling = default_sampling(path)
        self._uses_models_defaults = vllm_arguments.get("generation_config") == "auto"
        try:
            self._engine.begin_start()
            with timed(logger, "tokenizer"):
                given_path = Path(config.tokenizer).expanduser() if config.tokenizer else None
                self._tokenizer = Tokenizer(given_path) if given_path else _own_tokenizer(path)
            with timed(logger, "workers"):
                facts = self._engine.start()
        except BaseException:
            self._engine.shutdown()
            raise
        self._admission = Admission(facts, self._tokenizer, eos_token_ids(path), config.max_logprobs)

    def __repr__(self) -> str:
        return f"LLM({self._engine})"

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt. Return the outputs in the order of the prompts.

        A prompt is a string, a list of token ids, or an object with one of "prompt", "prompt_token_ids" and "messages".
        `sampling_params` is one for all prompts or a list with one for each. `use_tqdm` shows a progress bar.

        Raises `InvalidRequest`, before anything runs, for an argument or a prompt that can't work, `Asleep` while the engine
        sleeps, and `EngineError` when a generation fails or the workers are lost for good.
        """
        given = _as_prompts(prompts)
        return self._generate(given, _as_request, self._params(sampling_params, len(given)), use_tqdm, self._admission)

    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several. Each is a list of messages with `role` and `content`, which the
        model's chat template makes a prompt of, or `chat_template`, a text in Jinja.

        The other arguments are those of a request. The outputs are raw: `LLM` parses no tool calls."""
        for name, value in vllm_arguments.items():
            if value is not None and value not in _WITHOUT_EFFECT.get(name, ()):
                raise InvalidRequest(name, "is not supported by chat; leave it out")
        if not isinstance(messages, list | tuple):
            raise InvalidRequest(
                "messages", f"must be a list of messages, or a list of such lists, got {shown(messages)}"
            )
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        admission = self._admission
        if chat_template is not None:
            if type(chat_template) is not str:
                raise InvalidRequest("chat_template", f"must be a text in Jinja, got {shown(chat_template)}")
            admission = admission.with_template(chat_template)

        def as_request(chat: Any) -> GenerationRequest:
            return GenerationRequest(
                messages=list(chat) if isinstance(chat, tuple) else chat,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )

        params = self._params(sampling_params, len(chats))
        return self._generate(chats, as_request, params, use_tqdm, admission)

    def _params(self, sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
        if sampling_params is None and self._uses_models_defaults:
            sampling_params = self.get_default_sampling_params()
        return _as_params(sampling_params, num_prompts)

    def _generate(
        self,
        prompts: SequenceOf[Any],
        as_request: Callable[[Any], GenerationRequest],
        all_params: list[SamplingParams],
        use_tqdm: bool,
        admission: Admission,
    ) -> list[RequestOutput]:
        requests, candidates = [], []
        for number, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
            with _number_in_errors(number):
                requests.append(as_request(prompt))
                token_ids = admission.prompt_token_ids(requests[-1], params.truncate_prompt_tokens)
                drawn_seed = self._seeds.getrandbits(64)
                salt = requests[-1].cache_salt
                candidates.append(admission.admit(token_ids, params, drawn_seed=drawn_seed, cache_salt=salt))
        arrival_s = time.time()
        times = self._run([generation for some in candidates for generation in some], use_tqdm)
        return [
            _output(number, request, params, some, arrival_s, times)
            for number, (request, params, some) in enumerate(zip(requests, all_params, candidates, strict=True))
        ]

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, of transformers' class. Raises `EngineError` if there is none."""
        if self._tokenizer is None:
            raise EngineError("the model has no tokenizer; name one with LLM(tokenizer=DIR)")
        return self._tokenizer.of_transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json, where it has some."""
        return SamplingParams(**self._default_sampling)

    def stats(self) -> SchedulerStats:
        """Return the scheduler's counts: sequences running and waiting, free blocks, preemptions so far."""
        return self._engine.scheduler.stats()

    def metrics(self) -> EngineMetrics:
        """Return figures of the engine and its executor: times, rates, pool use, restarts."""
        return self._engine.metrics()

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: the KV pool, and the weights (level 1: kept in host memory, 2: dropped)."""
        if level not in (1, 2):
            raise InvalidRequest("level", f"must be 1 or 2, got {shown(level)}")
        self._engine.sleep(level)

    def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """Restore what `tags` name, "weights" or "kv_cache"; by default both. `generate` needs both."""
        if tags is not None and not (isinstance(tags, list | tuple) and all(tag in WAKE_TAGS for tag in tags)):
            raise InvalidRequest("tags", f"must be a list of {' and '.join(WAKE_TAGS)}, got {shown(tags)}")
        self._engine.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks of earlier prompts. The workers are not asked."""
        self._engine.scheduler.pool.reset_cache()

    def shutdown(self) -> None:
        """Stop the workers and free their memory. Nothing can be generated afterwards."""
        self._engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _run(self, generations: list[Generation], use_tqdm: bool) -> dict[Generation, _Times]:
        from tqdm.auto import tqdm

        self._engine.check_workers()  # a loss since the last call is not to be blamed on these generations
        times: dict[Generation, _Times] = {}
        followed = {generation for generation in generations if generation.sequence.is_followed}
        for generation in generations:
            generation.sequence.is_followed = True  # until its first token
            self._engine.add(generation)
        try:
            with tqdm(total=len(generations), desc="texts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while self._engine.has_work:
                    num_ended = 0
                    for progress in self._engine.step():
                        generation, now_s = progress.generation, time.time()
                        has_ended = _has_ended(progress)
                        num_ended += has_ended
                        if generation not in times:
                            times[generation] = _Times(now_s)
                            generation.sequence.is_followed = generation in followed
                        if has_ended:
                            times[generation].finished_s = now_s
                    bar.update(num_ended)
        finally:
            for generation in generations:
                self._engine.abort(generation)  # does nothing for those that have ended
        return times


class _Times(msgspec.Struct):
    """Of one generation, in seconds since the epoch."""

    first_token_s: float
    finished_s: float = 0.0


def _has_ended(progress: Progress) -> bool:
    """Raises `EngineError` when the generation has failed."""
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
def _number_in_errors(number: int) -> Iterator[None]:
    """Add the number of the prompt, from 0, to the errors of the block."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(error.field, f"{error.message} (prompt number {number})") from error


def _as_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list_like(prompts):
        raise InvalidRequest("prompts", f"must be a prompt or a list of prompts, got {shown(prompts)}")
    found = list(prompts)
    return [found] if found and isinstance(found[0], int) else found


def _as_request(prompt: Any) -> GenerationRequest:
    if isinstance(prompt, str):
        return GenerationRequest(prompt=prompt)
    if isinstance(prompt, Mapping):
        for name in prompt.keys() - _PROMPT_KEYS:
            raise InvalidRequest("prompt", f"may have {', '.join(_PROMPT_KEYS)} and nothing else, got {shown(name)}")
        ids = prompt.get("prompt_token_ids")
        return GenerationRequest(**{**prompt, "prompt_token_ids": list(ids) if _is_list_like(ids) else ids})
    if not _is_list_like(prompt):
        raise InvalidRequest("prompt", f"must be a string, a list of token ids or an object, got {shown(prompt)}")
    return GenerationRequest(prompt_token_ids=list(prompt))


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages", "cache_salt")


def _is_list_like(value: Any) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _as_params(sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
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


def _output(
    number: int,
    request: GenerationRequest,
    params: SamplingParams,
    candidates: list[Generation],
    arrival_s: float,
    times: Mapping[Generation, _Times],
) -> RequestOutput:
    first, prompt_entries = candidates[0].sequence, candidates[0].prompt_entries()
    return RequestOutput(
        request_id=str(number),
        prompt=request.prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=[_completion(index, generation, params) for index, generation in enumerate(candidates)],
        num_cached_tokens=first.num_cached_tokens or 0,
        prompt_logprobs=None if prompt_entries is None else [None, *map(as_logprobs, prompt_entries)],
        metrics=RequestMetrics(
            arrival_time=arrival_s,
            first_token_time=min(times[each].first_token_s for each in candidates),
            finished_time=max(times[each].finished_s for each in candidates),
        ),
    )


def _completion(index: int, generation: Generation, params: SamplingParams) -> CompletionOutput:
    text, reason, token_ids = generation.final_text(), generation.finish_reason, generation.token_ids
    assert reason is not None
    stop_reason: int | str | None = generation.stop_string
    if reason == "stop" and stop_reason is None and token_ids and token_ids[-1] in params.stop_token_ids:
        stop_reason = token_ids[-1]
    logprobs = None
    if generation.sequence.logprobs is not None:
        logprobs = [as_logprobs(generation.entries(number)) for number in range(len(token_ids))]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        finish_reason=reason,
        stop_reason=stop_reason,
        logprobs=logprobs,
        cumulative_logprob=None if logprobs is None else cumulative(logprobs),
    )
