"""Recurrent layers in Triton: three launches for what is between a layer's projections, and one more in steps with prompts.

A program of the recurrence has some columns of a head's state in registers, and goes through the tokens of a row. All is
float32, and offsets are int64. A row's result depends on that row alone.

Shapes: T tokens of the step, R rows, S slots, W outputs of the projection, and those of `mixer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.worker.launch_triton import launch_options, wait_for_earlier_kernels
from millrace.worker.recurrent.mixer import CONVOLUTION, DELTA_RULE, Mixer
from millrace.worker.transfer import to_device

CHANNELS_AT_ONCE = 512
"""Channels of one token that one program convolves."""
STATE_ENTRIES = 2048
"""Entries of a state that a program has in registers: 16 of each thread. So four programs fit onto a multiprocessor."""


@dataclass(frozen=True)
class DeviceRows:
    """The rows of a step, on the device."""

    rows: Tensor  # [R, 4] int32: first token, tokens, slot, whether it begins its sequence
    row_of: Tensor  # [T] int32, the row of each token
    is_decode: bool
    """Whether each row is one token."""


def decode_rows(slots: Tensor, positions: Tensor) -> DeviceRows:
    """Return rows of one token each, from tensors [T] on the device. So this can be part of a graph."""
    tokens = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    rows = [tokens, torch.ones_like(tokens), slots.to(torch.int32), (positions == 0).to(torch.int32)]
    return DeviceRows(torch.stack(rows, dim=1), tokens, True)


class TritonMixer:
    """Computes what a layer does between its projections, and owns the states of its sequences."""

    def __init__(self, mixer: Mixer, width: int, dtype: torch.dtype) -> None:
        """`width`: W."""
        self._mixer, self._width = mixer, width
        at = dict.fromkeys(("conv_at", "factor_at", "gate_at", "step_at", "gain_at"), 0)
        self._at = at | dict.fromkeys(("query_at", "key_at", "value_at"), 0) | mixer.offsets
        block_d = triton.next_power_of_2(max(mixer.key_dim, 1))
        block_v = min(triton.next_power_of_2(max(mixer.value_dim, 1)), max(STATE_ENTRIES // block_d, 1))
        self._blocks = block_d, block_v
        self.states: list[Tensor] = []  # [S + 1, taps - 1, C] and [S + 1, Hv, D, Dv]: the last ones are NO_SLOT's

    @property
    def num_slots(self) -> int:
        return len(self.states[0]) - 1 if self.states else 0

    def allocate(self, num_slots: int) -> None:
        """Make space for the states of so many sequences. Keeps those that there are."""
        count, mixer = self.num_slots, self._mixer
        if count >= num_slots:
            return
        shapes = (len(mixer.conv_weights) - 1, mixer.num_channels), (mixer.num_heads, mixer.key_dim, mixer.value_dim)
        grown = [mixer.conv_weights.new_zeros(num_slots + 1, *shape) for shape in shapes]
        for old, new in zip(self.states, grown, strict=False):
            new[:count] = old[:count]
        self.states = grown

    def release(self) -> None:
        self.states = []

    def rows(self, query_starts: list[int], slots: Tensor, is_new: Tensor) -> DeviceRows:
        """Return the rows of a step on the device. `slots` [R] and `is_new` [R] are on the host."""
        lengths = [end - begin for begin, end in pairwise(query_starts)]
        columns = (query_starts[:-1], lengths, slots.tolist(), is_new.tolist())
        rows = torch.tensor(columns, dtype=torch.int32, device="cpu").T.contiguous()
        row_of = torch.arange(len(lengths), dtype=torch.int32, device="cpu").repeat_interleave(rows[:, 1])
        rows, row_of = to_device(self._mixer.conv_weights.device, [rows, row_of])
        return DeviceRows(rows, row_of, len(rows) == len(row_of))

    def run(self, projected: Tensor, rows: DeviceRows, output: Tensor | None = None) -> Tensor:
        """Return, or write to `output`, the results [T, Hv * Dv] for contiguous outputs [T, W] of the projections."""
        assert projected.is_contiguous() and projected.shape == (len(rows.row_of), self._width)
        mixer, at = self._mixer, self._at
        if output is None:
            output = projected.new_empty(len(projected), mixer.output_width)
        is_product = mixer.rule == CONVOLUTION
        mixed = output if is_product else projected.new_empty(len(projected), mixer.num_channels, dtype=torch.float32)
        self._convolve(projected, mixed, rows, is_product=is_product)
        if is_product:
            return output
        results = torch.empty_like(output, dtype=torch.float32)
        block_d, block_v = self._blocks
        _recur[(len(rows.rows), mixer.num_heads, triton.cdiv(mixer.value_dim, block_v))](
            *(mixed, projected, results, rows.rows, mixer.rates, mixer.step_bias, mixer.skips, self.states[1]),
            *(self._width, mixer.num_channels, self.num_slots, at["step_at"], at["gain_at"]),
            *(at["query_at"], at["key_at"], at["value_at"], mixer.num_heads // mixer.num_key_heads),
            *(mixer.key_dim, mixer.value_dim, mixer.key_dim**-0.5, mixer.gain),
            IS_DELTA=mixer.rule == DELTA_RULE,
            HAS_SKIPS=mixer.skips is not None,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            num_warps=4,
            **launch_options(),
        )
        size = mixer.norm_size or mixer.value_dim
        _finish[(len(projected), mixer.output_width // size)](
            *(results, projected, output, mixer.norm_weights, self._width, at["gate_at"], mixer.output_width, size),
            mixer.epsilon,
            HAS_NORM=mixer.norm_weights is not None,
            GATES_FIRST=mixer.gates_first,
            BLOCK=triton.next_power_of_2(size),
            **launch_options(),
        )
        return output

    def _convolve(self, projected: Tensor, mixed: Tensor, rows: DeviceRows, *, is_product: bool) -> None:
        mixer, at = self._mixer, self._at
        sizes = self._width, mixer.num_channels, self.num_slots, at["conv_at"], at["factor_at"]
        common = {"TAPS": len(mixer.conv_weights), "IS_PRODUCT": is_product, "BLOCK": CHANNELS_AT_ONCE}
        blocks = triton.cdiv(mixer.num_channels, CHANNELS_AT_ONCE)
        given = projected, rows.rows, self.states[0]
        _convolve[(len(projected), blocks)](
            *(*given, mixed, rows.row_of, mixer.conv_weights, mixer.conv_bias, *sizes, at["gate_at"]),
            HAS_BIAS=mixer.conv_bias is not None,
            IS_DECODE=rows.is_decode,
            **common,
            **launch_options(),
        )
        if not rows.is_decode:
            _keep_inputs[(len(rows.rows), blocks)](*given, *sizes, **common, **launch_options())


@triton.jit
def _load_input(projected, token, channels, mask, width, conv_at, factor_at, IS_PRODUCT: tl.constexpr):
    """Return entries of a token's input of the convolution."""
    inputs = projected + token.to(tl.int64) * width + channels
    entries = tl.load(inputs + conv_at, mask, other=0.0).to(tl.float32)
    if IS_PRODUCT:
        entries *= tl.load(inputs + factor_at, mask, other=0.0).to(tl.float32)
    return entries


