"""The offline API: generate from a list of prompts, without Redis.

    from millrace import LLM, SamplingParams

    with LLM(model="examples/tiny_model") as llm:
        for output in llm.generate(["3 + 4 =", "20 + 22 ="], SamplingParams(temperature=0, max_tokens=8)):
            print(output.outputs[0].text)

Arguments and outputs have the names of vLLM's offline class, so that a script only changes its import.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, TypeVar, cast

from millrace.engine_service.build import build_executor, with_local_adapter
from millrace.engine_service.chat.template import template_source
from millrace.engine_service.config import EngineConfig, checked
from millrace.engine_service.core.scheduler import SchedulerStats
from millrace.engine_service.deferred_signals import DeferredSignals
from millrace.engine_service.engine import Engine, EngineMetrics
from millrace.engine_service.errors import ConfigurationError, EngineError
from millrace.engine_service.generation import Generation
from millrace.engine_service.model_files import default_sampling, eos_token_ids, resolve_model
from millrace.engine_service.prompts import as_list, as_params, as_prompts, as_request, number_in_errors
from millrace.engine_service.request_output import GenerationFailed, RequestOutput, Times, output_of
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.text import Tokenizer
from millrace.engine_service.vllm_arguments import dtype_name, names_as_given, translated
from millrace.executor.phases import timed
from millrace.executor.rank.worker import WAKE_TAGS
from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams
from millrace.producer.checks import remedy
from millrace.results.errors import shown

logger = logging.getLogger("millrace.engine")

Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
Messages: TypeAlias = list[dict[str, Any]]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto", "string"),
    "tokenization_kwargs": ({},),
}
"""Arguments of vLLM's `generate` and `chat` without an equal here, and the values that change nothing. None never does, also
for arguments that are not named here, such as `lora_request` and `priority`."""


_METHODS_OF_VLLM = frozenset(["beam_search", "classify", "embed", "encode", "reward", "score"])
"""Methods of vLLM's `LLM` for what Millrace does not do."""
_INSTEAD = {
    "collective_rpc": "LLM.reload_weights reads other weights, and LLM.metrics() has figures of the workers",
    **dict.fromkeys(
        ["llm_engine", "model_config"],
        "LLM.max_model_len is the context length, and LLM.metrics() has other figures",
    ),
}
"""Attributes of vLLM's `LLM` that give access to its parts, and what does here what scripts use them for."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _leaving_no_reference(method: _Method) -> _Method:
    """Let the error of a call refer to nothing that the call has used. A notebook keeps the last error with its frames:
    they would keep the `LLM`, its workers and their memory, also when another one has taken its name."""

    @functools.wraps(method)
    def call(self: LLM, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            del self
            raise

    return cast(_Method, call)


class LLM:
    """Owns an engine and its workers until `shutdown`. Use it from one thread at a time."""

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        adapter: str | Path | None = None,
        tokenizer: str | Path | None = None,
        chat_template: str | Path | None = None,
        dtype: Any = "auto",
        quantization: str | None = None,
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
        attention: str = "auto",
        batch_invariant: bool = False,
        swap_space_gib: float = 0.0,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        seed: int | None = 0,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        max_parallel_loading_workers: int | None = None,
        enable_prefix_caching: bool = True,
        run_ahead: bool | None = None,
        **vllm_arguments: Any,
    ) -> None:
        """Load the model. The options are those of `millrace serve`; its --help describes them. `chat_template` can also be
        the template itself, as a text.

        `seed` seeds the requests that give no seed of their own. Other arguments of vLLM's `LLM` are taken where they change
        nothing, and otherwise refused. Raises `ConfigurationError` when an option or the model can't work.
        """
        given = {name: value for name, value in locals().items() if name in EngineConfig.__struct_fields__}
        given |= {"dtype": dtype_name(dtype), **translated(vllm_arguments)}
        del given["chat_template"]  # read here: the option of the engine is the name of a file, and this may be a text
        template = None if chat_template is None else template_source(chat_template)
        # None is the default, as with vLLM.
        given = {
            name: value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
            for name, value in given.items()
            if value is not None or name == "model"
        }
        seed = 0 if seed is None else seed
        paths = {name: str(value) for name, value in given.items() if isinstance(value, Path)}
        with names_as_given(vllm_arguments):
            config = checked({**given, **paths}, EngineConfig)
        if not isinstance(seed, int):
            raise ConfigurationError(f"seed: expected `int`, got `{type(seed).__name__}`")
        path = resolve_model(config.model, config.revision)
        config = with_local_adapter(config)
        with names_as_given(vllm_arguments):
            ranks = build_executor(config, path, is_service=False)
        self._engine = Engine(ranks, config.for_scheduler())
        self._model, self._weights = config.model, config.adapter or str(path)
        self._seeds = random.Random(seed)
        self._request_numbers = itertools.count()
        self._default_sampling = {} if vllm_arguments.get("generation_config") == "vllm" else default_sampling(path)
        try:
            self.get_default_sampling_params()
        except InvalidRequest as error:
            rule = f"is not valid: {error}; correct it, or set generation_config='vllm', which leaves it out"
            raise ConfigurationError(f"model: {path / 'generation_config.json'} {rule}") from error
        try:
            ranks.begin_start()
            with timed(logger, "tokenizer"):
                self._tokenizer = _load_tokenizer(config, path)
            with timed(logger, "workers"), names_as_given(vllm_arguments):
                facts = self._engine.start()
            admission = Admission(facts, self._tokenizer, eos_token_ids(path, config.adapter), config.max_logprobs)
            self._admission = admission if template is None else admission.with_template(template)
        except BaseException:
            self._engine.shutdown()
            raise
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._user_thread: int | None = None
        self._shut_down = weakref.finalize(self, _shut_down, self._engine, self._admission, self._pid)
        self._shut_down.atexit = False  # a thread may still use it then; the workers end with this process anyway

    def __repr__(self) -> str:
        return f"LLM({self._model!r}{'' if self._shut_down.alive else ', shut down'})"

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            rule = " of vLLM is not supported: Millrace generates text and chats" if name in _METHODS_OF_VLLM else ""
            if name in _INSTEAD:
                rule = f" of vLLM does not exist; {_INSTEAD[name]}"
            raise AttributeError(f"LLM.{name}{rule or ' does not exist'}", name=name, obj=self)

    @_leaving_no_reference
    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Generate for every prompt. Return the outputs in the order of the prompts.

        A prompt is a string, a list of token ids, or an object with one of "prompt", "prompt_token_ids" and "messages", such
        as a `TextPrompt` or a `TokensPrompt`.
        `sampling_params` is one for all prompts or a list with one for each. `use_tqdm` shows a progress bar;
        it can be a function that makes one, like tqdm. Arguments of vLLM's `generate` are taken where they change nothing.

        Raises `InvalidRequest`, before anything runs, for an argument or a prompt that can't work, `Asleep` while the engine
        sleeps, `GenerationFailed`, which has the other outputs, when generations fail, and `EngineError` when the workers
        are lost for good.
        """
        _refuse_unsupported(vllm_arguments, "generate")
        given = as_prompts(prompts)
        return self._generate(given, as_request, self._params(sampling_params, len(given)), use_tqdm, self._admission)

    @_leaving_no_reference
    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several. Each is a list of messages with `role` and `content`, which the
        model's chat template makes a prompt of, or `chat_template`: a text in Jinja, or a file with one.

        The other arguments are those of a request. The outputs are raw: `LLM` parses no tool calls."""
        _refuse_unsupported(vllm_arguments, "chat")
        messages = as_list(messages)
        if not isinstance(messages, list | tuple):
            raise InvalidRequest(
                "messages", f"must be a list of messages, or a list of such lists, got {shown(messages)}"
            )
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        admission = self._admission
        if chat_template is not None:
            try:
                admission = admission.with_template(template_source(chat_template))
            except ConfigurationError as error:
                raise InvalidRequest("chat_template", str(error).removeprefix("chat_template: ")) from error

        def chat_request(chat: Any) -> GenerationRequest:
            return GenerationRequest(
                messages=list(chat) if isinstance(chat, tuple) else chat,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )

        params = self._params(sampling_params, len(chats))
        return self._generate(chats, chat_request, params, use_tqdm, admission)

    def _params(self, sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
        return as_params(
            self.get_default_sampling_params() if sampling_params is None else sampling_params, num_prompts
        )

    def _generate(
        self,
        prompts: SequenceOf[Any],
        make_request: Callable[[Any], GenerationRequest],
        all_params: list[SamplingParams],
        use_tqdm: bool | Callable[..., Any],
        admission: Admission,
    ) -> list[RequestOutput]:
        requests, texts, candidates = [], [], []
        with self._in_use():  # a fork would also read the answers about the forms of this process
            for number, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
                with number_in_errors(number):
                    requests.append(make_request(prompt))
                    texts.append(admission.prompt_text(requests[-1]))
                    token_ids = admission.prompt_token_ids(requests[-1], params.truncate_prompt_tokens, text=texts[-1])
                    params = admission.with_form(params, requests[-1], token_ids)
                    drawn_seed = self._seeds.getrandbits(64)
                    salt = requests[-1].cache_salt
                    candidates.append(admission.admit(token_ids, params, drawn_seed=drawn_seed, cache_salt=salt))
            arrival_s = time.time()
            times, failures = self._run([generation for some in candidates for generation in some], use_tqdm)
        outputs: list[RequestOutput | None] = []
        reasons = []
        for number, (text, some) in enumerate(zip(texts, candidates, strict=True)):
            reason = next((failures[each] for each in some if each in failures), None)
            request_number = next(self._request_numbers)
            if reason is None:
                outputs.append(output_of(request_number, text, some, arrival_s, times))
            else:
                outputs.append(None)
                reasons.append(f"{reason} (prompt number {number})")
        if reasons:
            others = f"; {len(reasons)} of {len(outputs)} prompts have failed" if len(reasons) > 1 else ""
            raise GenerationFailed(f"{reasons[0]}{others}", outputs)
        return [output for output in outputs if output is not None]

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, of transformers' class. Raises `EngineError` if there is none."""
        if self._tokenizer is None:
            raise EngineError("the model has no tokenizer; name one with LLM(tokenizer=DIR)")
        return self._tokenizer.of_transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what is used where no `sampling_params` are given: those of the model's generation_config.json, if it has
        some. `LLM(generation_config="vllm")`: always `SamplingParams()`."""
        return SamplingParams(**self._default_sampling)

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its output have together: the argument of this name or the model's limit, or
        less where the KV pool does not hold as many."""
        return self._engine.facts.max_model_len

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
        with self._in_use(), DeferredSignals():
            self._engine.sleep(level)

    def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        """Restore what `tags` name, "weights" or "kv_cache"; by default both. `generate` needs both."""
        if tags is not None and not (isinstance(tags, list | tuple) and all(tag in WAKE_TAGS for tag in tags)):
            raise InvalidRequest("tags", f"must be a list of {' and '.join(WAKE_TAGS)}, got {shown(tags)}")
        with self._in_use(), DeferredSignals():
            self._engine.wake_up(tags)

    def reload_weights(self, path: str | Path | None = None) -> None:
        """Read the weights again from where they came from, or from `path`, another directory of a model with the same
        shapes, as after a step of training, or of a LoRA adapter for the model. The tokenizer and the configuration stay.
        The `LLM` may sleep. Afterwards it is awake, and has no cached prompts. Later sleeps and restarts of workers read
        the same directory.

        Raises `InvalidRequest` if there is no such directory, and `EngineError` if tensors are missing or have other shapes.
        Then it sleeps at level 2 until this method is called with a good directory.
        """
        try:
            directory = self._weights if path is None else str(resolve_model(str(path), or_adapter=True))
        except ConfigurationError as error:
            raise InvalidRequest("path", str(error).removeprefix("model: ")) from error
        with self._in_use(), DeferredSignals():
            self._engine.reload_weights(directory)

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks of earlier prompts. The workers are not asked."""
        with self._in_use():
            self._engine.scheduler.pool.reset_cache()

    def shutdown(self) -> None:
        """Stop the workers and free their memory. Nothing can be generated afterwards. Also done when nobody has this object
        any more; and the workers end with the program. Raises `EngineError` while another thread uses this object."""
        is_owner = self._shut_down.alive and os.getpid() == self._pid
        is_nested = self._user_thread == threading.get_ident()  # as in a signal handler, which must not be refused
        with self._in_use() if is_owner and not is_nested else contextlib.nullcontext():
            self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Raises `EngineError` for a call that would hang or disturb another one."""
        if os.getpid() != self._pid:
            raise EngineError(f"this LLM belongs to process {self._pid}, of which this one is a fork; make one here")
        if not self._shut_down.alive:
            raise EngineError("this LLM has been shut down; make another one")
        if not self._lock.acquire(blocking=False):
            raise EngineError("another thread uses this LLM; use it from one thread at a time")
        self._user_thread = threading.get_ident()
        try:
            yield
        except Exception as error:
            if self._shut_down.alive:
                raise
            raise EngineError("this LLM has been shut down during the call; make another one") from error
        finally:
            self._user_thread = None
            self._lock.release()

    def _run(
        self, generations: list[Generation], use_tqdm: bool | Callable[..., Any]
    ) -> tuple[dict[Generation, Times], dict[Generation, str]]:
        """Return the times of the generations, and why some have failed."""
        from tqdm.auto import tqdm

        times: dict[Generation, Times] = {}
        failures: dict[Generation, str] = {}
        followed = {generation for generation in generations if generation.sequence.is_followed}
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        how = {"desc": "texts", "disable": not use_tqdm, "dynamic_ncols": True}
        with DeferredSignals() as signals, contextlib.ExitStack() as at_the_end:
            self._engine.check_workers()  # a loss since the last call is not to be blamed on these generations
            for generation in generations:
                generation.sequence.is_followed = True  # until its first token
                self._engine.add(generation)
                at_the_end.callback(self._engine.abort, generation)  # does nothing for those that have ended
            with _older_objects_kept(), make_bar(total=len(generations), **how) as bar:
                while self._engine.has_work:
                    signals.handle()
                    num_ended = 0
                    for progress in self._engine.step():
                        generation, now_s = progress.generation, time.time()
                        if progress.failure is not None:
                            failures[generation] = f"{progress.failure.kind}: {progress.failure.message}"
                            num_ended += 1
                            continue
                        has_ended = progress.finish_reason is not None
                        num_ended += has_ended
                        if generation not in times:
                            times[generation] = Times(now_s)
                            generation.sequence.is_followed = generation in followed
                        if has_ended:
                            times[generation].finished_s = now_s
                            generation.final_text()  # it keeps the text, which is decoded beside the next step here
                    if num_ended:  # or it would write a line to a file in each tenth of a second
                        bar.update(num_ended)
        return times, failures


