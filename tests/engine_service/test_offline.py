"""Every wrong argument of the offline API is named, before anything starts where possible."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from argparse import ArgumentParser
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tqdm import tqdm
from transformers import AutoConfig

from millrace import LLM, Asleep, EngineArgs, GenerationFailed, StructuredOutputs, TextPrompt, TokensPrompt
from millrace.engine_service import deferred_signals
from millrace.engine_service.errors import ConfigurationError, EngineError
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.producer import InvalidRequest, SamplingParams
from millrace.worker.loading import probe
from millrace.worker.rank_model import RankModel
from millrace.worker.runner import Runner
from tests.e2e.engines import LIMIT_S, TINY
from tests.processes import ROOT, children_of, wait_until


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("model", value) for value in (5, None)],
        *[("max_num_seqs", value) for value in ("5", 0, 1.5, True)],
        *[("max_model_len", value) for value in ("x", 1, 2**64)],
        ("block_size", 0),
        *[("kv_cache_memory", value) for value in ("lots", 1.5, 0, 2**80, "9" * 400)],
        *[("swap_space_gib", value) for value in ("4", -1, math.inf, math.nan)],
        *[("gpu_memory_utilization", value) for value in ("0.9", 0, 1.1, math.nan)],
        *[(name, value) for name in ("device", "dtype", "executor", "tokenizer") for value in (5, "", "a\nb")],
        ("seed", "a"),
        ("tensor_parallel_size", True),
    ],
)
def test_an_option_of_the_offline_face_that_cannot_be_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}: "):
        LLM(**{"model": TINY, name: value})


def test_a_script_takes_the_arguments_of_llm_from_its_command_line() -> None:
    parser = EngineArgs.add_cli_args(ArgumentParser())
    of_llm = inspect.signature(LLM).parameters.values()
    defaults = {each.name: each.default for each in of_llm if each.kind is not inspect.Parameter.VAR_KEYWORD}
    assert vars(parser.parse_args([])) == {**defaults, "model": None}
    options = ["--model", "m", "-tp", "2", "--swap-space", "3", "--no-async-scheduling", "--enforce-eager"]
    changed = {
        "model": "m",
        "tensor_parallel_size": 2,
        "swap_space_gib": 3.0,
        "run_ahead": False,
        "enforce_eager": True,
    }
    assert vars(parser.parse_args(options)) == defaults | changed


@pytest.mark.parametrize("tokenizer", ["/nowhere", Path("/nowhere")])
def test_a_tokenizer_that_was_named_has_to_be_there(tokenizer: str | Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^tokenizer: /nowhere is not a directory; name"):
        LLM(TINY, tokenizer=tokenizer)


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"^model: {tmp_path} has no config.json; name the directory of a model$"
    ):
        LLM(tmp_path)


@pytest.mark.parametrize("config", [{"temperature": 5}, {"top_p": "high"}, {"max_new_tokens": -1}])
def test_a_wrong_sampling_parameter_of_the_model_is_named_with_its_file(config: object, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"^model: .*/generation_config.json is not valid: \w+: must be "):
        LLM(tmp_path, device="cpu", executor="uni", num_blocks=64)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, r"prompts: must be a prompt or a list of prompts, got None"),
        (5, r"prompts: must be "),
        (b"x", r"prompts: must be "),
        ("", r"prompt: must be a string that is not empty.*prompt number 0"),
        (["x", None], r"prompt: must be a string, a list of token ids or an object, got None \(prompt number 1\)"),
        (["x", b"x"], r"prompt: must be .*number 1"),
        (["x", []], r"prompt_token_ids: must not be empty.*number 1"),
        (["x", ["a"]], r"prompt_token_ids: .*number 1"),
        (["x", [5, 99_999]], r"prompt_token_ids: token id 99999 is outside the vocabulary.*number 1"),
        (["x", [7] * 2000], r"prompt_token_ids: has 2000 tokens.*number 1"),
        (["x", {"promt": "x"}], r"prompt: may have prompt, .* got 'promt' .*number 1"),
        (["x", {"a\nb": 1}], r"prompt: may have prompt, .* got 'a\\nb' .*number 1"),
        (["x", {"prompt_token_ids": array("f", [1.5])}], r"prompt_token_ids: must be .* has 1\.5 .*number 1"),
        (["x", {}], r"prompt: give exactly one of .*number 1"),
        (["x", {"prompt": "x", "temperature": 0}], r"prompt: may have prompt, .* got 'temperature' "),
        (["x", "\ud800"], r"prompt: cannot be encoded as UTF-8.*number 1"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_prompt_that_cannot_be_is_named_and_nothing_runs(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{words}"):
        llm.generate(prompts, use_tqdm=False)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


@pytest.mark.parametrize("params", [{"max_tokens": 5}, 5, "greedy", [SamplingParams(), None], [SamplingParams()] * 3])
def test_sampling_params_that_cannot_be_are_named(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_params: must be "):
        llm.generate(["x", "y"], params, use_tqdm=False)


@pytest.mark.parametrize("level", [0, 3, "1", None])
def test_a_sleep_level_that_cannot_be_is_named(llm: LLM, level: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^level: must be 1 or 2, got "):
        llm.sleep(level)


@pytest.mark.parametrize("tags", ["weights", 5, [5], ["a\nb"], {"weights": 1}])
def test_what_cannot_be_woken_up_is_named(llm: LLM, tags: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^tags: must be a list of weights and kv_cache, got .*$"):
        llm.wake_up(tags)


def test_the_time_between_two_calls_is_not_the_hosts(llm: LLM) -> None:
    before = llm.metrics().executor
    for _ in range(2):
        llm.generate("3 + 4 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    after = llm.metrics().executor
    assert after.host_s.count - before.host_s.count == after.num_steps - before.num_steps - 2


def test_after_all_that_it_generates(llm: LLM) -> None:
    (output,) = llm.generate("3 + 4 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert output.outputs[0].text == " 7"
    assert llm.generate([], use_tqdm=False) == []


def test_generations_that_fail_are_named_and_cost_the_others_nothing(llm: LLM) -> None:
    fine = SamplingParams(temperature=0, max_tokens=4)
    impossible = SamplingParams(structured_outputs=StructuredOutputs(choice=["a"]), allowed_token_ids=[5])
    with pytest.raises(
        GenerationFailed, match=r"^invalid_request: .*allowed_token_ids .* \(prompt number 1\)$"
    ) as caught:
        llm.generate(["3 + 4 =", "x", "20 + 22 ="], [fine, impossible, fine], use_tqdm=False)
    first, failed, last = caught.value.outputs
    assert first is not None and failed is None and last is not None
    assert [each.outputs[0].text for each in (first, last)] == [" 7", " 42"]
    with pytest.raises(GenerationFailed, match=r"\(prompt number 0\); 2 of 3 prompts have failed$"):
        llm.generate(["x", "x", "x"], [impossible, impossible, fine], use_tqdm=False)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_prompts_may_be_made_as_with_vllm(llm: LLM) -> None:
    (tokens,) = llm.generate("3 + 4 =", SamplingParams(max_tokens=1), use_tqdm=False)
    prompts = [TextPrompt(prompt="3 + 4 ="), TokensPrompt(prompt_token_ids=tokens.prompt_token_ids)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [each.outputs[0].text for each in outputs] == [" 7", " 7"]


def test_a_method_of_vllm_that_is_missing_is_named(llm: Any) -> None:
    with pytest.raises(
        AttributeError, match=r"^LLM\.embed of vLLM is not supported: Millrace generates text and chats$"
    ):
        llm.embed(["x"])
    with pytest.raises(AttributeError, match=r"^LLM\.generat does not exist$"):
        llm.generat("x")
    assert not hasattr(llm, "score")
    with pytest.raises(AttributeError, match=r"LLM\.collective_rpc of vLLM does not exist; LLM\.reload_weights reads "):
        llm.collective_rpc("reload_weights")
    for name in ("llm_engine", "model_config"):
        with pytest.raises(AttributeError, match=rf"^LLM\.{name} of vLLM does not exist; LLM\.max_model_len is the "):
            getattr(llm, name)


def test_the_context_length_is_that_of_the_pool_where_it_holds_less_than_the_model_allows(llm: LLM) -> None:
    assert llm.max_model_len == 63 * 16
    with pytest.raises(InvalidRequest, match=r"^prompt_token_ids: has 1008 tokens, and the context of 1008 must hold"):
        llm.generate([[5] * llm.max_model_len], use_tqdm=False)
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64, max_model_len=100) as short:
        assert short.max_model_len == 100


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_after_its_shutdown_it_starts_no_workers(executor: str) -> None:
    with LLM(TINY, device="cpu", executor=executor, num_blocks=64) as llm:
        pass
    calls = (lambda: llm.generate("3 + 4 =", use_tqdm=False), llm.sleep, llm.wake_up, llm.reset_prefix_cache)
    for call in calls:
        with pytest.raises(EngineError, match=r"^this LLM has been shut down"):
            call()
    llm._engine.check_workers()  # the engine itself replaces none either
    assert llm.metrics().executor.num_restarts == 0
    llm.shutdown()


def test_a_program_without_stderr_can_generate() -> None:
    script = f"""
