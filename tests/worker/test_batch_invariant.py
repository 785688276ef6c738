"""With `batch_invariant`, the logits of a token have the same bits in any batch, chunk and block, and after preemptions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.errors import ConfigError
from millrace.worker.fusion.device import choose_operations
from millrace.worker.kernels.library import find_kernels
from millrace.worker.linear import choice
from tests.worker.driver import GREEDY, Driver, Request, start_worker
from tests.worker.fusion.test_fuse import MORE
from tests.worker.models import CONFIGS, RECURRENT, VOCAB_SIZE, make_model

NUM_PROMPTS, MAX_TOKENS = 8, 14
OPTIONS = {"batch_invariant": True, "block_size": 16, "max_num_seqs": NUM_PROMPTS, "max_num_batched_tokens": 512}

no_kernels = pytest.mark.skipif(
    (kernels := find_kernels()) is None or kernels.instruction_set == "generic", reason="no kernels for this machine"
)


def prompts() -> list[list[int]]:
    source = random.Random(1)
    return [[source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 90))] for _ in range(NUM_PROMPTS)]


def run(path: Path, seed: int, chosen: slice, *, preempts: bool = True, **options: object) -> list[Request]:
    """Some of the prompts, in steps and chunks that the seed chooses."""
    worker = start_worker(path, **(OPTIONS | options))
    driver = Driver(worker, seed, preempts=preempts)
    requests = driver.run(prompts()[chosen], MAX_TOKENS, [GREEDY] * NUM_PROMPTS)
    assert driver.num_preemptions > 0 or not preempts
    return requests


@no_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*CONFIGS, "mixtral", "qwen3_moe", "qwen3_5", "granite", "lfm2"])
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(name: str, dtype: str, tmp_path: Path) -> None:
    check_bits(name, tmp_path, dtype=dtype)


def check_bits(name: str, path: Path, **options: Any) -> None:
    base, overrides = (name, {}) if name in RECURRENT else MORE.get(name, (name, {}))
    make_model(base, path, **overrides)
    together = run(path, 1, slice(None), **options)
    otherwise = run(path, 2, slice(None), preempts=False, **options)
    for index in range(0, NUM_PROMPTS, 3):
        (alone,) = run(path, 3 + index, slice(index, index + 1), preempts=False, **options)
        for other in (together[index], otherwise[index]):
            assert other.output == alone.output
            assert torch.equal(torch.stack(other.logits), torch.stack(alone.logits))


@no_kernels
def test_long_rows_of_recurrent_layers_are_not_rounded(tmp_path: Path) -> None:
    """`test_recurrence.py` has what that means for the results."""
    make_model("qwen3_5", tmp_path)
    for batch_invariant in (False, True):
        worker = start_worker(tmp_path, **OPTIONS | {"batch_invariant": batch_invariant})
        assert worker._model.states is not None
        operations: list[Any] = [mixer.operation for mixer in worker._model.states.mixers.values()]
        assert {bool(operation._call.rounds) for operation in operations} == {not batch_invariant}


@pytest.mark.parametrize(
    ("options", "what"), [({"attention": "reference"}, "reference"), ({"dtype": "float16"}, "float16")]
)
def test_what_depends_on_the_batch_is_refused(options: dict[str, str], what: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=f"^batch_invariant: LlamaForCausalLM .*{what}.* leave batch_invariant out$"):
        start_worker(tmp_path, **(OPTIONS | options))


def test_a_model_that_is_not_recognised_is_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path, model_type="olmo2")
    with pytest.raises(ConfigError, match=r"^batch_invariant: Olmo2ForCausalLM"):
        start_worker(tmp_path, **OPTIONS)


@no_kernels
def test_a_module_of_transformers_is_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    attention = start_worker(tmp_path)._model.attention
    for device in ("cpu", "cuda"):
        operations = choose_operations(attention, torch.float32, torch.device(device), batch_invariant=True)
        assert operations is not None
        with pytest.raises(ConfigError, match=r"^batch_invariant: Linear"):
            operations.prepare_module(nn.Linear(2, 2))


def test_the_reference_on_a_gpu_has_no_such_operations() -> None:
    """It serves GPUs on which Triton does not run, so nothing may import Triton before the model is refused."""
    attention = ReferenceAttention()
    assert choose_operations(attention, torch.float32, torch.device("cuda"), batch_invariant=True) is None


@no_kernels
def test_torch_computes_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 32).bfloat16()
    assert choice.pack_linear([weight], batch_invariant=True).name == "compiled kernel"
    monkeypatch.setattr(choice, "free_host_bytes", lambda: 0)
    with pytest.raises(ConfigError, match=r"^batch_invariant: torch computes linear layers"):
        choice.pack_linear([weight], batch_invariant=True)
