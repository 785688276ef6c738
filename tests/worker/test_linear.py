"""Which linear layers of a model the compiled kernel computes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import millrace.worker.linear as compiled_linear
import millrace.worker.rank as worker_rank
from millrace.worker.kernels.library import VARIABLE, Kernels, find_kernels
from millrace.worker.linear import CompiledLinear, TorchLinear, pack_linear, use_compiled_linear
from tests.worker.driver import Driver, start_worker
from tests.worker.models import make_model


@pytest.fixture
def kernels() -> Kernels:
    found = find_kernels()
    if found is None:
        pytest.skip("there are no compiled kernels")
    return found


def is_compiled(module: nn.Module) -> bool:
    return "forward" in vars(module)


class Derived(nn.Linear):
    """Computes something else, for all that the worker knows."""


def test_only_plain_layers_without_hooks_are_replaced(kernels: Kernels) -> None:
    hooked, halves = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float16)
    hooked.register_forward_hook(lambda *_: None)
    plain = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, dtype=torch.bfloat16)]
    model = nn.ModuleList([hooked, halves, Derived(8, 8), *plain])
    use_compiled_linear(model, kernels)
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
    use_compiled_linear(model, kernels)
    assert [is_compiled(module) for module in model] == [False, True]
    assert "differs from torch in linear layers of 8 inputs and 8 outputs" in caplog.text


@torch.inference_mode()
def test_inputs_with_gaps_and_no_rows_and_other_dtypes(kernels: Kernels) -> None:
    linear = nn.Linear(8, 4)
    packed = CompiledLinear(linear.weight, linear.bias, kernels)
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
    monkeypatch.setattr(compiled_linear, "find_kernels", lambda: kernels if has_kernels else None)
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
    peaks, token_ids = packed.argmax(inputs)
    torch.testing.assert_close(peaks, expected.max(1).values)
    assert torch.equal(token_ids, expected.argmax(1))


def test_without_memory_for_a_packed_copy_the_weights_stay(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_linear, "free_host_bytes", lambda: 500)
    large, small = nn.Linear(8, 8), nn.Linear(8, 7)  # 2 x 256 and 2 x 224 bytes
    use_compiled_linear(nn.Sequential(large, small), kernels)
    assert [is_compiled(large), is_compiled(small)] == [False, True]
    assert isinstance(pack_linear([large.weight]), TorchLinear)


@pytest.mark.usefixtures("kernels")
def test_a_model_generates_the_same_and_releases_its_weights_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen2", tmp_path)  # biases, and a tied head
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    monkeypatch.setattr(worker_rank, "fuse", lambda *_: None)  # as for a model that is not recognised
    worker = start_worker(tmp_path)
    assert is_compiled(worker._model.lm_head)
    compiled = [request.output for request in Driver(worker, 1).run(prompts, 8)]
    head = weakref.ref(worker._model.lm_head.weight)
    panels = weakref.ref(worker._model.model.layers[0].mlp.up_proj.forward.__self__.weights)
    worker.sleep(2)
    gc.collect()
    assert head() is None
    assert panels() is None
    monkeypatch.setattr(worker_rank, "find_kernels", lambda: None)
    assert [request.output for request in Driver(start_worker(tmp_path), 1).run(prompts, 8)] == compiled


def test_none_turns_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    monkeypatch.setenv(VARIABLE, "none")
    find_kernels.cache_clear()
    try:
        assert not any(is_compiled(module) for module in start_worker(tmp_path)._model.modules())
    finally:
        find_kernels.cache_clear()
