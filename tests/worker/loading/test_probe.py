"""What the probe of a model costs."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from millrace.worker.attention.interface import ATTENTION_NAME
from millrace.worker.loading.probe import probe_layers
from tests.worker.models import build_model


class Recorder(TorchFunctionMode):
    """Notes the names of the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_probe_computes_no_products() -> None:
    model = build_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    with Recorder() as recorder:
        assert len(probe_layers(model)) == model.config.num_hidden_layers
    assert "silu" in recorder.names
    assert "linear" not in recorder.names
