"""The states of a model's recurrent layers.

Such a layer keeps a state of constant size for each sequence, which each token changes. All states are in tensors [S, ...]
with a place for each slot, see `InputBatch`.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.worker.errors import unsupported
from millrace.worker.input_batch import HostBatch
from millrace.worker.kernels.library import KERNEL_DTYPES, Kernels, find_kernels
from millrace.worker.recurrent.compiled import CompiledLayer, CompiledRows
from millrace.worker.recurrent.mixer import read_mixer
from millrace.worker.recurrent.modules import ModuleLayer, module_rows, recurrent_modules

logger = logging.getLogger("millrace.worker")

_CHECKED_PARTS = (5, 1, 1, 6)
"""Tokens of a sequence that is computed in parts, for the check."""
_LARGEST_DIFFERENCE = {torch.float32: 1e-3}
"""Between a sequence in parts and at once, as a share of the result. Other number formats: 0.05."""

_Layer: TypeAlias = ModuleLayer | CompiledLayer


class RecurrentStates:
    """Owns the states of a model's recurrent layers, and computes these layers in a step."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel) -> None:
        """Take over the forward of the modules. Raises `ModelError` for one that cannot continue a sequence."""
        self._device = model.device
        self._layers: list[_Layer] = []
        self.compiled: dict[int, CompiledLayer] = {}
        """The layers that run through kernels, by their index in the model."""
        kernels = find_kernels() if self._device.type == "cpu" else None
        checked: dict[type, bool] = {}
        """By the class of a module: whether the kernels compute it."""
        for module in recurrent_modules(model):
            layer = ModuleLayer(module, model.config)
            if type(module) not in checked:
                checked[type(module)] = _check(layer, kernels)
            compiled = _compile(layer, kernels) if checked[type(module)] else None
            if compiled is not None:
                compiled.take_over(module)
                self.compiled[module.layer_idx] = compiled
            self._layers.append(compiled or layer)

    def __bool__(self) -> bool:
        return bool(self._layers)

    @torch.inference_mode()
    def allocate(self, num_slots: int) -> None:
        """Make space for the states of so many sequences. Keeps those that there are."""
        for layer in self._layers:
            layer.allocate(num_slots)

    def release(self) -> None:
        for layer in self._layers:
            layer.release()

    def num_bytes(self) -> int:
        return sum(layer.num_bytes() for layer in self._layers)

    def begin(self, batch: HostBatch, num_slots: int) -> None:
        """Prepare for the rows of a step. `num_slots`: see `InputBatch.num_slots`."""
        if self._layers[0].num_slots < num_slots:
            self.allocate(num_slots)
        by_kind = {type(layer): layer for layer in self._layers}
        compiled = _compiled_rows(batch) if CompiledLayer in by_kind else None
        of_modules = module_rows(batch, self._device) if ModuleLayer in by_kind else []
        for layer in self._layers:
            if isinstance(layer, CompiledLayer):
                layer.rows = compiled
            else:
                layer.rows = of_modules


def _check(layer: ModuleLayer, kernels: Kernels | None) -> bool:
    """Raise `ModelError` if a module has other results for a sequence in parts than at once. Return whether the kernels have
    its results."""
    hidden, name = layer.example(sum(_CHECKED_PARTS)), type(layer.module).__name__
    expected = layer.at_once(hidden)
    largest = _LARGEST_DIFFERENCE.get(hidden.dtype, 0.05)
    difference = _difference(layer.in_parts(hidden, _CHECKED_PARTS), expected)
    if difference > largest:
        raise unsupported(f"{name} computes a sequence in parts otherwise than at once (by {difference:.2g})")
    compiled = _compile(layer, kernels)
    if compiled is None:
        logger.info("%s runs through transformers' module, which is slower", name)
        return False
    difference = _difference(compiled.in_parts(hidden, _CHECKED_PARTS), expected)
    is_equal = difference <= largest
    what = "recurrent kernels" if is_equal else "transformers' module, which is slower: the kernels'"
    logger.info("%s runs through %s results differ by %.2g", name, what, difference)
    return is_equal


def _compile(layer: ModuleLayer, kernels: Kernels | None) -> CompiledLayer | None:
    """Return the layer that computes a module through the kernels, if they can."""
    dtype = layer.dtype
    mixer = read_mixer(layer.module) if kernels is not None and dtype in KERNEL_DTYPES else None
    return CompiledLayer(kernels, mixer, dtype) if kernels is not None and mixer is not None else None


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return a difference as a share of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _compiled_rows(batch: HostBatch) -> CompiledRows:
    starts = torch.tensor(batch.query_starts[:-1], dtype=torch.int64, device="cpu")
    lengths = zip(batch.kv_lens, pairwise(batch.query_starts), strict=True)
    is_new = torch.tensor([kv_len == end - begin for kv_len, (begin, end) in lengths], dtype=torch.bool, device="cpu")
    return CompiledRows(batch.query_starts, batch.tensors["token_slots"][starts], is_new)
