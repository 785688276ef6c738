"""The states of recurrent layers: linear attention, state space models and short convolutions.

Such a layer keeps a state of constant size for each sequence, which each token changes. transformers' modules compute
several sequences at a time if these have equally many tokens, with the states in a cache object. So a step calls a module
once for all rows of one token, and once for each other row. The cache of a call holds copies of the rows' states. All states
are in tensors [S, ...] with a place for each slot, see `InputBatch`.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from millrace.worker.errors import unsupported
from millrace.worker.input_batch import HostBatch
from millrace.worker.transfer import to_device

logger = logging.getLogger("millrace.worker")

_CACHE_PARAMETERS = ("cache_params", "past_key_values")
_STATES = ("conv_states", "recurrent_states")
_CHECKED_PARTS = (5, 1, 1, 6)
"""Tokens of a sequence that is computed in parts, for the check."""
_LARGEST_DIFFERENCE = {torch.float32: 1e-3}
"""Between a sequence in parts and at once, as a share of the result. Other number formats: 0.05."""


def recurrent_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that keep states in transformers' cache. Unlike attention, they have a convolution."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and any(isinstance(child, nn.Conv1d) for child in module.children())
        and _cache_parameter(module) is not None
    ]


def _cache_parameter(module: nn.Module) -> str | None:
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_PARAMETERS if name in parameters), None)


@dataclass(frozen=True)
class _Rows:
    """Rows of a step that a module computes together. Tensors are on the device."""

    tokens: Tensor  # [N * L], their tokens in the flattened batch
    slots: Tensor  # [N]
    is_new: Tensor | None  # [N], whether the row begins a sequence; None: no row does
    length: int
    """L, the tokens of each row."""


class RecurrentStates:
    """Owns the states of a model's recurrent layers, and computes these layers in a step."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel) -> None:
        """Take over the forward of the modules. Raises `ModelError` for one that cannot continue a sequence."""
        self._device = model.device
        self._layers = [_Layer(module, model.config) for module in recurrent_modules(model)]
        for layer in {type(layer.module): layer for layer in self._layers}.values():
            layer.check()

    def __bool__(self) -> bool:
        return bool(self._layers)

    @torch.inference_mode()
    def allocate(self, num_slots: int) -> None:
        """Make space for the states of so many sequences. Keeps those that there are."""
        for layer in self._layers:
            layer.allocate(num_slots)

    def release(self) -> None:
        for layer in self._layers:
            layer.states = {}

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._layers for tensor in layer.states.values())

    def begin(self, batch: HostBatch, num_slots: int) -> None:
        """Prepare for the rows of a step. `num_slots`: see `InputBatch.num_slots`."""
        if self._layers[0].num_slots < num_slots:
            self.allocate(num_slots)
        lengths = [end - begin for begin, end in pairwise(batch.query_starts)]
        single = [row for row, length in enumerate(lengths) if length == 1]
        others = [[row] for row, length in enumerate(lengths) if length > 1]
        rows = [self._rows(batch, each, lengths[each[0]]) for each in (single, *others) if each]
        for layer in self._layers:
            layer.rows = rows

    def _rows(self, batch: HostBatch, rows: list[int], length: int) -> _Rows:
        starts = torch.tensor([batch.query_starts[row] for row in rows], dtype=torch.int64, device="cpu")
        tokens = (starts.unsqueeze(1) + torch.arange(length, device="cpu")).flatten()
        is_new = torch.tensor([batch.kv_lens[row] == length for row in rows], dtype=torch.bool, device="cpu")
        some_are_new = bool(is_new.any())
        tokens, slots, is_new = to_device(self._device, [tokens, batch.tensors["token_slots"][starts], is_new])
        return _Rows(tokens, slots, is_new if some_are_new else None, length)