from millrace import LLM, SamplingParams
with LLM({str(TINY)!r}, device="cpu", executor="mp", num_blocks=64) as llm:
    print(llm.generate("3 + 4 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].text)
"""
    command = ["bash", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (ran.returncode, ran.stdout) == (0, " 7\n")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_the_program_cannot_generate_and_does_not_hang(llm: LLM) -> None:
    if (child := os.fork()) == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                llm.generate("3 + 4 =", use_tqdm=False)
            except EngineError as error:
                status = 0 if f"belongs to process {os.getppid()}, of which this one is a fork" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_second_thread_is_refused_and_disturbs_nothing(llm: LLM) -> None:
    refused: list[str] = []

    class Bar:
        """Is made while texts are generated."""

        def __init__(self, **_: Any) -> None:
            thread = threading.Thread(target=self.call_all)
            thread.start()
            thread.join()

        def call_all(self) -> None:
            generate = partial(llm.generate, "20 + 22 =", use_tqdm=False)
            for call in (generate, llm.sleep, llm.reset_prefix_cache, llm.shutdown):
                with pytest.raises(EngineError) as caught:
                    call()
                refused.append(str(caught.value))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            pass

    (output,) = llm.generate("3 + 4 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=Bar)
    assert refused == ["another thread uses this LLM; use it from one thread at a time"] * 4
    assert output.outputs[0].text == " 7"


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_signal_handler_can_shut_it_down_during_a_call_which_then_says_so(executor: str) -> None:
    before = set(children_of(os.getpid()))
    llm = LLM(TINY, device="cpu", executor=executor, num_blocks=64)

    class Bar(tqdm):  # type: ignore[misc]
        """Calls it like a handler: while texts are generated, in the same thread."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            llm.shutdown()

    with pytest.raises(EngineError, match=r"^this LLM has been shut down during the call; make another one$"):
        llm.generate("3 + 4 =", use_tqdm=Bar)
    wait_until(lambda: set(children_of(os.getpid())) <= before, what="the end of the worker")
    with pytest.raises(EngineError, match=r"^this LLM has been shut down; make another one$"):
        llm.generate("3 + 4 =", use_tqdm=False)


@pytest.mark.parametrize("dtype", ["float", torch.float32])
def test_vllms_names_of_dtypes_and_none_for_a_default_are_taken(dtype: Any) -> None:
    defaults: dict[str, Any] = dict.fromkeys(("max_num_seqs", "block_size", "enable_prefix_caching", "seed"))
    with LLM(TINY, device="cpu", executor="uni", dtype=dtype, num_blocks=64, **defaults) as llm:
        assert llm.stats().pool.num_blocks == 63


def test_numbers_and_arrays_of_numpy_and_tensors_are_taken(llm: LLM) -> None:
    of_numpy: dict[str, Any] = {"temperature": np.float64(0.5), "max_tokens": np.int64(3), "seed": np.int32(7)}
    params = SamplingParams(**of_numpy)
    assert params == SamplingParams(temperature=0.5, max_tokens=3, seed=7)
    numbers = [np.int64(5), np.int64(6)]
    prompts: list[Any] = [np.array([5, 6]), torch.tensor([[5, 6]]), [np.array([5, 6])], numbers, [numbers]]
    prompts += [{"prompt_token_ids": ids} for ids in (np.array([5, 6]), numbers)]
    for prompt in prompts:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == [5, 6]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_its_workers_end_when_nobody_has_it_any_more_and_not_with_a_fork_of_the_program() -> None:
    llm = LLM(TINY, device="cpu", executor="mp", num_blocks=64)
    executor = llm._engine._executor
    assert isinstance(executor, MultiprocExecutor)
    worker = os.pidfd_open(executor.worker_pids()[0])
    if (child := os.fork()) == 0:
        del llm
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not select.select([worker], [], [], 0.5)[0]
    del llm
    assert select.select([worker], [], [], LIMIT_S)[0], "the worker runs on"
    os.close(worker)


def test_a_start_that_fails_at_its_end_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def fails(*_: object) -> None:
        pids.extend(children_of(os.getpid()))
        raise OSError("no process can be started")

    monkeypatch.setattr("millrace.engine_service.offline.Admission", fails)
    before = set(children_of(os.getpid()))
    with pytest.raises(OSError, match="no process"):
        LLM(TINY, device="cpu", executor="mp", num_blocks=64)
    assert set(pids) > before
    wait_until(lambda: set(children_of(os.getpid())) <= before, what="the end of the worker")


# --- the prefix cache ----------------------------------------------------------------------------------------------

STORY = "A story about a fox that lived in a small house near the river and could count:"


def test_prompts_that_begin_alike_share_it_and_get_the_same_text(llm: LLM) -> None:
    prompts = [f"{STORY} {number}" for number in range(6)]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64, enable_prefix_caching=False) as plain:
        expected = plain.generate(prompts, greedy, use_tqdm=False)
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]
    assert [one.num_cached_tokens for one in expected] == [0] * 6
    assert outputs[0].num_cached_tokens == 0
    assert all(one.num_cached_tokens >= 16 for one in outputs[1:])


