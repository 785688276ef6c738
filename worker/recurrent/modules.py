"""Recurrent layers through transformers' modules.

A module computes several sequences at a time if these have equally many tokens, with the states in a cache object. So a
step calls a module once for all rows of one token, and once for each other row. The cache of a call holds copies of the
rows' states.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from millrace.worker.input_batch import HostBatch
from millrace.worker.transfer import to_device

_CACHE_PARAMETERS = ("cache_params", "past_key_values")
_STATES = ("conv_states", "recurrent_states")


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
class Rows:
    """Rows of a step that a module computes together. Tensors are on the device."""

    tokens: Tensor  # [N * L], their tokens in the flattened batch
    slots: Tensor  # [N]
    is_new: Tensor | None  # [N], whether the row begins a sequence; None: no row does
    length: int
    """L, the tokens of each row."""


def module_rows(batch: HostBatch, device: torch.device) -> list[Rows]:
    """Return the rows of a step that the modules compute together."""
    lengths = [end - begin for begin, end in pairwise(batch.query_starts)]
    single = [row for row, length in enumerate(lengths) if length == 1]
    others = [[row] for row, length in enumerate(lengths) if length > 1]
    return [_rows(batch, device, each, lengths[each[0]]) for each in (single, *others) if each]


def _rows(batch: HostBatch, device: torch.device, rows: list[int], length: int) -> Rows:
    starts = torch.tensor([batch.query_starts[row] for row in rows], dtype=torch.int64, device="cpu")
    tokens = (starts.unsqueeze(1) + torch.arange(length, device="cpu")).flatten()
    is_new = torch.tensor([batch.kv_lens[row] == length for row in rows], dtype=torch.bool, device="cpu")
    some_are_new = bool(is_new.any())
    tokens, slots, is_new = to_device(device, [tokens, batch.tensors["token_slots"][starts], is_new])
    return Rows(tokens, slots, is_new if some_are_new else None, length)


class ModuleLayer:
    """Takes the place of the forward of a recurrent module."""

    def __init__(self, module: nn.Module, config: PretrainedConfig) -> None:
        parameter = _cache_parameter(module)
        assert parameter is not None
        self._reference, self._parameter = weakref.ref(module), parameter
        self._index = cast(int, module.layer_idx)
        self._num_states = getattr(DynamicCache(config=config).layers[self._index], "number_of_states", 1)
        self._hidden_size = config.hidden_size
        self.states: dict[tuple[str, int], Tensor] = {}  # [S, ...]
        self.rows: list[Rows] = []
        module.forward = self.forward

    @property
    def module(self) -> Any:
        module = self._reference()
        assert module is not None
        return module

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations. Weights of linear layers may have another."""
        return next(child.weight.dtype for child in self.module.children() if isinstance(child, nn.Conv1d))

    @property
    def device(self) -> torch.device:
        return next(child.weight.device for child in self.module.children() if isinstance(child, nn.Conv1d))

    @property
    def num_slots(self) -> int:
        return max(map(len, self.states.values()), default=0)

    def allocate(self, num_slots: int) -> None:
        if self.num_slots >= num_slots:
            return
        _, cache = self._compute(self.example(1), {})
        for key, example in self._states_of(cache).items():
            states = example.new_empty(num_slots, *example.shape[1:])  # on a CPU it takes no memory before it is used
            if key in self.states:
                states[: len(self.states[key])] = self.states[key]
            self.states[key] = states

    def release(self) -> None:
        self.states = {}

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.states.values())

    def at_once(self, hidden: Tensor) -> Tensor:  # [1, T, H] -> [1, T, H]
        """Return the results of a whole sequence."""
        return self._compute(hidden, {})[0]

    def in_parts(self, hidden: Tensor, lengths: Iterable[int]) -> Tensor:  # [1, T, H] -> [1, T, H]
        """Return the results of a sequence that is computed in parts of these lengths."""
        states: dict[tuple[str, int], Tensor] = {}
        parts = []
        for part in hidden.split(list(lengths), dim=1):
            output, cache = self._compute(part, states)
            parts.append(output)
            states = self._states_of(cache)
        return torch.cat(parts, dim=1)

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

    def example(self, num_tokens: int) -> Tensor:  # [1, num_tokens, H]
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