@triton.jit
def _convolve(
    projected,
    rows,
    states,
    mixed,
    row_of,
    weights,
    bias,
    width,
    num_channels,
    num_slots,
    conv_at,
    factor_at,
    gate_at,
    HAS_BIAS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    TAPS: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Convolve some channels of a token. Of decode rows, keep the last inputs too."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    token = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < num_channels
    row = rows + tl.load(row_of + token) * 4
    first, slot, is_new = tl.load(row), tl.load(row + 2).to(tl.int64), tl.load(row + 3)
    slot = tl.where(slot < 0, num_slots, slot)
    state = states + slot * (TAPS - 1) * num_channels + channels
    sums = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + channels, mask, other=0.0)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1) + tap
        is_before = source < first
        entries = _load_input(
            projected, source, channels, mask & (source >= first), width, conv_at, factor_at, IS_PRODUCT
        )
        kept = state + (TAPS - 1 + source - first) * num_channels
        entries += tl.load(kept, mask & is_before & (is_new == 0), other=0.0)
        sums += entries * tl.load(weights + tap * num_channels + channels, mask, other=0.0)
        if IS_DECODE and tap > 0:
            tl.store(state + (tap - 1) * num_channels, entries, mask)
    if IS_PRODUCT:
        sums *= tl.load(projected + token.to(tl.int64) * width + gate_at + channels, mask, other=0.0).to(tl.float32)
    else:
        sums = sums / (1.0 + tl.exp(tl.minimum(-sums, 80.0)))
    tl.store(mixed + token.to(tl.int64) * num_channels + channels, sums.to(mixed.dtype.element_ty), mask)