def test_a_salt_keeps_prompts_apart_and_a_reset_forgets(llm: LLM) -> None:
    def num_cached(**prompt: str) -> int:
        return llm.generate([{"prompt": STORY, **prompt}], SamplingParams(max_tokens=1), use_tqdm=False)[
            0
        ].num_cached_tokens

    llm.reset_prefix_cache()
    assert num_cached() == 0
    assert num_cached() > 0
    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="a") > 0
    llm.reset_prefix_cache()
    assert num_cached() == 0


def test_a_salt_that_is_no_string_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt: must be a string"):
        llm.generate([{"prompt": STORY, "cache_salt": 5}], use_tqdm=False)


FORKS = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True)


def _texts(llm: LLM, n: int) -> list[list[int]]:
    (output,) = llm.generate("A story about a fox that went", msgspec.structs.replace(FORKS, n=n), use_tqdm=False)
    assert [one.index for one in output.outputs] == list(range(n))
    assert {one.finish_reason for one in output.outputs} == {"length"}
    return [one.token_ids for one in output.outputs]


def test_a_candidate_is_the_same_however_many_there_are(llm: LLM) -> None:
    five = _texts(llm, 5)
    assert len({tuple(token_ids) for token_ids in five}) == 5, "each has random numbers of its own"
    for n in (1, 2, 3):
        assert _texts(llm, n) == five[:n]


