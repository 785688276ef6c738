"""The ways to compute a linear layer on a CPU: the compiled kernel with packed weights, and torch, whose class is also the
base of those of a GPU.

With the compiled kernel the result of a row does not depend on the other rows of the step; torch rounds differently for
other numbers of rows.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.worker.kernels.library import (
    KERNEL_CODES_4,
    KERNEL_CODES_8,
    KERNEL_DTYPES,
    KERNEL_FLOATS_8,
    KERNEL_INT8,
    Kernels,
    LinearCall,
    PackCall,
    check,
)
from millrace.worker.linear.codes import CodedWeight

LARGE_BYTES = 32 << 20
"""Memory of this size is always returned to the system when it is released."""
PANELS_AT_A_TIME = 16
"""As many are rounded together."""


class RowMasks(NamedTuple):
    """Which outputs some rows may have. The other rows may have all."""

    rows: Tensor  # [R], ascending
    bits: Tensor  # [R, B] uint8, a bit for each output, the lowest bit first


class PackedLinear(ABC):
    """One linear layer, or several with the same inputs whose outputs follow one another (q, k and v; gate and up).

    Inputs are contiguous and of the type `dtype`, outputs of the type `output_dtype`. Neither is checked.
    """

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype, output_dtype: torch.dtype) -> None:
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.dtype, self.output_dtype = dtype, output_dtype

    name: str
    """Name of the implementation, for logs."""
    weights: Tensor
    """The layer's only copy of the weights. Their order is that of the implementation."""

    @abstractmethod
    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        """Write the result for inputs [M, K] to outputs [M, N], or add it to them. M is at least 1."""

    keeps_large_outputs = False
    """Whether `forward` returns large outputs in the memory of its last call: for a head, whose logits are read before
    the next step. New memory of that size is mapped anew each time, which takes as long as the multiplication."""
    _kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:  # [..., K] -> [..., N]
        """Replaces the forward of an `nn.Linear`."""
        if inputs.dtype is not self.dtype or inputs.shape[-1] != self.num_inputs:
            raise RuntimeError(
                f"inputs {list(inputs.shape)} of dtype {inputs.dtype}, but the layer has {self.num_inputs} inputs of "
                f"dtype {self.dtype}"
            )
        num_rows = inputs.numel() // self.num_inputs
        outputs = self._output_memory(num_rows)
        if num_rows:
            self.into(inputs.reshape(-1, self.num_inputs).contiguous(), outputs)
        return outputs.view(*inputs.shape[:-1], self.num_outputs)

    def _output_memory(self, num_rows: int) -> Tensor:  # [M, N]
        if not self.keeps_large_outputs or num_rows * self.num_outputs * self.output_dtype.itemsize < LARGE_BYTES:
            return torch.empty(num_rows, self.num_outputs, dtype=self.output_dtype, device="cpu")
        if self._kept is None or len(self._kept) < num_rows:
            self._kept = torch.empty(num_rows, self.num_outputs, dtype=self.output_dtype, device="cpu")
        return self._kept[:num_rows]


class KernelLinear(PackedLinear):
    """A layer that the compiled kernel computes, from weights in panels."""

    bias: Tensor | None  # [N] float32

    def _make_call(self, kernels: Kernels, panels: Tensor, weight_dtype: int, bias: Tensor | None) -> None:
        """Fill the fields of a call that stay the same."""
        self.weights, self.bias = panels, None if bias is None else bias.float().contiguous()
        self._call = LinearCall(
            panels=self.weights.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            weight_dtype=weight_dtype,
            input_dtype=KERNEL_DTYPES[self.dtype],
            output_dtype=KERNEL_DTYPES[self.output_dtype],
        )
        self._reference, self._linear = ctypes.byref(self._call), kernels.table.linear

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        call = self._call
        call.input, call.output = inputs.data_ptr(), outputs.data_ptr()
        call.num_rows, call.accumulates, call.num_threads = inputs.shape[0], accumulate, torch.get_num_threads()
        if self._linear(self._reference):
            check(-1)


class CompiledLinear(KernelLinear):
    """A layer of weights in float32, bfloat16 or 8 bits."""

    name = "compiled kernel"

    def __init__(
        self,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        kernels: Kernels,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of the weights if it is None, and `output_dtype` is `dtype`. All are float32 or bfloat16."""
        dtype = dtype or weights[0].dtype
        super().__init__(weights[0].shape[1], sum(map(len, weights)), dtype, output_dtype or dtype)
        self.row_dtype = weights[0].dtype
        """Dtype of `weight_rows`: that of the weights before they were packed."""
        self._make_call(kernels, _to_panels(weights, self.num_outputs, kernels), KERNEL_DTYPES[self.row_dtype], bias)
        self._weight_scales: Tensor | None = None
        self._screen: tuple[Tensor, Tensor, Tensor] | None = None
        self._pack, self._unpack = kernels.table.pack, kernels.table.unpack

    def screen_argmax(self) -> None:
        """Let `argmax` find from rounded weights and inputs the outputs that can be the largest, and compute only these
        exactly: the results are the same. Inputs are float32, and there is no bias. Takes a byte for each weight."""
        assert self.bias is None and not self.is_quantized
        num_panels, width, num_inputs = self.weights.shape[0], self.weights.shape[2], self.num_inputs
        shape = num_panels, _byte_lines(num_inputs), width
        rounded = torch.empty(shape, dtype=torch.int32, device="cpu")  # of four bytes
        scales, errors = torch.empty(2, num_panels, dtype=torch.float32, device="cpu").unbind()
        for first in range(0, num_panels, PANELS_AT_A_TIME):
            part = slice(first, first + PANELS_AT_A_TIME)
            weights = self.weights[part].transpose(2, 3).flatten(1, 2)[:, :num_inputs].float()
            scale = torch.maximum(weights.amax(dim=(1, 2)), -weights.amin(dim=(1, 2))).div_(127).add_(1e-36)
            scaled = weights.div(scale.view(-1, 1, 1))
            integers = scaled.round()
            fours = F.pad(integers, (0, 0, 0, 4 * rounded.shape[1] - num_inputs)).int().unflatten(1, (-1, 4)).unbind(2)
            rounded[part] = fours[0] & 255 | (fours[1] & 255) << 8 | (fours[2] & 255) << 16 | fours[3] << 24
            length, difference = (each.square().sum(dim=1).amax(dim=1).sqrt() for each in (integers, scaled - integers))
            # Rounding changes inputs by at most 2^-15 of the largest one each, and a sum by 2^-24 for each input.
            difference += (length + difference) * (num_inputs**0.5 * 2.0**-15 + num_inputs * 2.0**-22)
            scales[part], errors[part] = scale, difference.mul_(scale).mul_(1.01).add_(1e-30)
        self._screen = rounded, scales, errors
        self._call.rounded, self._call.scales, self._call.errors = (each.data_ptr() for each in self._screen)

    @property
    def is_quantized(self) -> bool:
        return self._weight_scales is not None

    def quantize(self) -> None:
        """Round the weights to 8 bits, with a scale for each output, in the same tensor. From now on inputs are rounded too,
        to 15 bits of the largest one of their row."""
        num_panels, _, width, _ = self.weights.shape
        panels = torch.empty(num_panels, _byte_lines(self.num_inputs), width, 4, dtype=torch.int8, device="cpu")
        panels[-1].zero_()  # the places that stay free
        scales = torch.zeros(num_panels * width, dtype=torch.float32, device="cpu")
        for output_ids in torch.arange(self.num_outputs, device="cpu").split(PANELS_AT_A_TIME * width):
            rows = torch.empty(len(output_ids), self.num_inputs, dtype=self.row_dtype, device="cpu")
            self.weight_rows(output_ids, rows)
            self._pack(
                ctypes.byref(
                    PackCall(
                        weights=rows.data_ptr(),
                        panels=panels.data_ptr(),
                        scales=scales.data_ptr(),
                        first_output=int(output_ids[0]),
                        num_outputs=len(rows),
                        num_inputs=self.num_inputs,
                        dtype=KERNEL_DTYPES[self.row_dtype],
                        num_threads=torch.get_num_threads(),
                    )
                )
            )
        self.weights.data, self._weight_scales, self._screen = panels, scales, None
        self._call.panels, self._call.weight_scales = panels.data_ptr(), scales.data_ptr()
        self._call.weight_dtype, self._call.rounded = KERNEL_INT8, None
        self.name = "compiled kernel, int8"

    def weight_rows(self, output_ids: Tensor, rows: Tensor) -> None:  # [M], [M, K]
        """Fill rows of `row_dtype` with the weights of some outputs, as they were before they were packed. Of a quantized
        layer they are as they were rounded, and the rows may be float32 or bfloat16. The ids (int64) and rows are contiguous
        and not checked."""
        self._unpack(
            ctypes.byref(
                PackCall(
                    weights=rows.data_ptr(),
                    panels=self.weights.data_ptr(),
                    scales=self._call.weight_scales,
                    output_ids=output_ids.data_ptr(),
                    num_outputs=len(output_ids),
                    num_inputs=self.num_inputs,
                    dtype=KERNEL_DTYPES[rows.dtype],
                    num_threads=torch.get_num_threads(),
                )
            )
        )

    def argmax(self, inputs: Tensor, masks: RowMasks | None = None) -> tuple[Tensor, Tensor]:
        """Return the largest outputs [M] (float32) for inputs [M, K], M at least 1, and the lowest ids [M] that have them. A
        row with a NaN has the peak NaN. Of a row with a mask only outputs that it allows are computed. If it allows none,
        the peak is -inf."""
        call, num_rows = self._call, inputs.shape[0]
        peaks = torch.empty(num_rows, dtype=torch.float32, device="cpu")
        token_ids = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        call.input, call.output, call.allowed = inputs.data_ptr(), None, None
        call.peaks, call.token_ids = peaks.data_ptr(), token_ids.data_ptr()
        if masks is not None:
            row_bytes = self.weights.shape[0] * self.weights.shape[2] // 8  # of whole panels
            allowed = torch.full((num_rows * row_bytes + 8,), 255, dtype=torch.uint8, device="cpu")
            rows = masks.rows if len(masks.rows) < num_rows else slice(None)  # many times as fast as an index
            allowed[:-8].view(num_rows, row_bytes)[rows, : masks.bits.shape[1]] = masks.bits[:, :row_bytes]
            call.allowed = allowed.data_ptr()
        call.num_rows, call.num_threads = num_rows, torch.get_num_threads()
        check(self._linear(self._reference))
        return peaks, token_ids


class CodedLinear(KernelLinear):
    """A layer of weights that are codes of a quantized checkpoint."""

    def __init__(
        self, weight: CodedWeight, bias: Tensor | None, kernels: Kernels, dtype: torch.dtype, output_dtype: torch.dtype
    ) -> None:
        num_outputs, num_inputs = weight.shape
        super().__init__(num_inputs, num_outputs, dtype, output_dtype)
        coded, width = weight.coded, kernels.table.panel_outputs
        table = torch.zeros(16, dtype=torch.float32, device="cpu") if coded.table is None else coded.table
        self._others = {
            "code_table": table,
            "code_scales": _by_panel(coded.scales, width),
            "code_zeros": None if coded.zeros is None else _by_panel(coded.zeros, width),
            "groups": coded.groups.contiguous(),
        }
        kind = {torch.uint8: KERNEL_CODES_4, torch.int8: KERNEL_CODES_8}.get(coded.codes.dtype, KERNEL_FLOATS_8)
        self.name = f"compiled kernel, codes of {4 if kind == KERNEL_CODES_4 else 8} bits"
        self._make_call(kernels, _by_panel(coded.lines(), width), kind, bias)
        for name, tensor in self._others.items():
            setattr(self._call, name, None if tensor is None else tensor.data_ptr())
        self._call.num_groups, self._call.by_group = coded.scales.shape[1], coded.is_by_group
        self.can_round = coded.is_by_group and coded.are_integers
        """Whether the products can be those of integers."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded to 15 bits of the largest one of their row, which is faster."""
        return bool(self._call.rounds)

    @rounds_inputs.setter
    def rounds_inputs(self, rounds: bool) -> None:
        self._call.rounds = rounds and self.can_round


def _by_panel(rows: Tensor, width: int) -> Tensor:  # [N, E] -> [panels, E, width]
    """Exchange rows and entries in panels of `width` rows. The last panel is filled up with zeros."""
    return F.pad(rows, (0, 0, 0, -len(rows) % width)).reshape(-1, width, rows.shape[1]).transpose(1, 2).contiguous()


def _byte_lines(num_inputs: int) -> int:
    """Lines of a panel in which a weight has a byte."""
    return -(-num_inputs // 64) * 16


def _to_panels(weights: Sequence[Tensor], num_outputs: int, kernels: Kernels) -> Tensor:
    """Return the weights [N_i, K] one after the other in panels, as linear.inc.h describes them."""
    num_inputs, dtype = weights[0].shape[1], weights[0].dtype
    width, per_line = kernels.table.panel_outputs, 2 if dtype == torch.bfloat16 else 1
    shape = (-(-num_outputs // width), -(-num_inputs // per_line), width, per_line)
    panels = torch.empty(shape, dtype=dtype, device="cpu")
    panels[num_outputs // width :].zero_()  # the places of the last panel and line that stay free
    panels[:, num_inputs // per_line :].zero_()
    first_output = 0
    for weight in weights:
        assert weight.dtype == dtype and weight.shape[1] == num_inputs
        rows = weight.contiguous()
        kernels.table.pack(
            ctypes.byref(
                PackCall(
                    weights=rows.data_ptr(),
                    panels=panels.data_ptr(),
                    first_output=first_output,
                    num_outputs=len(rows),
                    num_inputs=num_inputs,
                    dtype=KERNEL_DTYPES[dtype],
                    num_threads=torch.get_num_threads(),
                )
            )
        )
        first_output += len(rows)
    return panels


class TorchLinear(PackedLinear):
    """A layer that torch computes, from weights that are not packed."""

    name = "torch"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or weight.dtype
        super().__init__(weight.shape[1], weight.shape[0], dtype, output_dtype or dtype)
        self.weights, self._bias = weight, None if bias is None else bias.to(dtype)

    def into(self, inputs: Tensor, outputs: Tensor, accumulate: bool = False) -> None:
        if not self.weights.dtype == self.dtype == outputs.dtype:  # else the product itself writes or adds
            results = F.linear(inputs, self.weights.to(self.dtype), self._bias)
            (outputs.add_ if accumulate else outputs.copy_)(results)
        elif accumulate:
            outputs.addmm_(inputs, self.weights.T)
            if self._bias is not None:
                outputs.add_(self._bias)
        elif self._bias is None:
            torch.mm(inputs, self.weights.T, out=outputs)
        else:
            torch.addmm(self._bias, inputs, self.weights.T, out=outputs)
