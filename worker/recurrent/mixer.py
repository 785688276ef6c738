"""Reads what a recurrent layer of transformers computes between its projections.

As in `fusion/structure.py`, modules are recognised by the names of what they have, and compared with what is made of them
before that is used.

Shapes: C channels of the convolution, Hk key and query heads, Hv value heads, D and Dv sizes of a key and a value, H hidden
size, W outputs of the projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DELTA_RULE, STATE_SPACE, CONVOLUTION = range(3)
"""As in kernels.h, which has the formulas."""


@dataclass(frozen=True)
class Mixer:
    """A recurrent layer. The fields that are not described here are those of `struct recurrence`."""

    rule: int
    projections: Mapping[str, nn.Linear]
    """By their names in the module."""
    rows: Tensor | None  # [W], the order of the outputs of the projections, one after the other; None: as they are
    output: nn.Linear
    conv_weights: Tensor  # [taps, C] float32
    conv_bias: Tensor | None  # [C] float32
    offsets: dict[str, int]
    """Where what the kernels read begins: in a token's outputs of the projections, and in its channels."""
    num_key_heads: int = 1
    num_heads: int = 1
    key_dim: int = 0
    value_dim: int = 0
    rates: Tensor | None = None  # [Hv] float32
    step_bias: Tensor | None = None  # [Hv] float32
    skips: Tensor | None = None  # [Hv] float32
    norm_weights: Tensor | None = None  # [Hv * Dv] float32
    norm_size: int = 0
    epsilon: float = 0.0
    gates_first: bool = False
    gain: float = 1.0

    @property
    def num_channels(self) -> int:
        return self.conv_weights.shape[1]

    @property
    def output_width(self) -> int:
        return self.num_channels if self.rule == CONVOLUTION else self.num_heads * self.value_dim

    def merge_projections(self) -> nn.Linear:
        """Return one layer [W, H] for all: a new one, or the only one."""
        linears: list[Any] = list(self.projections.values())
        if len(linears) == 1:
            return linears[0]  # type: ignore[no-any-return]
        weights = torch.cat([each.weight for each in linears])
        merged = nn.Linear(1, 1, bias=False, dtype=weights.dtype, device=weights.device)
        merged.out_features, merged.in_features = weights.shape
        merged.weight = nn.Parameter(weights if self.rows is None else weights[self.rows], requires_grad=False)
        return merged


def read_mixer(module: Any) -> Mixer | None:
    """Return what a recurrent module computes, or None if it is not known here."""
    children = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    if getattr(module, "activation", "silu") not in ("silu", "swish"):
        return None
    has_biases = any(getattr(module, name).bias is not None for name in children)
    if children in ({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}, _SPLIT | {"o_proj"}):
        return None if has_biases else _read_delta_net(module, None)
    if children == {"in_proj_qkvz", "in_proj_ba", "out_proj"}:
        return None if has_biases else _read_delta_net(module, _rows_of_groups(module))
    if children == {"in_proj", "out_proj"} and hasattr(module, "conv1d") and not hasattr(module, "mup_vector"):
        return _read_state_space(module)
    if children == {"in_proj", "out_proj"} and hasattr(module, "conv"):
        return _read_convolution(module)
    return None


_SPLIT = {"q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"}


def _read_delta_net(module: Any, rows: Tensor | None) -> Mixer:
    """Read a gated delta net. The outputs of its projections: queries, keys, values, gates, gains, steps."""
    keys, values = module.num_k_heads * module.head_k_dim, module.num_v_heads * module.head_v_dim
    orders = (["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], ["in_proj_qkvz", "in_proj_ba"])
    names = next((names for names in orders if hasattr(module, names[0])), list("qkvgba"))
    norm = module.norm if hasattr(module, "norm") else module.o_norm
    gate_at = 2 * keys + values
    return Mixer(
        rule=DELTA_RULE,
        projections=_linears(module, [f"{name}_proj" if len(name) == 1 else name for name in names]),
        rows=rows,
        output=module.out_proj if hasattr(module, "out_proj") else module.o_proj,
        **_convolution(module.conv1d),
        offsets={
            "gate_at": gate_at,
            "gain_at": gate_at + values,
            "step_at": gate_at + values + module.num_v_heads,
            "key_at": keys,
            "value_at": 2 * keys,
        },
        num_key_heads=module.num_k_heads,
        num_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        rates=-module.A_log.float().exp(),
        step_bias=module.dt_bias.float(),
        norm_weights=norm.weight.float().repeat(module.num_v_heads),
        norm_size=module.head_v_dim,
        epsilon=_epsilon(norm),
        gain=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
    )


def _rows_of_groups(module: Any) -> Tensor:
    """Return where the outputs of a delta net are in projections that are grouped by key heads: of queries, keys, values and
    gates, and of gains and steps."""
    heads = module.num_v_heads // module.num_k_heads
    sizes = [module.head_k_dim] * 2 + [heads * module.head_v_dim] * 2
    positions = torch.arange(module.num_k_heads * sum(sizes), device="cpu").view(module.num_k_heads, -1)
    others = torch.arange(2 * module.num_v_heads, device="cpu").view(module.num_k_heads, -1) + positions.numel()
    parts = [*positions.split(sizes, dim=1), *others.split(heads, dim=1)]
    return torch.cat([part.flatten() for part in parts])


def _read_state_space(module: Any) -> Mixer:
    """Read a layer of Mamba 2. The outputs of its projection: gates, values, keys, queries, steps."""
    values, keys = module.num_heads * module.head_dim, module.n_groups * module.ssm_state_size
    return Mixer(
        rule=STATE_SPACE,
        projections=_linears(module, ["in_proj"]),
        rows=None,
        output=module.out_proj,
        **_convolution(module.conv1d),
        offsets={
            "conv_at": values,
            "step_at": 2 * values + 2 * keys,
            "key_at": values,
            "query_at": values + keys,
        },
        num_key_heads=module.n_groups,
        num_heads=module.num_heads,
        key_dim=module.ssm_state_size,
        value_dim=module.head_dim,
        rates=-module.A_log.float().exp(),
        step_bias=module.dt_bias.float(),
        skips=module.D.float(),
        norm_weights=module.norm.weight.float(),
        norm_size=module.norm.group_size,
        epsilon=_epsilon(module.norm),
        gates_first=True,
    )


def _read_convolution(module: Any) -> Mixer:
    """Read a gated short convolution. The outputs of its projection: factors, gates, channels."""
    size = module.conv.in_channels
    return Mixer(
        rule=CONVOLUTION,
        projections=_linears(module, ["in_proj"]),
        rows=None,
        output=module.out_proj,
        **_convolution(module.conv),
        offsets={"gate_at": size, "conv_at": 2 * size},
    )


def _linears(module: Any, names: Iterable[str]) -> dict[str, nn.Linear]:
    return {name: getattr(module, name) for name in names}


def _convolution(conv: nn.Conv1d) -> dict[str, Any]:
    bias = None if conv.bias is None else conv.bias.float().contiguous()
    return {"conv_weights": conv.weight.squeeze(1).float().T.contiguous(), "conv_bias": bias}


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)
