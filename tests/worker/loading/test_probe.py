"""What the probe of a model costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from millrace.worker.attention.interface import ATTENTION_NAME
from millrace.worker.loading.dtype import keep_bfloat16
from millrace.worker.loading.probe import probe_layers
from tests.worker.models import build_model


class Recorder(TorchFunctionMode):
    """Notes the names of the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.num_widened = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        if func is Tensor.to and isinstance(args[0], Parameter):
            self.num_widened += 1
        return func(*args, **(kwargs or {}))


def test_the_probe_computes_no_products() -> None:
    model = build_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    with Recorder() as recorder:
        assert len(probe_layers(model)) == model.config.num_hidden_layers
    assert "silu" in recorder.names
    assert "linear" not in recorder.names


def test_an_error_of_the_gpu_in_the_probe_is_none_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    model = build_model("llama")
    monkeypatch.setattr(type(model), "forward", fail)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        probe_layers(model)


def test_the_probe_widens_no_weights() -> None:
    """Float32 layers with bfloat16 weights would widen all of them."""
    model = build_model("qwen3")
    model.set_attn_implementation(ATTENTION_NAME)
    keep_bfloat16(model)
    with Recorder() as recorder:
        assert len(probe_layers(model)) == model.config.num_hidden_layers
    assert recorder.num_widened == 0
