"""A recurrent layer of a model whose mixer runs through kernels of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from millrace.worker.linear.modules import widened_linear
from millrace.worker.recurrent.mixer import Mixer


class MixerOperation(Protocol):
    """What a layer does between its projections, with the states of its sequences. See `CompiledMixer`."""

    @property
    def num_slots(self) -> int: ...

    @property
    def states(self) -> list[Tensor]: ...

    def allocate(self, num_slots: int) -> None: ...

    def release(self) -> None: ...

    def rows(self, query_starts: list[int], slots: Tensor, is_new: Tensor) -> Any: ...

    def run(self, projected: Tensor, rows: Any, output: Tensor | None = None) -> Tensor: ...


MakeOperation: TypeAlias = Callable[[Mixer, int, torch.dtype], MixerOperation]
"""Makes one from a mixer, the outputs of its projection, and the dtype of the activations."""


class MixerLayer:
    """Takes the place of the forward of a recurrent module."""

    def __init__(self, make: MakeOperation, mixer: Mixer, dtype: torch.dtype) -> None:
        self._mixer, self._dtype = mixer, dtype
        self.projection, self.output, self.output_width = mixer.merge_projections(), mixer.output, mixer.output_width
        self.operation = make(mixer, self.projection.out_features, dtype)
        self.rows: Any = None
        """Those of the step. None: there is none."""

    def take_over(self, module: Any) -> None:
        """Replace the forward of the module, and several projections by one."""
        module.forward = self.forward
        if len(self._mixer.projections) == 1:
            return
        for name in self._mixer.projections:
            delattr(module, name)
        module.projection = self.projection
        if self.projection.weight.dtype != self._dtype:  # until it is packed
            self.projection.forward = partial(widened_linear, self.projection, self._dtype)  # type: ignore[method-assign]

    @property
    def num_slots(self) -> int:
        return self.operation.num_slots

    def allocate(self, num_slots: int) -> None:
        self.operation.allocate(num_slots)

    def release(self) -> None:
        self.operation.release()

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.operation.states)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:  # [1, T, H]
        if self.rows is None:  # a pass that looks at the attention layers
            return torch.zeros_like(hidden_states)
        results: Tensor = self.output(self.mix(self.projection(hidden_states[0])))
        return results.unsqueeze(0)

    def mix(self, projected: Tensor, output: Tensor | None = None) -> Tensor:  # [T, W] -> [T, Hv * Dv]
        """Run the operation for the rows of the step."""
        assert self.rows is not None, "RecurrentStates.begin comes first"
        return self.operation.run(projected, self.rows, output)

    def in_parts(self, hidden: Tensor, lengths: Iterable[int]) -> Tensor:  # [1, T, H] -> [1, T, H]
        """Return the results of a sequence that is computed in parts of these lengths, before any weights are packed."""
        self.allocate(2)
        parts: list[Tensor] = []
        for part in hidden[0].split(list(lengths)):
            slots = torch.ones(1, dtype=torch.int64, device="cpu")
            is_new = torch.tensor([not parts], dtype=torch.bool, device="cpu")
            rows = self.operation.rows([0, len(part)], slots, is_new)
            results = self.operation.run(widened_linear(self.projection, self._dtype, part), rows)
            parts.append(widened_linear(self.output, self._dtype, results))
        self.release()
        return torch.cat(parts).unsqueeze(0)
