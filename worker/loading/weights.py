"""Reads weights from safetensors files into a model on the meta device, one tensor at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.worker.attention.interface import ATTENTION_NAME
from millrace.worker.errors import ModelError, WeightsDiffer
from millrace.worker.loading.checkpoint import open_weights
from millrace.worker.loading.part import ModelPart
from millrace.worker.parallel.tensor_plan import Slice

logger = logging.getLogger("millrace.worker")

MAX_OPEN_FILES = 4
MAX_NAMES_SHOWN = 3

OLD_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Older checkpoints store these with each layer; now they are computed from the configuration."""


def load_weights(model: PreTrainedModel, part: ModelPart, tensor_files: dict[str, Path], device: torch.device) -> None:
    """Fill a meta model with this rank's part of the weights, in the dtype of its parameters. It is then ready to run.
    Raises `WeightsDiffer` when the files do not hold exactly the whole model's tensors, else `ModelError`."""
    sources = _on_this_rank(model, part, _match(model, part, tensor_files))
    targets_by_file: dict[Path, list[str]] = {}
    for target, source in sources.items():
        targets_by_file.setdefault(tensor_files[source], []).append(target)
    with ThreadPoolExecutor(MAX_OPEN_FILES) as pool:
        jobs = [
            pool.submit(_load_file, model, part, path, {target: sources[target] for target in targets}, device)
            for path, targets in targets_by_file.items()
        ]
        for job in jobs:
            job.result()
    _make_ready(model, set(sources), device)


def take_weights(model: PreTrainedModel, part: ModelPart, whole: PreTrainedModel, device: torch.device) -> None:
    """Fill a meta model with this rank's part of the loaded model `whole`."""
    for name, tensor in whole.state_dict().items():
        if name in part.names:
            _assign(model, name, part.slices[name].of(tensor) if name in part.slices else tensor, device)
    _make_ready(model, set(part.names), device)


def load_converted(
    model: PreTrainedModel, directory: Path, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Load the same model with transformers, which renames and merges the tensors of some checkpoints, such as those of
    experts. Raises `WeightsDiffer` when they still do not fit."""
    loaded: Any
    info: dict[str, Any]
    loaded, info = type(model).from_pretrained(  # type: ignore[misc]
        directory,
        config=model.config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    missing = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    if missing or info["unexpected_keys"]:
        raise WeightsDiffer(_difference(model, missing, info["unexpected_keys"]))
    return loaded.to(device).requires_grad_(False).eval()


def _match(model: PreTrainedModel, part: ModelPart, tensor_files: dict[str, Path]) -> dict[str, str]:
    """Return the stored name of each tensor of the whole model. One tensor of a tied pair is enough."""
    expected = part.whole_names
    prefix = f"{model.base_model_prefix}."
    sources: dict[str, str] = {}
    unexpected: list[str] = []
    for name in tensor_files:
        target = name if name in expected else prefix + name
        if target in expected:
            sources[target] = name
        elif not _may_be_ignored(model, name):
            unexpected.append(name)
    tied = {name for pair in model.all_tied_weights_keys.items() if set(pair) & set(sources) for name in pair}
    missing = expected - set(sources) - tied
    if missing or unexpected:
        raise WeightsDiffer(_difference(model, missing, unexpected))
    return sources


def _on_this_rank(model: PreTrainedModel, part: ModelPart, sources: dict[str, str]) -> dict[str, str]:
    """Return the stored name of each tensor that this rank has to read. If only the tied partner of a tensor is stored,
    and the partner belongs to another rank (a head and the first stage's embedding), the partner's name is returned."""
    own = {target: source for target, source in sources.items() if target in part.names}
    for pair in model.all_tied_weights_keys.items():
        for target, partner in (pair, pair[::-1]):
            if target in part.names and target not in own and partner not in own:
                own[target] = sources[partner]
    return own


def _may_be_ignored(model: PreTrainedModel, name: str) -> bool:
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return bool(OLD_BUFFERS.search(name)) or any(re.search(pattern, name) for pattern in patterns)


def _difference(model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    return (
        f"the weights do not fit {type(model).__name__}: {_shown('missing', missing)}; "
        f"{_shown('unexpected', unexpected)}. Use the checkpoint that belongs to this config.json"
    )


def _shown(what: str, names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - MAX_NAMES_SHOWN} more" if len(listed) > MAX_NAMES_SHOWN else ""
    return f"{what} {', '.join(listed[:MAX_NAMES_SHOWN]) + more if listed else 'none'}"


def _load_file(
    model: PreTrainedModel, part: ModelPart, path: Path, sources: dict[str, str], device: torch.device
) -> None:
    with open_weights(path) as file:
        for target, source in sources.items():
            try:
                tensor = _read(file, target, source, part.slices.get(target), _declared(model, target).shape)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{source} in {path} cannot be read ({error}): copy the model again") from error
            _assign(model, target, tensor, device)


def _read(file: Any, target: str, source: str, part: Slice | None, declared: torch.Size) -> Tensor:
    """Read a stored tensor, or only this rank's slice of it."""
    shape = torch.Size(file.get_slice(source).get_shape())
    expected = part.whole_shape(declared) if part else declared
    if shape != expected:
        raise ModelError(
            f"{target} is stored as {list(shape)}, but config.json says {list(expected)}: "
            "use the checkpoint that belongs to this config.json"
        )
    return part.of(file.get_slice(source)) if part else file.get_tensor(source)


def _assign(model: PreTrainedModel, name: str, tensor: Tensor, device: torch.device) -> None:
    module, leaf = _owner(model, name)
    declared = _declared(model, name)
    # Always copied: a tensor that stays mapped to its file changes with the file, or crashes this process.
    tensor = torch.empty(declared.shape, dtype=declared.dtype, device=device).copy_(tensor)
    if isinstance(declared, nn.Parameter):
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module._buffers[leaf] = tensor
    getattr(module, leaf)._is_hf_initialized = True


def _make_ready(model: PreTrainedModel, loaded: set[str], device: torch.device) -> None:
    """Do what is left after the stored tensors have been read."""
    _tie(model, loaded)
    _rebuild_buffers(model, device)
    model.requires_grad_(False)


def _tie(model: PreTrainedModel, loaded: set[str]) -> None:
    """Share the weights that the configuration ties, unless both are stored and differ, as in transformers."""
    present = set(model.state_dict())
    for target, source in model.all_tied_weights_keys.items():
        if not {source, target} <= present:  # another stage has the other one
            continue
        if {source, target} <= loaded and not torch.equal(model.get_parameter(source), model.get_parameter(target)):
            logger.warning("config.json ties %s and %s, but their stored values differ: not tied", source, target)
            continue
        if source not in loaded:
            source, target = target, source
        module, leaf = _owner(model, target)
        setattr(module, leaf, model.get_parameter(source))


def _rebuild_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that are not stored, such as rotary frequencies. `initialize_weights` fills the tensors that
    are not marked as initialised; called for single modules it would overwrite loaded weights."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        module, leaf = _owner(model, name)
        module._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    model.initialize_weights()
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not empty, f"no values for {empty}"


def _declared(model: PreTrainedModel, name: str) -> Tensor:
    module, leaf = _owner(model, name)
    declared: Tensor = getattr(module, leaf)
    return declared


def _owner(model: PreTrainedModel, name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf
