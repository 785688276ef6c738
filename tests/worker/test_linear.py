"""Which linear layers of a model the compiled kernel computes."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import millrace.worker.linear as compiled_linear
import millrace.worker.rank as worker_rank
from millrace.worker.kernels.library import VARIABLE, Kernels, LinearCall, find_kernels
from millrace.worker.linear import CompiledLinear, use_compiled_linear
from tests.worker.driver import Driver, start_worker
from tests.worker.models import make_model


@pytest.fixture
def kernels() -> Kernels:
    found = find_kernels()
    if found is None:
        pytest.skip("there are no compiled kernels")
    return found


@pytest.fixture
def always_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_linear, "_is_fast", lambda *_: True)


def is_compiled(module: nn.Module) -> bool:
    return "forward" in vars(module)


class Derived(nn.Linear):
    """Computes something else, for all that the worker knows."""


@pytest.mark.usefixtures("always_fast")
def test_only_plain_layers_without_hooks_are_replaced(kernels: Kernels) -> None:
    hooked, halves = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float16)
    hooked.register_forward_hook(lambda *_: None)
    plain = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, dtype=torch.bfloat16)]
    model = nn.ModuleList([hooked, halves, Derived(8, 8), *plain])
    use_compiled_linear(model, kernels)
    assert [is_compiled(module) for module in model] == [False, False, False, True, True, True]
    assert [name for name, _ in model.named_parameters()][-1] == "5.bias"


@pytest.mark.usefixtures("always_fast")
def test_a_kernel_that_differs_from_torch_is_not_used(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: Kernels, call: LinearCall) -> None:
        call.bias = None
        self.library.millrace_linear(ctypes.byref(call))

    monkeypatch.setattr(Kernels, "linear", wrong)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    use_compiled_linear(model, kernels)
    assert [is_compiled(module) for module in model] == [False, True]
    assert "differs from torch in linear layers of 8 inputs and 8 outputs" in caplog.text


@pytest.mark.parametrize(("fast_up_to", "expected"), [(0, 0), (1, 1), (16, 16), (256, compiled_linear.ALL_ROWS)])
def test_the_kernel_is_used_up_to_the_rows_at_which_it_is_fast(
    fast_up_to: int, expected: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_linear, "_is_fast", lambda _compiled, _linear, inputs: len(inputs) <= fast_up_to)
    monkeypatch.setattr(compiled_linear, "MEASURE_S", 60.0)
    model = nn.Sequential(nn.Linear(8, 16))
    with caplog.at_level(logging.INFO, logger="millrace.worker"):
        use_compiled_linear(model, kernels)
    assert f"8x16 {'all' if expected > 256 else expected}; measured in" in caplog.text
    assert is_compiled(model[0]) == (expected > 0)


@torch.inference_mode()
def test_more_rows_other_dtypes_and_no_rows_go_to_torch(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(8, 4)
    compiled = CompiledLinear(linear, kernels, max_rows=6)
    calls: list[int] = []
    monkeypatch.setattr(Kernels, "linear", lambda _, call: calls.append(call.num_rows))
    for shape in ((2, 3, 8), (7, 8), (0, 8), (8,)):
        assert compiled.forward(torch.ones(shape)).shape == (*shape[:-1], 4)
    assert calls == [6, 1]
    with pytest.raises(RuntimeError, match="dtype"):  # as torch's
        compiled.forward(torch.ones(1, 8, dtype=torch.bfloat16))


@torch.inference_mode()
def test_inputs_with_gaps_are_copied(kernels: Kernels) -> None:
    linear = nn.Linear(8, 4)
    inputs = torch.randn(8, 5).t()
    torch.testing.assert_close(CompiledLinear(linear, kernels).forward(inputs), linear(inputs))


@pytest.mark.usefixtures("kernels", "always_fast")
def test_a_model_generates_the_same_and_releases_its_weights_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen2", tmp_path)  # biases, and a tied head
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    worker = start_worker(tmp_path)
    assert is_compiled(worker._model.lm_head)
    compiled = [request.output for request in Driver(worker, 1).run(prompts, 8)]
    head = weakref.ref(worker._model.lm_head.weight)
    worker.sleep(2)
    gc.collect()
    assert head() is None
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
