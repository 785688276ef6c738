"""Recurrent layers through the compiled kernels: one call for what is between a layer's projections.

Shapes: T tokens of the step, R rows, S slots, W outputs of the projection, and those of `mixer.py`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from millrace.worker.kernels.library import KERNEL_DTYPES, Kernels, RecurrenceCall, check
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

    def __init__(self, kernels: Kernels, mixer: Mixer, width: int, dtype: torch.dtype, *, rounds: bool = True) -> None:
        """`width`: W. `dtype`: of the activations. `rounds`: whether in bfloat16 long rows may be computed by products of
        matrices of that format. Then a result depends on how the tokens of its sequence are divided over steps. Raises
        `ValueError` for a convolution that is too long."""
        if len(mixer.conv_weights) > MOST_TAPS:
            raise ValueError(f"a convolution of {len(mixer.conv_weights)} taps, more than {MOST_TAPS}")
        names = ("conv_weights", "conv_bias", "rates", "step_bias", "skips", "norm_weights")
        self._constants = {name: tensor for name in names if (tensor := getattr(mixer, name)) is not None}
        state_dim = -(-mixer.value_dim // _STATE_VALUES) * _STATE_VALUES
        self._shapes = (len(mixer.conv_weights) - 1, mixer.num_channels), (mixer.num_heads, mixer.key_dim, state_dim)
        self._output_width, self._has_states = mixer.output_width, mixer.rule != CONVOLUTION
        self._call = RecurrenceCall(
            rule=mixer.rule,
            dtype=KERNEL_DTYPES[dtype],
            rounds=rounds,
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
        """Make space for the states of so many sequences. Keeps those that there are. Memory is taken when a sequence first
        has a slot: a row that begins one does not read it."""
        if self.num_slots >= num_slots:
            return
        shapes = self._shapes if self._has_states else self._shapes[:1]
        grown = [torch.empty(num_slots, *shape, dtype=torch.float32, device="cpu") for shape in shapes]
        for old, new in zip(self.states, grown, strict=False):
            new[: len(old)] = old
        self.states = grown
        self._call.conv_states = grown[0].data_ptr()
        self._call.states = grown[1].data_ptr() if self._has_states else None

    def release(self) -> None:
        self.states = []

    def rows(self, query_starts: list[int], slots: Tensor, is_new: Tensor) -> CompiledRows:
        """Return the rows of a step. `slots` [R] and `is_new` [R] are on the host."""
        return CompiledRows(query_starts, slots, is_new)

    def run(self, projected: Tensor, rows: CompiledRows, output: Tensor | None = None) -> Tensor:
        """Return, or write to `output`, the results [T, Hv * Dv] for contiguous outputs [T, W] of the projections."""
        # The library does not check its arguments.
        assert self.states and projected.is_contiguous()
        assert projected.shape == (int(rows.query_starts[-1]), self._call.width)
        if output is None:
            output = projected.new_empty(len(projected), self._output_width)
        call = self._call
        call.query_starts, call.slots = rows.query_starts.data_ptr(), rows.slots.data_ptr()
        call.is_new, call.num_rows = rows.is_new.data_ptr(), len(rows.slots)
        call.input, call.output, call.num_threads = projected.data_ptr(), output.data_ptr(), torch.get_num_threads()
        check(self._run(self._pointer))
        return output