class _Layer:
    """Takes the place of the forward of a recurrent module."""

    def __init__(self, module: nn.Module, config: PretrainedConfig) -> None:
        parameter = _cache_parameter(module)
        assert parameter is not None
        self._reference, self._parameter = weakref.ref(module), parameter
        self._index = cast(int, module.layer_idx)
        self._num_states = getattr(DynamicCache(config=config).layers[self._index], "number_of_states", 1)
        self._hidden_size = config.hidden_size
        self.states: dict[tuple[str, int], Tensor] = {}  # [S, ...]
        self.rows: list[_Rows] = []
        module.forward = self.forward

    @property
    def module(self) -> Any:
        module = self._reference()
        assert module is not None
        return module

    @property
    def num_slots(self) -> int:
        return max(map(len, self.states.values()), default=0)

    def allocate(self, num_slots: int) -> None:
        if self.num_slots >= num_slots:
            return
        _, cache = self._compute(self._hidden(1), {})
        for key, example in self._states_of(cache).items():
            states = example.new_zeros(num_slots, *example.shape[1:])
            if key in self.states:
                states[: len(self.states[key])] = self.states[key]
            self.states[key] = states

    def check(self) -> None:
        """Raise `ModelError` if a sequence in parts has other results than at once."""
        hidden = self._hidden(sum(_CHECKED_PARTS))
        whole, _ = self._compute(hidden, {})
        states: dict[tuple[str, int], Tensor] = {}
        parts = []
        for part in hidden.split(_CHECKED_PARTS, dim=1):
            output, cache = self._compute(part, states)
            parts.append(output)
            states = self._states_of(cache)
        difference, size = (torch.cat(parts, dim=1).float() - whole.float()).norm(), whole.float().norm()
        if difference > size * _LARGEST_DIFFERENCE.get(hidden.dtype, 0.05):
            name, share = type(self.module).__name__, difference / size
            raise unsupported(f"{name} computes a sequence in parts otherwise than at once (by {share:.2g})")

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:  # [1, T, H]
        output = torch.empty_like(hidden_states)
        for rows in self.rows:
            inputs = hidden_states[0, rows.tokens].unflatten(0, (-1, rows.length))
            states = {}
            for key, all_states in self.states.items():
                states[key] = all_states[rows.slots]
                if rows.is_new is not None:
                    states[key].masked_fill_(rows.is_new.view(-1, *[1] * (all_states.dim() - 1)), 0)
            computed, cache = self._compute(inputs, states)
            output[0, rows.tokens] = computed.flatten(0, 1)
            for key, new in self._states_of(cache).items():
                self.states[key][rows.slots] = new.to(self.states[key].dtype)
        return output

    def _hidden(self, num_tokens: int) -> Tensor:  # [1, num_tokens, H]
        """Return inputs that are as good as random ones."""
        (like, *_) = (child.weight for child in self.module.children() if isinstance(child, nn.Conv1d))
        steps = torch.arange(num_tokens * self._hidden_size, dtype=torch.float32, device="cpu")
        return (steps * steps).sin().view(1, num_tokens, -1).to(like.device, like.dtype)

    def _compute(self, inputs: Tensor, states: dict[tuple[str, int], Tensor]) -> tuple[Tensor, DynamicCache]:
        """Compute rows [N, L, H] that continue from these states. They are changed, unless there are none."""
        layer: Any = LinearAttentionLayer(number_of_states=self._num_states)
        for (name, index), tensor in states.items():
            getattr(layer, name)[index] = tensor
            getattr(layer, f"is_{name}_initialized")[index] = True
            layer.has_previous_state[index] = True
            if name == "conv_states":
                layer.conv_kernel_size[index] = tensor.shape[-1]
        cache = DynamicCache()
        cache.layers = [layer] * (self._index + 1)
        module = self.module
        return type(module).forward(module, inputs, **{self._parameter: cache}), cache

    @staticmethod
    def _states_of(cache: DynamicCache) -> dict[tuple[str, int], Tensor]:
        layer: Any = cache.layers[-1]
        found = {(name, index): tensor for name in _STATES for index, tensor in getattr(layer, name).items()}
        return {key: tensor for key, tensor in found.items() if tensor is not None}
