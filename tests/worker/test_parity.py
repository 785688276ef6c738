"""For any plans, the worker computes what transformers computes for each sequence alone."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.executor.wire.messages import NewSequence, RowSampling, SeqId, StepId, StepPlan, StepRow
from millrace.worker.kernels.library import find_kernels
from tests.worker.driver import BLOCK_SIZE, GREEDY, NUM_BLOCKS, Driver, Request, execute, pool_bytes, start_worker
from tests.worker.models import ALL_EXPERTS, CONFIGS, DYNAMIC_ROPE, LONG_ROPE, RECURRENT, VOCAB_SIZE, make_model

NEAR_TIE = 1e-3
BFLOAT16_TIE = 0.1
LENGTHS = (1, 5, 16, 30, 47, 70, 71)
MAX_TOKENS = 16
DTYPES = ["float32", "bfloat16"]
KV_BYTES_PER_TOKEN = {"float32": 3 * 2 * 2 * 16 * 4, "bfloat16": 3 * 2 * 2 * 16 * 2}
"""Of a llama: layers, keys and values, heads, size of a head, bytes."""

CASES = [("cpu", "cpu"), ("cpu", "reference")]
GPU_CASES = [pytest.param("cuda", kind, marks=[pytest.mark.gpu]) for kind in ("triton", "reference")]


def prompts(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def agreed_length(expected: list[int], logits: torch.Tensor) -> int:
    """Tokens to compare: up to the first whose two best logits [length, V] are nearly equal."""
    best = logits.topk(2, dim=-1).values
    near = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero()
    return int(near[0]) if len(near) else len(expected)


def check_against_transformers(path: Path, requests: list[Request], model: Any = None) -> None:
    """`model`: of transformers, if it is not the causal language model in `path`."""
    if model is None:  # eager: the one implementation that caps Gemma 2's scores in every version of transformers
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for request in requests:
        length = len(request.prompt)
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens])).logits[0, length - 1 : -1]
        expected = logits.argmax(-1).tolist()  # those of `generate`, as far as the output has the same tokens
        compared = agreed_length(expected, logits)
        assert compared >= MAX_TOKENS // 2, "the model's choices are too close to compare"
        assert request.output[:compared] == expected[:compared]
        ours = torch.stack(request.logits).log_softmax(-1)
        torch.testing.assert_close(ours, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


def check_close_to_transformers(path: Path, requests: list[Request], dtype: torch.dtype, most: float = 0.05) -> None:
    """The log-probabilities differ by at most `most` in the mean, and the best token of each path is within the other's top
    5."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    for request in requests:
        with torch.no_grad():
            theirs = model(torch.tensor([request.tokens])).logits[0, len(request.prompt) - 1 : -1].float()
        ours = torch.stack(request.logits).float()
        assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().mean() <= most
        assert ours.argmax(-1).tolist() == request.output
        for one, other in ((ours, theirs), (theirs, ours)):
            assert (one.argmax(-1, keepdim=True) == other.topk(5).indices).any(-1).all()