@triton.jit
def _keep_inputs(
    projected,
    rows,
    states,
    width,
    num_channels,
    num_slots,
    conv_at,
    factor_at,
    TAPS: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Keep the last inputs of some channels of a row."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    row = rows + tl.program_id(0) * 4
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < num_channels
    first, count, slot, is_new = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int64), tl.load(row + 3)
    slot = tl.where(slot < 0, num_slots, slot)
    state = states + slot * (TAPS - 1) * num_channels + channels
    for index in tl.static_range(TAPS - 1):
        source = first + count - (TAPS - 1) + index
        entries = _load_input(
            projected, source, channels, mask & (source >= first), width, conv_at, factor_at, IS_PRODUCT
        )
        earlier = state + (index + count) * num_channels  # behind this one, so it is still there
        entries += tl.load(earlier, mask & (source < first) & (is_new == 0), other=0.0)
        tl.store(state + index * num_channels, entries, mask)


@triton.jit
def _recur(
    mixed,
    projected,
    results,
    rows,
    rates,
    step_bias,
    skips,
    states,
    width,
    num_channels,
    num_slots,
    step_at,
    gain_at,
    query_at,
    key_at,
    value_at,
    heads_per_key,
    key_dim,
    value_dim,
    query_scale,
    gain,
    IS_DELTA: tl.constexpr,
    HAS_SKIPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Run the recurrence of some columns of a head over the tokens of a row."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    row, head = rows + tl.program_id(0) * 4, tl.program_id(1)
    first, count, slot, is_new = tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int64), tl.load(row + 3)
    slot = tl.where(slot < 0, num_slots, slot)
    entries = tl.arange(0, BLOCK_D)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_entry, has_column = entries < key_dim, columns < value_dim
    num_heads = tl.num_programs(1)
    kept = states + (slot * num_heads + head) * key_dim * value_dim + entries[:, None] * value_dim + columns[None, :]
    mask = has_entry[:, None] & has_column[None, :]
    state = tl.load(kept, mask & (is_new == 0), other=0.0)
    rate, bias = tl.load(rates + head), tl.load(step_bias + head)
    for index in range(count):
        token = (first + index).to(tl.int64)
        channels, inputs = mixed + token * num_channels, projected + token * width
        query = tl.load(channels + query_at + head // heads_per_key * key_dim + entries, has_entry, other=0.0)
        key = tl.load(channels + key_at + head // heads_per_key * key_dim + entries, has_entry, other=0.0)
        value = tl.load(channels + value_at + head * value_dim + columns, has_column, other=0.0)
        step = tl.load(inputs + step_at + head).to(tl.float32) + bias
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
        state *= tl.exp(rate * step)
        if IS_DELTA:
            query *= query_scale / tl.sqrt(tl.sum(query * query) + 1e-6)
            key *= 1.0 / tl.sqrt(tl.sum(key * key) + 1e-6)
            strength = gain / (1.0 + tl.exp(-tl.load(inputs + gain_at + head).to(tl.float32)))
            added = (value - tl.sum(state * key[:, None], axis=0)) * strength
        else:
            added = value * step
        state += key[:, None] * added[None, :]
        result = tl.sum(state * query[:, None], axis=0)
        if HAS_SKIPS:
            result += tl.load(skips + head) * value
        tl.store(results + (token * num_heads + head) * value_dim + columns, result, has_column)
    tl.store(kept, state, mask)


@triton.jit
def _finish(
    results,
    projected,
    output,
    norm_weights,
    width,
    gate_at,
    output_width,
    size,
    epsilon,
    HAS_NORM: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Normalize some results of a token, and multiply them by the SiLU of their gates before or after that."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK) < size
    entries = tl.program_id(1) * size + tl.arange(0, BLOCK)
    values = tl.load(results + token * output_width + entries, inside, other=0.0)
    gates = tl.load(projected + token * width + gate_at + entries, inside, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(tl.minimum(-gates, 80.0)))
    if GATES_FIRST:
        values *= gates
    if HAS_NORM:
        values *= 1.0 / tl.sqrt(tl.sum(values * values) / size + epsilon)
        values *= tl.load(norm_weights + entries, inside, other=0.0)
    if not GATES_FIRST:
        values *= gates
    tl.store(output + token * output_width + entries, values.to(output.dtype.element_ty), inside)