def test_candidates_compute_their_prompt_once(llm: LLM) -> None:
    prompt = list(range(1, 41))
    llm.reset_prefix_cache()
    before = llm.stats().pool.num_hit_tokens
    (output,) = llm.generate([prompt], msgspec.structs.replace(FORKS, n=4), use_tqdm=False)
    assert llm.stats().pool.num_hit_tokens - before == 3 * 40
    assert output.num_cached_tokens == 0, "of the first candidate"


def test_prompts_with_and_without_candidates_keep_their_order(llm: LLM) -> None:
    params = [msgspec.structs.replace(FORKS, n=n, max_tokens=n) for n in (2, 1, 3)]
    outputs = llm.generate(["one", "two", "three"], params, use_tqdm=False)
    assert [[len(one.token_ids) for one in output.outputs] for output in outputs] == [[2, 2], [1], [3, 3, 3]]


def test_more_candidates_than_the_pool_holds_at_once_run_one_after_the_other() -> None:
    with LLM(TINY, device="cpu", dtype="float32", executor="uni", num_blocks=8, max_model_len=64) as small:
        tight = _texts(small, 6)
    with LLM(TINY, device="cpu", dtype="float32", executor="uni", num_blocks=128) as large:
        assert _texts(large, 6) == tight


# --- what scripts written for vLLM use ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("quantization", "awq"),
        ("enable_lora", True),
        ("speculative_config", {"method": "ngram"}),
        ("swap_space", "4"),
        ("num_gpu_blocks_override", 1),
        ("distributed_executor_backend", "gloo"),
        ("max_tokens", 3),
    ],
)
def test_an_argument_of_vllm_that_millrace_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}: .* got "):
        LLM(TINY, **{name: value})


def test_vllms_name_for_torchrun_is_answered_with_what_to_run_instead() -> None:
    hint = "external is for `millrace serve` under torchrun "
    with pytest.raises(ConfigurationError, match=f"^distributed_executor_backend: {hint}"):
        LLM(TINY, device="cpu", distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigurationError, match=f"^executor: {hint}"):
        LLM(TINY, device="cpu", executor="external")


def test_an_unknown_argument_is_answered_with_the_similar_one() -> None:
    with pytest.raises(ConfigurationError, match=r"^max_modle_len: .*, got 5; did you mean max_model_len\?$"):
        LLM(TINY, max_modle_len=5)
    with pytest.raises(ConfigurationError, match=r"^enable_lora: .*, got True; name a LoRA adapter, .*: adapter=DIR$"):
        LLM(TINY, enable_lora=True)
    todo = r'use SamplingParams\(structured_outputs=\{"json": \.\.\.\}\)$'
    with pytest.raises(ConfigurationError, match=f"^guided_json: .*; {todo}"):
        LLM(TINY, guided_json={})
    with pytest.raises(ConfigurationError, match=r"^structured_outputs_config: .*; leave it out$"):
        LLM(TINY, structured_outputs_config={"backend": "auto", "reasoning_parser": "x"})
    with pytest.raises(ConfigurationError, match=r"^logprobs_mode: must be 'raw_logprobs', .* the model's own logits$"):
        LLM(TINY, logprobs_mode="processed_logprobs")


