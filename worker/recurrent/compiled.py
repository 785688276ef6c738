"""Recurrent layers through the compiled kernels: one call for what is between a layer's projections.

Shapes: T tokens of the step, R rows, S slots, W outputs of the projection, and those of `mixer.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from millrace.worker.kernels.library import KERNEL_DTYPES, Kernels, RecurrenceCall, check
from millrace.worker.linear.modules import widened_linear
from millrace.worker.recurrent.mixer import CONVOLUTION, Mixer

MOST_TAPS = 8
"""As in recurrence.inc.h."""
_STATE_VALUES = 16
"""The kernels read whole vectors of the values of a state."""


class CompiledRows:
    """The rows of a step. The tensors have to outlive the calls."""

    def __init__(self, query_starts: list[int], slots: Tensor, is_new: Tensor) -> None:
        self.query_starts = torch.tensor(query_starts, dtype=torch.int32, device="cpu")
        self.slots = slots.to(torch.int32)  # [R]
        self.is_new = is_new.to(torch.uint8)  # [R]


class CompiledMixer:
    """Computes what a layer does between its projections, and owns the states of its sequences."""

    def __init__(self, kernels: Kernels, mixer: Mixer, width: int, dtype: torch.dtype) -> None:
        """`width`: W. `dtype`: of the activations."""
        names = ("conv_weights", "conv_bias", "rates", "step_bias", "skips", "norm_weights")
        self._constants = {name: tensor for name in names if (tensor := getattr(mixer, name)) is not None}
        state_dim = -(-mixer.value_dim // _STATE_VALUES) * _STATE_VALUES
        self._shapes = (len(mixer.conv_weights) - 1, mixer.num_channels), (mixer.num_heads, mixer.key_dim, state_dim)
        self._output_width, self._has_states = mixer.output_width, mixer.rule != CONVOLUTION
        self._call = RecurrenceCall(
            rule=mixer.rule,
            dtype=KERNEL_DTYPES[dtype],
            width=width,
            num_channels=mixer.num_channels,
            num_taps=len(mixer.conv_weights),
            num_key_heads=mixer.num_key_heads,
            num_heads=mixer.num_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            state_dim=state_dim,
            norm_size=mixer.norm_size,
            gates_first=mixer.gates_first,
            gain=mixer.gain,
            epsilon=mixer.epsilon,
            **mixer.offsets,
            **{name: tensor.data_ptr() for name, tensor in self._constants.items()},
        )
        self._pointer, self._run = ctypes.byref(self._call), kernels.table.recurrence
        self.states: list[Tensor] = []  # float32 [S, taps - 1, C] and [S, Hv, D, state_dim]

    @property
    def num_slots(self) -> int:
        return len(self.states[0]) if self.states else 0

    def allocate(self, num_slots: int) -> None:
        """Make space for the states of so many sequences. Keeps those that there are."""
        if self.num_slots >= num_slots:
            return
        shapes = self._shapes if self._has_states else self._shapes[:1]
        grown = [torch.zeros(num_slots, *shape, dtype=torch.float32, device="cpu") for shape in shapes]
        for old, new in zip(self.states, grown, strict=False):
            new[: len(old)] = old
        self.states = grown
        self._call.conv_states = grown[0].data_ptr()
        self._call.states = grown[1].data_ptr() if self._has_states else None

    def run(self, projected: Tensor, rows: CompiledRows, output: Tensor | None = None) -> Tensor:
        """Return, or write to `output`, the results [T, Hv * Dv] for contiguous outputs [T, W] of the projections."""
        assert projected.is_contiguous() and projected.shape == (rows.query_starts[-1], self._call.width)
        if output is None:
            output = projected.new_empty(len(projected), self._output_width)
        call = self._call
        call.query_starts, call.slots = rows.query_starts.data_ptr(), rows.slots.data_ptr()
        call.is_new, call.num_rows = rows.is_new.data_ptr(), len(rows.slots)
        call.input, call.output, call.num_threads = projected.data_ptr(), output.data_ptr(), torch.get_num_threads()
        check(self._run(self._pointer))
        return output


class CompiledLayer:
    """Takes the place of the forward of a recurrent module."""

    def __init__(self, kernels: Kernels, mixer: Mixer, dtype: torch.dtype) -> None:
        self._mixer, self._dtype = mixer, dtype
        self.projection, self.output, self.output_width = mixer.merge_projections(), mixer.output, mixer.output_width
        self._compiled = CompiledMixer(kernels, mixer, self.projection.out_features, dtype)
        self.rows: CompiledRows | None = None

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
        return self._compiled.num_slots

    def allocate(self, num_slots: int) -> None:
        self._compiled.allocate(num_slots)

    def release(self) -> None:
        self._compiled.states = []

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._compiled.states)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:  # [1, T, H]
        if self.rows is None:  # a pass that looks at the attention layers
            return torch.zeros_like(hidden_states)
        results: Tensor = self.output(self.mix(self.projection(hidden_states[0])))
        return results.unsqueeze(0)

    def mix(self, projected: Tensor, output: Tensor | None = None) -> Tensor:
        """See `CompiledMixer.run`."""
        assert self.rows is not None, "RecurrentStates.begin comes first"
        return self._compiled.run(projected, self.rows, output)

    def in_parts(self, hidden: Tensor, lengths: Iterable[int]) -> Tensor:  # [1, T, H] -> [1, T, H]
        """Return the results of a sequence that is computed in parts of these lengths, before any weights are packed."""
        self.allocate(2)
        parts: list[Tensor] = []
        for part in hidden[0].split(list(lengths)):
            is_new = torch.tensor([not parts], dtype=torch.bool, device="cpu")
            rows = CompiledRows([0, len(part)], torch.ones(1, dtype=torch.int32, device="cpu"), is_new)
            results = self._compiled.run(widened_linear(self.projection, self._dtype, part), rows)
            parts.append(widened_linear(self.output, self._dtype, results))
        self.release()
        return torch.cat(parts).unsqueeze(0)