def _shut_down(engine: Engine, admission: Admission, pid: int) -> None:
    if os.getpid() == pid:  # a fork does not own the workers
        engine.shutdown()
        admission.close()


@contextlib.contextmanager
def _older_objects_kept() -> Iterator[None]:
    """Let the garbage collector pass over the objects from before. A program that has imported torch and transformers has
    hundreds of thousands, and to look at them all takes longer than a step."""
    is_first = gc.get_freeze_count() == 0  # else the program has done it, or another thread generates too
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()


def _refuse_unsupported(arguments: Mapping[str, Any], method: str) -> None:
    for name, value in arguments.items():
        if value is not None and value not in _NEUTRAL.get(name, ()):
            is_of_sampling = name in SamplingParams.__struct_fields__
            instead = f"give it in SamplingParams({name}=...)" if is_of_sampling else remedy(name, ())
            raise InvalidRequest(name, f"is not supported by {method}; {instead}")


def _load_tokenizer(config: EngineConfig, path: Path) -> Tokenizer | None:
    """Return the tokenizer of the options or of the model in `path`. None: neither has one."""
    given_path = config.tokenizer_path
    try:
        return Tokenizer(given_path or path)
    except ConfigurationError as error:
        if given_path is not None or (path / "tokenizer.json").exists():
            raise
        logger.warning("%s; prompts must be token ids", error)
        return None