def test_arguments_of_vllm_that_change_nothing_are_taken() -> None:
    arguments: dict[str, Any] = {
        "trust_remote_code": False,
        "swap_space": 0,
        "disable_log_stats": True,
        "quantization": None,
        "logprobs_mode": "raw_logprobs",
        "enable_chunked_prefill": True,
        "distributed_executor_backend": "uni",
        "guided_decoding_backend": "xgrammar",
        "structured_outputs_config": {"backend": "auto"},
        "num_gpu_blocks_override": 64,
    }
    with LLM(model=str(TINY), device="cpu", **arguments) as llm:
        assert llm.stats().pool.num_blocks == 63


def test_a_chat_is_rendered_with_the_models_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "3 + 4 ="}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (alone,) = llm.chat(chat, params, use_tqdm=False)
    first, second = llm.chat([chat, chat], params, add_generation_prompt=True, tools=None, use_tqdm=False)
    (rendered,) = llm.generate([{"messages": chat}], params, use_tqdm=False)
    assert alone.outputs[0].text == first.outputs[0].text == second.outputs[0].text == rendered.outputs[0].text
    with pytest.raises(InvalidRequest, match=r"^tools: item 0 must be .* \(prompt number 0\)"):
        llm.chat(chat, params, tools=[{"type": "function"}])
    with pytest.raises(InvalidRequest, match=r"^lora_request: is not supported by chat"):
        llm.chat(chat, params, lora_request=object())
    with pytest.raises(InvalidRequest, match=r"^messages: must be a list"):
        llm.chat("3 + 4 =")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^priority: is not supported by generate"):
        llm.generate("3 + 4 =", params, priority=[1])
    assert llm.generate("3 + 4 =", params, use_tqdm=False, lora_request=None, tokenization_kwargs={})


