"""Which linear layers of a model the compiled kernel computes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import millrace.worker.linear.choice as choice
import millrace.worker.linear.packed as packed_linear
from millrace.worker import rank_model
from millrace.worker.kernels.library import VARIABLE, Kernels, find_kernels, supported_instruction_sets
from millrace.worker.linear.choice import pack_linear
from millrace.worker.linear.modules import use_packed_linear
from millrace.worker.linear.packed import CompiledLinear, PackedLinear, TorchLinear
from tests.worker.driver import Driver, start_worker
from tests.worker.models import build_model, make_model
from tests.worker.test_parity import MAX_TOKENS, check_against_transformers
from tests.worker.test_parity import prompts as random_prompts

LONGCAT: dict[str, Any] = {
    "model_type": "longcat_flash",
    "num_layers": 2,
    "num_key_value_heads": 4,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 8,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
}
"""Its router reads the weights of a linear layer. `head_dim` is that of the rotation."""


@pytest.fixture
def kernels() -> Kernels:
    found = find_kernels()
    if found is None:
        pytest.skip("there are no compiled kernels")
    return found


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_accepted", {})


def with_instruction_set(kernels: Kernels, name: str) -> Kernels:
    """Return kernels that name an instruction set, and use the machine's best one if it does not have that."""
    named = replace(kernels, instruction_set=name)
    if name not in supported_instruction_sets(kernels.library):
        vars(named)["table"] = kernels.table
    return named


def is_compiled(module: nn.Module) -> bool:
    return "forward" in vars(module)


class Derived(nn.Linear):
    """Computes something else, for all that the worker knows."""


def test_only_plain_layers_without_hooks_are_replaced(kernels: Kernels) -> None:
    hooked, halves = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float16)
    hooked.register_forward_hook(lambda *_: None)
    plain = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, dtype=torch.bfloat16)]
    model = nn.ModuleList([hooked, halves, Derived(8, 8), *plain])
    use_packed_linear(model, torch.float32)
    assert [is_compiled(module) for module in model] == [False, False, False, True, True, True]
    assert [name for name, _ in model.named_parameters()][-1] == "5.bias"


def test_a_kernel_that_differs_from_torch_is_not_used(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: CompiledLinear, inputs: torch.Tensor, outputs: torch.Tensor, accumulate: bool = False) -> None:
        self._call.bias = None
        into(self, inputs, outputs, accumulate)

    into = CompiledLinear.into
    monkeypatch.setattr(CompiledLinear, "into", wrong)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    use_packed_linear(model, torch.float32)
    assert [is_compiled(module) for module in model] == [False, True]
    assert "differs from torch in linear layers of 8 inputs and 8 outputs" in caplog.text


@torch.inference_mode()
def test_inputs_with_gaps_and_no_rows_and_other_dtypes(kernels: Kernels) -> None:
    linear = nn.Linear(8, 4)
    packed = CompiledLinear([linear.weight], linear.bias, kernels)
    inputs = torch.randn(8, 5).t()
    torch.testing.assert_close(packed.forward(inputs), linear(inputs))
    for shape in ((2, 3, 8), (0, 8), (8,)):
        assert packed.forward(torch.ones(shape)).shape == (*shape[:-1], 4)
    for wrong in (torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, 7)):
        with pytest.raises(RuntimeError, match="but the layer has 8 inputs"):
            packed.forward(wrong)


