"""Models with recurrent layers: what the states change beside the tokens of `test_parity.py`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from millrace import LLM, SamplingParams
from millrace.engine_service.errors import ConfigurationError
from millrace.worker.errors import ConfigError, ModelError
from millrace.worker.recurrent import states
from millrace.worker.recurrent.states import RecurrentStates
from tests.worker.driver import Driver, start_worker
from tests.worker.models import ALL_EXPERTS, RECURRENT, VOCAB_SIZE, make_model, randomize
from tests.worker.test_parity import check_against_transformers

PROMPT = [token * 7 % VOCAB_SIZE for token in range(40)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recurrent")
    make_model("qwen3_5", path)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), dtype="float32", max_model_len=128, max_num_seqs=4, block_size=8, swap_space_gib=0.001) as llm:
        yield llm


def tokens_of(llm: LLM, params: SamplingParams, *prompts: list[int]) -> list[list[list[int]]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def test_a_prompt_that_begins_like_an_earlier_one_has_its_own_states(llm: LLM, path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt in (PROMPT, PROMPT, [*PROMPT[:24], 5, 6]):
        (found,) = tokens_of(llm, GREEDY, prompt)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert found == [expected[0, len(prompt) :].tolist()]


def test_candidates_of_a_request_and_more_sequences_than_slots_have_their_own_states(llm: LLM) -> None:
    alone = [tokens_of(llm, SamplingParams(max_tokens=12, seed=seed, ignore_eos=True), PROMPT)[0][0] for seed in (1, 2)]
    seeded = SamplingParams(max_tokens=12, seed=1, n=3, ignore_eos=True)
    candidates = tokens_of(llm, seeded, *[PROMPT] * 4)
    assert all(each == candidates[0] for each in candidates)
    assert candidates[0][0] == alone[0] != alone[1]
    assert len({tuple(each) for each in candidates[0]}) == 3


def test_states_begin_anew_after_a_sleep_and_with_other_weights(llm: LLM, path: Path, tmp_path: Path) -> None:
    before = tokens_of(llm, GREEDY, PROMPT)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens_of(llm, GREEDY, PROMPT) == before
    make_model("qwen3_5", tmp_path, seed=1)
    llm.reload_weights(tmp_path)
    assert tokens_of(llm, GREEDY, PROMPT) != before
    llm.reload_weights(path)
    assert tokens_of(llm, GREEDY, PROMPT) == before


def test_a_worker_with_more_sequences_than_planned_keeps_their_states(path: Path) -> None:
    few = Driver(start_worker(path, max_num_seqs=1), seed=1).run([PROMPT, PROMPT[:9], PROMPT[:1]], 8)
    many = Driver(start_worker(path, max_num_seqs=8), seed=1).run([PROMPT, PROMPT[:9], PROMPT[:1]], 8)
    assert [each.output for each in few] == [each.output for each in many]


@pytest.mark.parametrize(
    ("arch", "fused"),
    [
        ("qwen3_5", True),
        ("qwen3_next", True),
        ("olmo_hybrid", False),
        ("granite", True),
        ("lfm2", True),
        ("lfm2_moe", True),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_have_the_logits_of_the_modules(
    arch: str, fused: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All experts, see ALL_EXPERTS. With its own head, since the logits of a tied one are larger, and so are their errors.
    overrides: dict[str, Any] = {"tie_word_embeddings": False, **ALL_EXPERTS}
    make_model(arch, tmp_path, **(overrides if "num_experts_per_tok" in RECURRENT[arch] else {}))
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for results, compiles in ((found, True), (expected, False)):
        with monkeypatch.context() as patch:
            if not compiles:
                patch.setattr(states, "find_kernels", lambda: None)
            worker = start_worker(tmp_path, dtype=dtype, max_num_seqs=4)
        assert worker._model.states is not None
        assert (len(worker._model.states.mixers) > 0) == compiles
        assert (worker._model.decoder is not None) == (fused and compiles)
        requests = Driver(worker, seed=1).run([PROMPT, PROMPT[:9], PROMPT[:1]], 8)
        results += [torch.stack(each.logits) for each in requests]
    for ours, theirs in zip(found, expected, strict=True):
        difference = (ours.log_softmax(-1) - theirs.log_softmax(-1))[0].abs().mean()  # later tokens may differ
        assert difference <= (1e-4 if dtype == "float32" else 0.05)


def test_a_module_that_computes_something_else_runs_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Qwen3_5GatedDeltaNet, "allow_neg_eigval", True, raising=False)  # an option of another family
    with caplog.at_level("INFO"):
        worker = start_worker(path, max_num_seqs=4)
    assert worker._model.states is not None and not worker._model.states.mixers
    assert (
        "Qwen3_5GatedDeltaNet runs through transformers' module, which is slower: the results of the kernels differ"
        in caplog.text
    )
    requests = Driver(worker, seed=1).run([PROMPT, PROMPT[:9]], 8)
    check_against_transformers(path, requests)


def test_a_convolution_that_is_too_long_for_the_kernels_runs_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("lfm2", tmp_path, conv_L_cache=9, seed=1)
    with caplog.at_level("INFO"):
        worker = start_worker(tmp_path, max_num_seqs=4)
    assert (
        "Lfm2ShortConv runs through transformers' module, which is slower: ValueError: a convolution of 9"
        in caplog.text
    )
    check_against_transformers(tmp_path, Driver(worker, seed=1).run([PROMPT, PROMPT[:9]], 8))


def test_a_dropped_model_leaves_the_memory(path: Path) -> None:
    worker = start_worker(path)
    layer = weakref.ref(worker._model.module.model.layers[0])
    gc.disable()
    try:
        worker.shutdown()
        assert layer() is None
    finally:
        gc.enable()


def build(path: Path, model_type: str, **settings: Any) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **settings), dtype=torch.float32)
    randomize(model, seed=0)
    model.save_pretrained(path)


def test_a_layer_that_cannot_continue_a_sequence_is_refused(tmp_path: Path) -> None:
    """As transformers' module of Jamba."""
    build(tmp_path, "jamba", intermediate_size=96, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False)
    with pytest.raises(ModelError, match="JambaMambaMixer computes a sequence in parts otherwise than at once"):
        start_worker(tmp_path)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    build(tmp_path, "mamba2", num_heads=8, head_dim=16, state_size=16, n_groups=1, max_position_embeddings=128)
    with pytest.raises(
        ModelError, match="Mamba2ForCausalLM uses transformers' attention interface in 0 of the 2 layers"
    ):
        start_worker(tmp_path)


def test_states_that_do_not_fit_into_the_memory_of_a_gpu_name_the_option(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(_: RecurrentStates, num_slots: int) -> None:
        raise torch.OutOfMemoryError

    worker = start_worker(path, max_num_seqs=7)
    monkeypatch.setattr(RecurrentStates, "allocate", allocate)
    with pytest.raises(ConfigError, match="max_num_seqs: the states of recurrent layers of 7 sequences do not fit"):
        worker._profile_gpu()


def test_several_ranks_are_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Qwen3_5ForCausalLM has recurrent layers, which run on one rank only"):
        LLM(str(path), tensor_parallel_size=2)