def test_the_garbage_collector_passes_over_older_objects_while_it_generates(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = list[int]()
    step = llm._engine.step

    def step_and_count() -> Any:
        frozen.append(gc.get_freeze_count())
        return step()

    monkeypatch.setattr(llm._engine, "step", step_and_count)
    gc.unfreeze()
    try:
        llm.generate("3 + 4 =", SamplingParams(max_tokens=2), use_tqdm=False)
        assert min(frozen) > 100_000 and gc.get_freeze_count() == 0
        gc.freeze()
        llm.generate("3 + 4 =", SamplingParams(max_tokens=2), use_tqdm=False)
        assert gc.get_freeze_count() > 100_000, "what the program has frozen stays so"
    finally:
        gc.freeze()  # as for all tests


def test_the_progress_bar_counts_the_texts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate(["3 + 4 =", "5 + 6 ="], params)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["3 + 4 =", "5 + 6 ="], params, use_tqdm=partial(tqdm, bar_format="{n} of {total} are done"))
    assert "2 of 2 are done" in capsys.readouterr().err
    llm.generate(["3 + 4 ="], params, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_prompt_that_waits_for_a_place_is_scheduled_later() -> None:
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64, max_num_seqs=1) as llm:
        outputs = llm.generate(["3 + 4 ="] * 2, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
    first, second = (output.metrics for output in outputs)
    assert first.first_token_time < second.first_scheduled_time


def test_a_chat_is_continued_and_has_a_template_and_variables_of_its_own(llm: LLM) -> None:
    chat = [{"role": "user", "content": "3 + 4 ="}, {"role": "assistant", "content": "3 + 4"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    kwargs: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
    (continued,) = llm.chat(chat, params, **kwargs)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert continued.prompt_token_ids == tokenizer(text, add_special_tokens=False).input_ids
    assert continued.prompt == text
    for is_added in (True, False):
        (output,) = llm.chat(chat[:1], params, add_generation_prompt=is_added, use_tqdm=False)
        text = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=is_added)
        assert output.prompt_token_ids == tokenizer(text, add_special_tokens=False).input_ids
        assert output.prompt == text
    source = "{{ tools[0].function.name }}: {{ messages[0].content }}{{ end }}"
    tool = {"type": "function", "function": {"name": "add"}}
    (other,) = llm.chat(
        chat, params, chat_template=source, tools=[tool], chat_template_kwargs={"end": "!"}, use_tqdm=False
    )
    assert tokenizer.decode(other.prompt_token_ids) == "add: 3 + 4 =!"
    with pytest.raises(InvalidRequest, match=r"^messages: the model's chat template can't render these messages: no"):
        llm.chat(chat, params, chat_template="{{ raise_exception('no') }}", use_tqdm=False)
    with pytest.raises(InvalidRequest, match=r"^chat_template: is not a valid Jinja template: "):
        llm.chat(chat, params, chat_template="{% for", use_tqdm=False)


def test_a_chat_template_is_a_text_or_a_file_in_both_places(llm: LLM, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "3 + 4 ="}]
    params = SamplingParams(max_tokens=1)
    source = "{%- for message in messages %}\n>> {{ message.content }}\n{%- endfor %}"
    file = tmp_path / "one.jinja"
    file.write_text(source)
    for template in (source, str(file), file):
        (of_call,) = llm.chat(chat, params, chat_template=template, use_tqdm=False)
        with LLM(TINY, device="cpu", executor="uni", num_blocks=64, chat_template=template) as other:
            (of_llm,) = other.chat(chat, params, use_tqdm=False)
        assert of_call.prompt == of_llm.prompt == ">> 3 + 4 ="


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (1, r"must be a text in Jinja, which has {{ or {%, or a file with one, got 1$"),
        ("/nowhere/x.jinja", r"must be .* got '/nowhere/x\.jinja': No such file or directory$"),
        (Path("/nowhere"), r"must be .* got '/nowhere': No such file or directory$"),
        ("a text " * 1000, r"must be .* got 'a text .*\.\.\..*a text ': File name too long$"),
        ("a\0b", r"must be .* got 'a\\x00b': embedded null byte$"),
        ("{% for" + " " * 5000, r"is not a valid Jinja template: line 1: .*; correct it$"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_chat_template_that_is_neither_is_refused_with_one_short_error(llm: LLM, template: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^chat_template: {message}") as of_llm:
        LLM(TINY, chat_template=template)
    with pytest.raises(InvalidRequest, match=f"^chat_template: {message}") as of_call:
        llm.chat([{"role": "user", "content": "x"}], chat_template=template)
    assert len(str(of_llm.value)) == len(str(of_call.value)) < 250


def test_the_outputs_of_all_calls_have_ids_of_their_own(llm: LLM) -> None:
    calls = [llm.generate(["3 + 4 ="] * 2, SamplingParams(max_tokens=1), use_tqdm=False) for _ in range(2)]
    first, *others = [int(output.request_id) for outputs in calls for output in outputs]
    assert others == [first + 1, first + 2, first + 3]


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate(["3 + 4 ="], SamplingParams(max_tokens=1), use_tqdm=False)
    assert tokenizer("3 + 4 =").input_ids == output.prompt_token_ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert "Hi" in text


@pytest.mark.parametrize(("arguments", "expected"), [({}, 3), ({"generation_config": "vllm"}, 16)])
def test_the_models_sampling_parameters_are_used_where_none_are_given_as_with_vllm(
    arguments: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "generation_config.json").write_text('{"max_new_tokens": 3, "temperature": 0.5}')
    with LLM(model, device="cpu", executor="uni", num_blocks=8, **arguments) as llm:
        outputs = [llm.generate(["A story"], params, use_tqdm=False)[0] for params in (None, SamplingParams())]
        assert llm.get_default_sampling_params() == (
            SamplingParams() if arguments else SamplingParams(max_tokens=3, temperature=0.5)
        )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [expected, 16]


def test_an_output_says_when_it_was_computed_and_what_has_ended_it(llm: LLM) -> None:
    before_s = time.time()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (plain,) = llm.generate(["3 + 4 ="], params, use_tqdm=False)
    times = plain.metrics
    assert before_s <= times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.first_token_time <= times.finished_time <= time.time()
    assert (times.queued_ts, times.scheduled_ts) == (times.arrival_time, times.first_scheduled_time)
    assert (times.first_token_ts, times.last_token_ts) == (times.first_token_time, times.finished_time)
    assert times.queued_s + times.prefill_s + times.decode_s == pytest.approx(times.total_s)
    assert times.first_token_latency == pytest.approx(times.time_in_queue + times.prefill_s)
    assert times.num_generation_tokens == 20
    assert (plain.finished, plain.outputs[0].finished(), plain.outputs[0].stop_reason) == (True, True, None)
    stop = plain.outputs[0].text[3:5]
    (by_string,) = llm.generate(["3 + 4 ="], msgspec.structs.replace(params, stop=["never", stop]), use_tqdm=False)
    assert by_string.outputs[0].stop_reason == stop
    token_id = plain.outputs[0].token_ids[1]
    (by_token,) = llm.generate(["3 + 4 ="], msgspec.structs.replace(params, stop_token_ids=[token_id]), use_tqdm=False)
    assert (by_token.outputs[0].finish_reason, by_token.outputs[0].stop_reason) == ("stop", token_id)
    (to_the_end,) = llm.generate(["3 + 4 ="], SamplingParams(temperature=0, max_tokens=99), use_tqdm=False)
    eos = to_the_end.outputs[0].token_ids[-1]
    both = SamplingParams(temperature=0, max_tokens=99, stop_token_ids=[eos])
    (at_the_end,) = llm.generate(["3 + 4 ="], both, use_tqdm=False)
    assert (at_the_end.outputs[0].finish_reason, at_the_end.outputs[0].stop_reason) == ("stop", None), "as in vLLM"


class _Interrupt:
    """A progress bar at which Ctrl-C comes."""

    def __init__(self, **_: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_an_error_that_somebody_keeps_does_not_keep_the_llm(how: str) -> None:
    """As a notebook keeps the last one: the workers would stay when the name has another `LLM`."""
    llm = LLM(TINY, device="cpu", executor="uni", num_blocks=64)
    reference, kept = weakref.ref(llm), None
    try:
        llm.generate(["3 + 4 ="], use_tqdm=_Interrupt) if how == "interrupt" else llm.generate([""], use_tqdm=False)
    except (KeyboardInterrupt, InvalidRequest) as error:
        kept = error
    del llm
    assert kept is not None and kept.__traceback__ is not None
    assert reference() is None


class _TooLong(Exception):
    """Of a program's own time limit."""


@contextlib.contextmanager
def _handler(number: signal.Signals, error: type[BaseException]) -> Iterator[None]:
    """Python drops an error that is raised in a callback of the garbage collector, so Hypothesis's are off meanwhile."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise error

    callbacks, before = gc.callbacks.copy(), signal.signal(number, handle)
    gc.callbacks.clear()
    try:
        yield
    finally:
        signal.signal(number, before)
        gc.callbacks += callbacks


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """It counts computing: pytest uses the other timer for its own limit."""
    with _handler(signal.SIGVTALRM, _TooLong):
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _greedy_ids(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8)
    return [output.outputs[0].token_ids for output in llm.generate(["3 + 4 =", "A story"], params, use_tqdm=False)]


def _assert_undisturbed(llm: LLM, expected: list[list[int]]) -> None:
    assert _greedy_ids(llm) == expected
    executor = llm.metrics().executor
    assert (executor.num_restarts, executor.num_failed_workers, executor.num_failed) == (0, 0, 0)


def test_a_time_limit_of_the_program_ends_a_call_and_is_no_failure_of_the_worker_in_its_process() -> None:
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64) as llm:
        expected = _greedy_ids(llm)
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        for seconds in (0.01, 0.03, 0.1, 0.2):
            with pytest.raises(_TooLong), _time_limit(seconds):
                llm.generate(["A story"] * 400, long, use_tqdm=False)
            _assert_undisturbed(llm, expected)
        for level in (1, 2):
            for seconds in (0.001, 0.005, 0.01, 0.02):
                with contextlib.suppress(_TooLong), _time_limit(seconds):
                    llm.sleep(level)
                with contextlib.suppress(_TooLong), _time_limit(seconds):
                    llm.wake_up()
                llm.wake_up()
                _assert_undisturbed(llm, expected)


@contextlib.contextmanager
def _alarm_at_line(place: int) -> Iterator[None]:
    """Raise the signal at this line, of those that the engine, its scheduler and its worker execute."""
    parts = tuple(
        str(ROOT / "millrace" / part) for part in ("engine_service/core", "engine_service/engine.py", "worker/")
    )
    num_lines_left = place

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines_left
        if not frame.f_code.co_filename.startswith(parts):
            return None
        if event == "line":
            num_lines_left -= 1
            if num_lines_left == 0:
                _alarm()
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_interruption_at_any_line_of_a_step_leaves_the_engine_whole(*, run_ahead: bool) -> None:
    """As Ctrl-C in a notebook. A plan that was interrupted left sequences that nobody would run, and the next call hung."""
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64, run_ahead=run_ahead) as llm:
        expected = _greedy_ids(llm)
        many = ["3 + 4 =", *["A story"] * 20], SamplingParams(max_tokens=8, ignore_eos=True)
        for place in range(100, 9_000, 641):
            with pytest.raises(_TooLong), _handler(signal.SIGUSR2, _TooLong), _alarm_at_line(place):
                llm.generate(*many, use_tqdm=False)
            assert not llm.stats().num_running + llm.stats().num_waiting
            _assert_undisturbed(llm, expected)


def _alarm(*_: Any, **__: Any) -> Any:
    signal.raise_signal(signal.SIGUSR2)


@pytest.mark.parametrize(("where", "name"), [(AutoConfig, "from_pretrained"), (probe, "head_logits")])
def test_a_model_is_not_blamed_for_what_interrupts_its_loading(
    where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64) as llm:
        expected = _greedy_ids(llm)
        llm.sleep(2)
        with monkeypatch.context() as patch, _handler(signal.SIGUSR2, _TooLong):
            patch.setattr(deferred_signals, "_PATIENCE_S", 0.0)
            patch.setattr(where, name, _alarm)
            with pytest.raises(_TooLong):
                llm.wake_up()
        llm.wake_up()
        _assert_undisturbed(llm, expected)


def test_a_sleep_that_is_interrupted_ends_with_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(TINY, device="cpu", executor="uni", num_blocks=64) as llm:
        expected = _greedy_ids(llm)
        with monkeypatch.context() as patch, _handler(signal.SIGUSR2, _TooLong):
            patch.setattr(deferred_signals, "_PATIENCE_S", 0.0)
            patch.setattr("millrace.worker.rank_model.RankModel.take_off_device", _alarm)
            with pytest.raises(_TooLong):
                llm.sleep()
        with pytest.raises(Asleep):
            _greedy_ids(llm)
        llm.wake_up()
        _assert_undisturbed(llm, expected)


def test_a_call_that_is_interrupted_while_the_engine_falls_asleep_or_wakes_up_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_off = RankModel.take_off_device

    def interrupted(model: RankModel, level: int) -> Any:
        _alarm()
        _alarm()
        return take_off(model, level)

    with LLM(TINY, device="cpu", executor="uni", num_blocks=64) as llm, _handler(signal.SIGUSR2, _TooLong):
        expected = _greedy_ids(llm)
        handler = signal.getsignal(signal.SIGUSR2)
        with monkeypatch.context() as patch:
            patch.setattr(RankModel, "take_off_device", interrupted)
            with pytest.raises(_TooLong):
                llm.sleep(2)
        assert llm.metrics().sleep_level == 2
        assert signal.getsignal(signal.SIGUSR2) is handler
        with monkeypatch.context() as patch:
            patch.setattr(UniprocExecutor, "_do_idle_work", _alarm)
            with pytest.raises(_TooLong):
                llm.wake_up()
        _assert_undisturbed(llm, expected)


@pytest.mark.parametrize("error", [_TooLong, KeyboardInterrupt])
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("is_lost", [False, True], ids=["before", "behind"])
def test_an_interruption_while_a_result_is_collected_costs_no_later_step(
    *, error: type[BaseException], run_ahead: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = Runner.collect

    def interrupted(runner: Runner) -> Any:
        result = collect(runner) if is_lost else None
        _alarm()
        return result

    with LLM(TINY, device="cpu", executor="uni", num_blocks=64, run_ahead=run_ahead) as llm:
        expected = _greedy_ids(llm)
        with monkeypatch.context() as patch, _handler(signal.SIGUSR2, error):
            patch.setattr(deferred_signals, "_PATIENCE_S", 0.0)
            patch.setattr(Runner, "collect", interrupted)
            with pytest.raises(error):
                _greedy_ids(llm)
        _assert_undisturbed(llm, expected)


class _Table:
    """As a DataFrame of pandas: its iterator yields the names of the columns."""

    columns = ("question", "id")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


def test_what_a_data_scientist_gives_is_taken_or_refused_clearly(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompts: must be .*, not a whole table; give one of its columns$"):
        llm.generate(_Table())  # type: ignore[arg-type]
    with pytest.raises(
        InvalidRequest, match=r"max_tokens: is not supported by generate; give it in SamplingParams\(max_tokens=...\)"
    ):
        llm.generate("3 + 4 =", max_tokens=3)
    todo = r'use SamplingParams\(structured_outputs=\{"json": \.\.\.\}\)$'
    with pytest.raises(InvalidRequest, match=f"^guided_options_request: is not supported by generate; {todo}"):
        llm.generate("3 + 4 =", guided_options_request={"guided_json": {}})
    (output,) = llm.generate("3 + 4 =", np.array([SamplingParams(max_tokens=3)]), use_tqdm=False)  # type: ignore[arg-type]
    row = output.to_dict()
    assert (row["prompt"], row["outputs"][0]["token_ids"]) == ("3 + 4 =", output.outputs[0].token_ids)
    assert json.loads(json.dumps(row)) == row
    with pytest.raises(ConfigurationError, match="max_model_len: must be 2 to "):
        LLM("m", max_model_len=np.int64(1))  # type: ignore[arg-type]