@torch.inference_mode()
@pytest.mark.parametrize("has_kernels", [True, False])
def test_several_layers_become_one(has_kernels: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_kernels", lambda: kernels if has_kernels else None)
    parts = [nn.Linear(8, 5), nn.Linear(8, 60, bias=False), nn.Linear(8, 3)]
    packed = pack_linear([part.weight for part in parts], [part.bias for part in parts])
    assert isinstance(packed, CompiledLinear if has_kernels else TorchLinear)
    assert (packed.num_inputs, packed.num_outputs) == (8, 68)
    inputs, outputs = torch.randn(4, 8), torch.ones(4, 68)
    expected = torch.cat([part(inputs) for part in parts], dim=1)
    packed.into(inputs, outputs, accumulate=True)
    torch.testing.assert_close(outputs, expected + 1)
    packed.into(inputs, outputs)
    torch.testing.assert_close(outputs, expected)
    if isinstance(packed, CompiledLinear):
        peaks, token_ids = packed.argmax(inputs)
        torch.testing.assert_close(peaks, expected.max(1).values)
        assert torch.equal(token_ids, expected.argmax(1))


@pytest.mark.parametrize(
    ("instruction_set", "dtypes", "expected"),
    [
        ("amx", (torch.bfloat16, torch.bfloat16), CompiledLinear),
        ("avx512bf16", (torch.float32, torch.float32), CompiledLinear),
        ("avx512bf16", (torch.bfloat16, torch.bfloat16), CompiledLinear),
        ("avx512", (torch.bfloat16, torch.float32), CompiledLinear),
        ("avx2", (torch.float32, torch.float32), CompiledLinear),
        ("avx2", (torch.float16, torch.float16), TorchLinear),
        ("generic", (torch.float32, torch.float32), TorchLinear),
        ("none", (torch.bfloat16, torch.bfloat16), TorchLinear),
    ],
)
def test_dtypes_and_machine_decide_who_computes(
    instruction_set: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    expected: type[PackedLinear],
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = None if instruction_set == "none" else with_instruction_set(kernels, instruction_set)
    monkeypatch.setattr(choice, "find_kernels", lambda: found)
    weight = torch.randn(40, 30).to(dtypes[0])
    packed = pack_linear([weight], dtype=dtypes[1])
    assert type(packed) is expected
    for num_rows in (1, 16, 37):
        inputs = torch.randn(num_rows, 30).to(dtypes[1])
        outputs = torch.ones(num_rows, 40, dtype=dtypes[1])
        packed.into(inputs, outputs, accumulate=True)
        torch.testing.assert_close(outputs.double(), inputs.double() @ weight.double().t() + 1, rtol=0.02, atol=0.1)


@torch.inference_mode()
def test_large_outputs_of_a_head_use_the_same_memory(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "LARGE_BYTES", 4 * 4 * 50)
    packed = CompiledLinear([torch.randn(50, 8)], None, kernels)
    inputs = torch.randn(6, 8)
    before = packed.forward(inputs).clone()
    packed.keeps_large_outputs = True
    first = packed.forward(inputs)
    assert torch.equal(first, before)
    assert packed.forward(inputs[:5]).data_ptr() == first.data_ptr()
    assert packed.forward(inputs[:3]).data_ptr() != first.data_ptr()


@pytest.mark.usefixtures("kernels")
def test_without_memory_for_a_packed_copy_the_weights_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice._warn_once.cache_clear()
    monkeypatch.setattr(choice, "free_host_bytes", lambda: 500)
    large, small = nn.Linear(8, 8), nn.Linear(8, 7)  # 2 x 256 and 2 x 224 bytes
    use_packed_linear(nn.Sequential(large, small), torch.float32)
    assert [is_compiled(large), is_compiled(small)] == [False, True]
    assert isinstance(pack_linear([large.weight]), TorchLinear)
    assert caplog.text.count("there is no memory for packed weights") == 1


@pytest.mark.usefixtures("kernels")
def test_a_model_generates_the_same_and_releases_its_weights_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen2", tmp_path)  # biases, and a tied head
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    monkeypatch.setattr(rank_model, "fuse", lambda *_: None)  # as for a model that is not recognised
    worker = start_worker(tmp_path)
    assert is_compiled(worker._model.module.lm_head)
    compiled = [request.output for request in Driver(worker, 1).run(prompts, 8)]
    head = weakref.ref(worker._model.module.lm_head.weight)
    panels = weakref.ref(worker._model.module.model.layers[0].mlp.up_proj.forward.__self__.weights)
    worker.sleep(2)
    gc.collect()
    assert head() is None
    assert panels() is None
    monkeypatch.setattr(choice, "find_kernels", lambda: None)
    assert [request.output for request in Driver(start_worker(tmp_path), 1).run(prompts, 8)] == compiled


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_another_module_reads_stay_as_they_are(dtype: str, tmp_path: Path) -> None:
    """Also if they are stored in bfloat16, and widened until they are packed."""
    build_model("llama", **LONGCAT).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    worker = start_worker(tmp_path, dtype="float32")
    layers = [module for module in worker._model.module.modules() if type(module) is nn.Linear]
    unpacked = {layer for layer in layers if layer.weight.dim() == 2}
    assert unpacked == {layer.mlp.router.classifier for layer in worker._model.module.model.layers}
    assert all(is_compiled(layer) for layer in layers)
    check_against_transformers(tmp_path, Driver(worker, 1).run(random_prompts(1)[:4], MAX_TOKENS))


def test_none_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    monkeypatch.setenv(VARIABLE, "none")
    find_kernels.cache_clear()
    try:
        assert not any(is_compiled(module) for module in start_worker(tmp_path)._model.module.modules())
    finally:
        find_kernels.cache_clear()
