"""Weights in 8 bits: the worker computes what transformers computes with the rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from millrace.executor.rank.worker import WAKE_TAGS
from millrace.worker.errors import ConfigError
from millrace.worker.kernels.library import find_kernels
from millrace.worker.linear import choice
from millrace.worker.linear.choice import pack_linear, quantize
from millrace.worker.linear.packed import CompiledLinear
from tests.worker.driver import Driver, start_worker
from tests.worker.fusion.test_fuse import MORE
from tests.worker.models import ALL_EXPERTS, CONFIGS, make_model
from tests.worker.test_parity import MAX_TOKENS, check_close_to_transformers, prompts

LARGEST_MEAN = {"float32": 0.002, "bfloat16": 0.1}
"""Between log-probabilities: inputs are rounded too, to 15 bits."""
EXPERTS = ("gate_up_proj", "down_proj")
pytestmark = pytest.mark.skipif(find_kernels() is None, reason="there are no compiled kernels")


def rounded(weight: Tensor) -> Tensor:
    """The weights [..., N, K] as multiples of a 127th of the largest one of each output."""
    rows = weight.detach().flatten(0, -2)
    scales = rows.abs().amax(dim=1, keepdim=True) / 127
    return ((rows / scales).round() * scales).view(weight.shape)


def save_rounded(path: Path, to: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:  # it scales, so the worker keeps its weights apart from those of the head
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    weights = {module.weight for module in model.modules() if type(module) is nn.Linear}
    if model.config.model_type != "gpt_oss":  # transformers' module computes its experts, in all their bits
        weights |= {each for name, each in model.named_parameters() if name.endswith(EXPERTS) and each.dim() == 3}
    for weight in weights:
        weight.data = rounded(weight)
    model.save_pretrained(to)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*CONFIGS, "mixtral", "qwen3_moe", "granite", "olmo2", "gpt_oss"])
def test_a_quantized_model_is_one_of_the_rounded_weights(name: str, dtype: str, tmp_path: Path) -> None:
    base, overrides = MORE.get(name, (name, {}))
    if name == "olmo2":  # is not recognised, so its modules run
        base, overrides = "llama", {"model_type": "olmo2", "seed": 2}
    if name == "gpt_oss":
        overrides = ALL_EXPERTS
    torch.manual_seed(0)
    make_model(base, tmp_path / "model", **overrides)
    save_rounded(tmp_path / "model", tmp_path / "rounded")
    worker = start_worker(tmp_path / "model", dtype=dtype, quantization="int8")
    assert (worker._model.decoder is None) == (name == "olmo2")
    requests = Driver(worker, seed=1).run(prompts(1), MAX_TOKENS)
    check_close_to_transformers(tmp_path / "rounded", requests, torch.float32, LARGEST_MEAN[dtype])


@pytest.mark.parametrize("level", [1, 2])
def test_a_quantized_model_is_the_same_after_a_sleep(level: int, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    worker = start_worker(tmp_path, quantization="int8")
    before = [request.output for request in Driver(worker, seed=1).run(prompts(1)[:3], 8)]
    worker.sleep(level)
    worker.wake_up(list(WAKE_TAGS), 1)
    assert [request.output for request in Driver(worker, seed=1).run(prompts(1)[:3], 8)] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_layer_takes_half_the_memory_of_bfloat16(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one with bfloat16 weights that computes in float32, as on a CPU that does not multiply bfloat16."""
    weight = torch.randn(480, 4096).bfloat16()
    packed = pack_linear([weight], dtype=dtype)
    with caplog.at_level("INFO"):
        quantize([packed])
    assert "the weights of 1 linear layers have 8 bits" in caplog.text
    assert isinstance(packed, CompiledLinear)
    assert (packed.is_quantized, 2 * packed.weights.nbytes) == (True, weight.nbytes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, r"^quantization: int8 needs dtype float32 or bfloat16, not float16; .*$"),
        ({"memory": 0}, r"^quantization: torch computes linear layers here, .*: leave it out$"),
        ({"kernels": None}, r"^quantization: torch computes linear layers here, .*: leave it out$"),
    ],
)
def test_where_nothing_computes_a_quantized_model_it_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    if "memory" in options:
        monkeypatch.setattr(choice, "free_host_bytes", lambda: options["memory"])
    if "kernels" in options:
        monkeypatch.setattr(choice, "find_kernels", lambda: None)
    with pytest.raises(ConfigError, match=message):
        start_worker(tmp_path, quantization="int8", dtype=options.get("dtype", "float32"))


def test_a_layer_whose_weights_are_not_rounded_well_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = CompiledLinear.quantize

    def wrong(self: CompiledLinear) -> None:
        rounds(self)
        assert self._weight_scales is not None
        self._weight_scales *= 1.1

    monkeypatch.setattr(CompiledLinear, "quantize", wrong)
    with pytest.raises(ConfigError, match=r"^quantization: the compiled kernel differs .* of 40 inputs and 60 outputs"):
        quantize([pack_linear([torch.randn(60, 40)])])
