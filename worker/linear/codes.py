"""Weights of quantized checkpoints as they are stored: codes of 4 or 8 bits, with scales.

Shapes: N outputs, K inputs, G groups of inputs. Weights of experts [E, N, K] have one more dimension before these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

NUMBERS_AT_A_TIME = 1 << 18
"""Weights of a CPU that are computed at once, so that intermediate results stay in its cache."""
NUMBERS_OF_A_GPU = 1 << 26
"""Those of a GPU, so that intermediate results take little memory."""


class Codes(NamedTuple):
    """A quantized weight [N, K]: (number of the code - zero point) * scale."""

    codes: Tensor
    """[N, K] int8 or float8, whose numbers are their own, or [N, K / 2] uint8: two codes of 4 bits, the first in the lower
    half. With an odd K one is left over."""
    table: Tensor | None  # [16] float32, the numbers of codes of 4 bits
    scales: Tensor  # [N, G] float32
    zeros: Tensor | None  # [N, G] float32, the zero points
    groups: Tensor  # [K] int32, the group of each input

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [N, K]
        """Compute the weight, in float32, and round it."""
        codes, scales = self.codes.flatten(0, -2), self.scales.flatten(0, -2)
        zeros = None if self.zeros is None else self.zeros.flatten(0, -2)
        num_rows, num_inputs, size = len(codes), len(self.groups), self.group_size
        numbers = torch.empty(num_rows, num_inputs, dtype=dtype, device=codes.device)
        pairs = None  # the two numbers of each byte, as one of 64 bits: to look up rows takes four times as long
        if self.table is not None:
            pairs = torch.cartesian_prod(self.table, self.table).flip(1).view(torch.int64).flatten()
        at_a_time = max(1, (NUMBERS_OF_A_GPU if codes.is_cuda else NUMBERS_AT_A_TIME) // max(1, num_inputs))
        for first in range(0, num_rows, at_a_time):
            chosen = slice(first, first + at_a_time)
            part = codes[chosen]
            if pairs is None:
                part = part.float()
            else:
                found = pairs.index_select(0, part.flatten().int()).view(torch.float32)
                part = found.view(len(part), -1)[:, :num_inputs]
            scale, zero = scales[chosen], None if zeros is None else zeros[chosen]
            if size:
                part, scale = part.unflatten(1, (-1, size)), scale[..., None]
                zero = None if zero is None else zero[..., None]
            else:
                scale, zero = scale[:, self.groups], None if zero is None else zero[:, self.groups]
            numbers[chosen] = (part if zero is None else part.sub_(zero)).mul_(scale).view(-1, num_inputs)
        return numbers.view(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], len(self.groups)

    @property
    def group_size(self) -> int:
        """Inputs of each group, if all have the same number in their order, else 0."""
        num_inputs, num_groups = len(self.groups), self.scales.shape[-1]
        size = num_inputs // num_groups
        in_order = torch.arange(num_inputs, device=self.groups.device).div_(max(1, size), rounding_mode="floor")
        return size if size * num_groups == num_inputs and torch.equal(in_order.int(), self.groups) else 0

    @property
    def can_stay(self) -> bool:
        """Whether kernels compute with the codes. Others are of a format that is rare."""
        if len(self.groups) % 8:
            return False
        if self.codes.dtype == torch.float8_e4m3fn:
            return not bool((self.codes.view(torch.uint8) & 127 == 127).any())  # NaN
        return self.codes.dtype in (torch.uint8, torch.int8)

    def is_like(self, other: Codes) -> bool:
        """Whether the outputs of two weights may follow one another."""
        kinds = {(each.codes.dtype, each.zeros is None, each.scales.shape[-1]) for each in (self, other)}
        is_same_table = self.table is other.table is None or (
            self.table is not None and other.table is not None and torch.equal(self.table, other.table)
        )
        return len(kinds) == 1 and is_same_table and torch.equal(self.groups, other.groups)

    @property
    def is_by_group(self) -> bool:
        """Whether sums over the inputs of a group may be multiplied by its scale, instead of all of its weights."""
        size = self.group_size
        has_no_zeros = self.zeros is None or self.table is not None
        return size > 0 and has_no_zeros and (size % 64 == 0 or size == len(self.groups))

    @property
    def are_integers(self) -> bool:
        """Whether the numbers are integers of 8 bits, from which the zero points may be subtracted."""
        if self.table is None:
            return self.codes.dtype == torch.int8 and self.zeros is None
        zeros = self.table[:1].neg() if self.zeros is None else self.zeros
        first = self.table[0] if self.zeros is None else 0
        is_in_order = torch.equal(self.table, first + torch.arange(16, device=self.table.device))
        return is_in_order and bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros <= 16)).all())

    def lines(self) -> Tensor:  # [N, lines] int32
        """Return the codes of each row in words, as codes.inc.h describes them."""
        codes = self.codes
        if self.table is not None:
            halves = torch.stack([codes & 15, codes >> 4], dim=2).view(len(codes), -1, 2, 4)
            codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        padding = -codes.shape[1] % (64 if self.table is None else 32)
        return F.pad(codes.view(torch.uint8), (0, padding)).contiguous().view(torch.int32)


def pack_halves(codes: Tensor) -> Tensor:  # [N, K] uint8 -> [N, K / 2] uint8
    """Return codes of at most 4 bits, two in a byte."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