@pytest.mark.parametrize("arch", [*CONFIGS, "gpt_oss", *RECURRENT])
@pytest.mark.parametrize(("device", "attention"), [*CASES, *GPU_CASES])
def test_mixed_chunked_and_preempted_sequences_match_transformers(
    arch: str, device: str, attention: str, tmp_path: Path
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make_model(arch, tmp_path)
    driver = Driver(start_worker(tmp_path, device=device, attention=attention), seed=1)
    check_against_transformers(tmp_path, driver.run(prompts(1), MAX_TOKENS))
    assert driver.num_preemptions > 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def test_greedy_tokens_in_bfloat16_are_the_best_of_transformers(device: str, tmp_path: Path) -> None:
    """Where its best two logits are further apart than that format rounds; each token after the worker's own ones."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make_model("llama", tmp_path)
    driver = Driver(start_worker(tmp_path, device=device, dtype="bfloat16"), seed=1)
    requests = driver.run(prompts(1), MAX_TOKENS)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    model.to(device)
    num_compared = 0
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens], device=device)).logits[0, len(request.prompt) - 1 : -1].cpu()
        best = logits.float().topk(2, dim=-1)
        is_clear = best.values[:, 0] - best.values[:, 1] > BFLOAT16_TIE
        num_compared += int(is_clear.sum())
        assert torch.equal(torch.tensor(request.output)[is_clear], best.indices[is_clear, 0])
    assert num_compared > len(requests) * MAX_TOKENS // 2
    assert driver.num_preemptions > 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt_oss"])
def test_bfloat16_is_close_to_transformers(arch: str, device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make_model(arch, tmp_path, **(ALL_EXPERTS if arch == "gpt_oss" else {}))
    worker = start_worker(tmp_path, device=device, dtype="bfloat16")
    is_fused = device == "cuda" or find_kernels() is not None
    assert (worker._model.decoder is not None) == is_fused
    check_close_to_transformers(tmp_path, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS), torch.bfloat16)


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_kv_pool_of_another_number_format_changes_no_clear_choice(
    dtype: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    """The torch paths and the compiled one, against transformers in float32."""
    make_model("llama", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for attention in ("cpu", "reference"):
        worker = start_worker(tmp_path, dtype=dtype, kv_cache_dtype=kv_cache_dtype, attention=attention)
        assert pool_bytes(worker) == NUM_BLOCKS * BLOCK_SIZE * KV_BYTES_PER_TOKEN[kv_cache_dtype]
        for request in Driver(worker, seed=1).run(prompts(1)[:3], MAX_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([request.tokens])).logits[0, len(request.prompt) - 1 : -1]
            torch.testing.assert_close(torch.stack(request.logits).float(), logits, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "float32"), *(pytest.param("cuda", dtype, marks=[pytest.mark.gpu]) for dtype in DTYPES)],
)
@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_a_kv_pool_in_fp8_is_close_to_transformers(arch: str, device: str, dtype: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make_model(arch, tmp_path)
    attention = "reference" if device == "cpu" else "auto"
    worker = start_worker(tmp_path, device=device, attention=attention, dtype=dtype, kv_cache_dtype="fp8")
    if arch == "llama":
        assert pool_bytes(worker) == NUM_BLOCKS * BLOCK_SIZE * 3 * 2 * 2 * (16 + 4)
    check_close_to_transformers(tmp_path, Driver(worker, seed=1).run(prompts(1), MAX_TOKENS), torch.float32, 0.1)


def test_dynamic_rope_is_what_transformers_computes(tmp_path: Path) -> None:
    make_model("llama", tmp_path, rope_parameters=DYNAMIC_ROPE)
    check_against_transformers(tmp_path, Driver(start_worker(tmp_path), seed=1).run(prompts(1), MAX_TOKENS))


@pytest.mark.parametrize(
    ("max_model_len", "chosen", "other"), [(32, "short", "more than 32"), (128, "long", "at most 32")]
)
@pytest.mark.parametrize("model_type", ["llama", "phimoe"])
def test_long_rope_does_not_let_a_sequence_depend_on_longer_ones(
    model_type: str, max_model_len: int, chosen: str, other: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All have the frequencies that transformers would choose for a sequence of max_model_len tokens."""
    rope = LONG_ROPE | ({"short_mscale": 1.1, "long_mscale": 1.4} if model_type == "phimoe" else {})
    experts = {"num_local_experts": 4} if model_type == "phimoe" else {}
    make_model("llama", tmp_path, model_type=model_type, rope_parameters=rope, **experts)
    with caplog.at_level(logging.INFO):
        assert start_worker(tmp_path, max_model_len=max_model_len)._model.facts.rope == chosen
    line = f"all sequences have its {chosen} factors, since max_model_len is {max_model_len}; {other} chooses the "
    assert caplog.text.count(line) == 1
    given = [prompt for prompt in prompts(1) if len(prompt) + MAX_TOKENS <= max_model_len]
    alone = Driver(start_worker(tmp_path, max_model_len=max_model_len), seed=1).run(given[:1], MAX_TOKENS)
    together = Driver(start_worker(tmp_path, max_model_len=max_model_len), seed=2).run(given, MAX_TOKENS)
    assert alone[0].output == together[0].output
    torch.testing.assert_close(alone[0].logits, together[0].logits, atol=1e-4, rtol=1e-4)
    check_against_transformers(tmp_path, together[-1:])


def test_two_models_in_one_process_do_not_meet(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    make_model("qwen3", first)
    make_model("mistral", second)
    drivers = [Driver(start_worker(path, attention=kind), 2) for path, kind in ((first, "cpu"), (second, "reference"))]
    for path, driver in zip((first, second), drivers, strict=True):
        check_against_transformers(path, driver.run(prompts(3)[:2], MAX_TOKENS))


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@pytest.mark.parametrize(("device", "attention"), [*CASES, *GPU_CASES])
def test_a_fork_gets_the_tokens_of_a_sequence_that_computes_its_own_prompt(
    arch: str, device: str, attention: str, tmp_path: Path
) -> None:
    """Prompts of one token, of full blocks only and with a part of one, each three times."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make_model(arch, tmp_path)
    given = [[5], *prompts(1)[1:4]]

    def generate(prompts: list[list[int]], candidates: list[int]) -> list[list[int]]:
        worker = start_worker(tmp_path, device=device, attention=attention, num_blocks=500)
        driver = Driver(worker, seed=1, num_blocks=500)
        sampling = [RowSampling(0.9, 0, 0.95, 0.0, 7, candidate, 0, []) for candidate in candidates]
        outputs = [request.output for request in driver.run(prompts, MAX_TOKENS, sampling)]
        assert (driver.num_forks > 0) == (len(prompts) > len(given))
        return outputs

    apart = [output for candidate in range(3) for output in generate(given, [candidate] * 4)]
    assert generate(given * 3, [0] * 4 + [1] * 4 + [2] * 4) == apart


def test_a_plan_with_rows_that_do_not_sample_yields_nothing(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    worker = start_worker(tmp_path)
    new = NewSequence(SeqId(0), [1, 2, 3, 4], 4, GREEDY)
    result = execute(worker, StepPlan(StepId(1), 1, 1, 3, 0, [StepRow(SeqId(0), 0, 3, [7])], [new]))
    assert (result.token_ids, result.failures) == ([], [])
    result = execute(worker, StepPlan(StepId(2), 1, 1, 1, 1, [StepRow(SeqId(0), 3, 1, [])]))
    assert len(result.token_ids) == 1
