"""The states of a model's recurrent layers.

Such a layer keeps a state of constant size for each sequence, which each token changes. All states are in tensors [S, ...]
with a place for each slot, see `InputBatch`.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from millrace.executor.wire.failures import is_interruption
from millrace.worker.errors import is_out_of_memory, unsupported
from millrace.worker.input_batch import HostBatch
from millrace.worker.kernels.library import KERNEL_DTYPES, find_kernels
from millrace.worker.recurrent.compiled import CompiledMixer
from millrace.worker.recurrent.layer import MakeOperation, MixerLayer
from millrace.worker.recurrent.mixer import read_mixer
from millrace.worker.recurrent.modules import ModuleLayer, module_rows, recurrent_modules
from millrace.worker.triton_support import find_triton

logger = logging.getLogger("millrace.worker")

_CHECKED_PARTS = (5, 1, 1, 38)
"""Tokens of a sequence that is computed in parts, for the check."""
_LARGEST_DIFFERENCE = {torch.float32: 1e-3}
"""Between a sequence in parts and at once, as a share of the result. Other number formats: 0.05."""


class RecurrentStates:
    """Owns the states of a model's recurrent layers, and computes these layers in a step."""

    @torch.no_grad()  # not inference_mode: the weights are ordinary tensors
    def __init__(self, model: PreTrainedModel, *, batch_invariant: bool = False) -> None:
        """Take over the forward of the modules. Raises `ModelError` for one that cannot continue a sequence."""
        self._device = model.device
        self.mixers: dict[int, MixerLayer] = {}
        """The layers that run through kernels, by their index in the model."""
        self._modules: list[ModuleLayer] = []
        checked: dict[type, bool] = {}
        """By the class of a module: whether the kernels compute it."""
        for module in recurrent_modules(model):
            layer = ModuleLayer(module, model.config)
            if type(module) not in checked:
                verbosity = transformers_logging.get_verbosity()
                transformers_logging.set_verbosity_error()  # it recommends packages for the modules, which may not run
                try:
                    checked[type(module)] = _check(layer, rounds=not batch_invariant)
                finally:
                    transformers_logging.set_verbosity(verbosity)
            mixer = _mixer_layer(layer, rounds=not batch_invariant) if checked[type(module)] else None
            if mixer is None:
                self._modules.append(layer)
            else:
                mixer.take_over(module)
                self.mixers[module.layer_idx] = mixer

    @property
    def _layers(self) -> list[ModuleLayer | MixerLayer]:
        return [*self.mixers.values(), *self._modules]

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

    @torch.inference_mode()
    def clear(self) -> None:
        """Let the states be those of sequences without tokens."""
        for mixer in self.mixers.values():
            for tensor in mixer.operation.states:
                tensor.zero_()

    def num_bytes(self) -> int:
        return sum(layer.num_bytes() for layer in self._layers)

    def begin(self, batch: HostBatch) -> None:
        """Prepare for the rows of a step, for whose slots there is space."""
        if self.mixers:
            operation = next(iter(self.mixers.values())).operation
            starts = torch.tensor(batch.query_starts, dtype=torch.int64, device="cpu")
            is_new = torch.tensor(batch.kv_lens, dtype=torch.int64, device="cpu") == starts.diff()
            rows = operation.rows(batch.query_starts, batch.tensors["token_slots"][starts[:-1]], is_new)
            for mixer in self.mixers.values():
                mixer.rows = rows
        if self._modules:
            of_modules = module_rows(batch, self._device)
            for module in self._modules:
                module.rows = of_modules


def _check(layer: ModuleLayer, *, rounds: bool) -> bool:
    """Raise `ModelError` if a module has other results for a sequence in parts than at once. Return whether the kernels have
    its results."""
    hidden, name = layer.example(sum(_CHECKED_PARTS)), type(layer.module).__name__
    expected = layer.at_once(hidden)
    largest = _LARGEST_DIFFERENCE.get(hidden.dtype, 0.05)
    difference = _difference(layer.in_parts(hidden, _CHECKED_PARTS), expected)
    if difference > largest:
        raise unsupported(f"{name} computes a sequence in parts otherwise than at once (by {difference:.2g})")
    reason = "there are no kernels for it"
    try:
        if (mixer := _mixer_layer(layer, rounds=rounds)) is not None:
            difference = _difference(mixer.in_parts(hidden, _CHECKED_PARTS), expected)
            if difference <= largest:
                logger.info("%s runs through kernels: differs by %.2g of the results", name, difference)
                return True
            reason = f"the results of the kernels differ by {difference:.2g}"
    except Exception as error:  # of Triton, or sizes that the kernels do not have
        if is_interruption(error) or is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    logger.info("%s runs through transformers' module, which is slower: %.300s", name, reason)
    return False


def _mixer_layer(layer: ModuleLayer, *, rounds: bool) -> MixerLayer | None:
    """Return the layer that computes a module through kernels, if there are any."""
    make, mixer = _find_operation(layer, rounds=rounds), read_mixer(layer.module)
    return MixerLayer(make, mixer, layer.dtype) if make is not None and mixer is not None else None


def _find_operation(layer: ModuleLayer, *, rounds: bool) -> MakeOperation | None:
    if layer.device.type == "cuda" and find_triton():
        from millrace.worker.recurrent.mixer_triton import TritonMixer

        return TritonMixer
    kernels = find_kernels() if layer.device.type == "cpu" and layer.dtype in KERNEL_DTYPES else None
    return partial(CompiledMixer, kernels, rounds=rounds) if kernels is not None else None


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return a difference as a share of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