class CodedWeight(Tensor):
    """A parameter whose memory holds codes. Every operation of torch gets its numbers, but some of its rows or columns, and
    several weights one after the other or as one stack, have codes again."""

    coded: Codes

    @staticmethod
    def __new__(cls: type[CodedWeight], coded: Codes, dtype: torch.dtype) -> CodedWeight:
        made: CodedWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, coded.shape, dtype=dtype, device=coded.codes.device, requires_grad=False
        )
        return made

    def __init__(self, coded: Codes, dtype: torch.dtype) -> None:
        self.coded = coded

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # views of weights cannot be inference tensors
            if (keep := _KEEPING.get(func)) is not None and not kwargs and (kept := keep(*args)) is not None:
                return kept
            args, kwargs = tree_map_only(CodedWeight, CodedWeight.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)

    def numbers(self) -> Tensor:
        return self.coded.numbers(self.dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(each.nbytes for each in self.coded if each is not None)

    def rows(self, index: Any) -> CodedWeight:
        """Return some rows, or experts. `index`: as of a tensor."""
        codes, table, scales, zeros, groups = self.coded
        zeros = None if zeros is None else zeros[index]
        return CodedWeight(Codes(codes[index], table, scales[index], zeros, groups), self.dtype)


def _detach(weight: CodedWeight) -> CodedWeight:
    return CodedWeight(weight.coded, weight.dtype)


def _clone(weight: CodedWeight) -> CodedWeight:
    copies = [None if each is None else each.clone(memory_format=torch.contiguous_format) for each in weight.coded]
    return CodedWeight(Codes(*copies), weight.dtype)  # type: ignore[arg-type]


def _slice(
    weight: CodedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    begin, end, _ = slice(start, end).indices(weight.shape[dim])
    if step == 1 and dim == 0:
        return weight.rows(slice(begin, end))
    if step != 1 or dim != weight.dim() - 1 or begin % 2 or end % 2 or begin >= end:
        return None
    coded, per_code = weight.coded, 1 if weight.coded.table is None else 2
    groups = coded.groups[begin:end]
    first, last = int(groups.min()), int(groups.max())
    codes, scales = coded.codes[..., begin // per_code : end // per_code], coded.scales[..., first : last + 1]
    zeros = None if coded.zeros is None else coded.zeros[..., first : last + 1]
    return CodedWeight(Codes(codes, coded.table, scales, zeros, groups - first), weight.dtype)


def _index(weight: CodedWeight, indices: Sequence[Tensor | None]) -> Tensor | None:
    (rows, *others) = indices
    return weight.rows(rows) if rows is not None and rows.dim() == 1 and not others else None


def _select(weight: CodedWeight, dim: int, index: int) -> Tensor | None:
    return weight.rows(index) if dim == 0 and weight.dim() == 3 else None


def _unbind(weight: CodedWeight, dim: int = 0) -> list[CodedWeight] | None:
    return [weight.rows(index) for index in range(len(weight))] if dim == 0 and weight.dim() == 3 else None


def _cat(weights: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    dim %= weights[0].dim()
    return _joined(torch.cat, weights, dim) if dim < weights[0].dim() - 1 else None


def _stack(weights: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    return _joined(torch.stack, weights, dim) if dim == 0 else None


def _joined(join: Callable[[list[Tensor], int], Tensor], weights: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return several weights as one. None: their codes are of different kinds, or groups."""
    parts = [each.coded for each in weights if isinstance(each, CodedWeight)]
    first, dtype = parts[0], weights[0].dtype
    if len(parts) < len(weights) or not all(each.dtype == dtype for each in weights):
        return None
    if not all(each.is_like(first) for each in parts):
        return None
    codes, scales = join([each.codes for each in parts], dim), join([each.scales for each in parts], dim)
    zeros = [each.zeros for each in parts if each.zeros is not None]
    return CodedWeight(Codes(codes, first.table, scales, join(zeros, dim) if zeros else None, first.groups), dtype)


_KEEPING: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.detach.default: _detach,
    torch.ops.aten.alias.default: _detach,
    torch.ops.aten.clone.default: _clone,
    torch.ops.aten.slice.Tensor: _slice,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.cat.default: _cat,
    torch.ops.aten.select.int: _select,
    torch.ops.aten.stack.default: _stack,
    torch.ops.aten.unbind.int: _unbind,
}
"""Operations whose result has codes."""
