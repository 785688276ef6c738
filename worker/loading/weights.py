"""Reads weights from safetensors files into a model on the meta device.

On a CPU the weights of linear layers and embeddings stay mapped to their files until they are packed, if they are stored
in the dtype of the model. All others are copied: to a GPU by several threads, through pinned memory.
"""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from millrace.worker.attention.interface import ATTENTION_NAME
from millrace.worker.errors import ModelError, WeightsDiffer
from millrace.worker.linear.codes import CodedWeight, Codes
from millrace.worker.loading.model import WithoutDraws
from millrace.worker.loading.part import ModelPart
from millrace.worker.loading.tensor_files import DerivedTensor, Source, StoredTensor, WeightFiles

logger = logging.getLogger("millrace.worker")

NUM_COPY_THREADS = 8
CHUNK_BYTES = 8 << 20
"""What a thread copies at a time."""
MERGED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of which a fused forward pass makes one."""
UNMAP = "_unmap"
"""The attribute of a mapped parameter that takes its pages out of the memory of this process."""
MAX_NAMES_SHOWN = 3

OLD_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.masked_bias$")
"""Older checkpoints store these with each layer; now they are computed from the configuration, or constant."""


def load_weights(
    model: PreTrainedModel,
    part: ModelPart,
    weights: dict[str, Source],
    device: torch.device,
    coded_dtype: torch.dtype | None = None,
) -> None:
    """Fill a meta model with this rank's part of the weights, in the dtype of its parameters. It is then ready to run.
    Raises `WeightsDiffer` when `weights` are not exactly the whole model's tensors, else `ModelError`.

    `coded_dtype`: that of the activations, if quantized weights of linear layers are to stay codes."""
    sources = {
        target: weights[name] for target, name in _on_this_rank(model, part, _match(model, part, weights)).items()
    }
    files = WeightFiles()
    stored = {
        target: _part_of(model, part, target, files.read(source, device))
        for target, source in sources.items()
        if isinstance(source, StoredTensor)
    }
    on_host = device.type == "cpu"
    mapped = {name for name, tensor in stored.items() if on_host and _can_stay_mapped(model, name, tensor)}
    coded = {} if coded_dtype is None else _coded_weights(model, part, sources, files, device, coded_dtype)
    own = _allocate(model, sources.keys() - mapped - coded.keys(), device)
    copy_all([(own[name], stored[name]) for name in own if name in stored], 1 if on_host else NUM_COPY_THREADS)
    for name in own.keys() - stored.keys():  # one at a time: they take more memory than their files
        own[name].copy_(_part_of(model, part, name, files.read(sources[name], device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for name, tensor in (stored | own | coded).items():
        _set(model, name, tensor)
    for name in mapped:
        parameter, source = _declared(model, name), sources[name]
        assert isinstance(source, StoredTensor)
        setattr(parameter, UNMAP, weakref.finalize(parameter, files.of(source).unmapping(source.name)))
    _make_ready(model, set(sources), device)


def _coded_weights(
    model: PreTrainedModel,
    part: ModelPart,
    sources: dict[str, Source],
    files: WeightFiles,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the quantized weights of linear layers that can stay codes, by name."""
    head, found = model.get_output_embeddings(), dict[str, Tensor]()
    for name, source in sources.items():
        module, leaf = _owner(model, name)
        if isinstance(source, DerivedTensor) and type(module) is nn.Linear and leaf == "weight" and module is not head:
            weight = _as_weight(files.derive(source, device), dtype)
            if isinstance(weight, CodedWeight):
                own = _part_of(model, part, name, weight)
                found[name] = own.clone() if name in part.slices else own  # not a view of the whole
    if found:
        mib = sum(weight.nbytes for weight in found.values()) / (1 << 20)
        logger.info("the weights of %d linear layers stay quantized, in %.1f MiB", len(found), mib)
    return found


def use_numbers(model: nn.Module) -> None:
    """Replace the weights that are still codes by their numbers: each use would compute these."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, CodedWeight):
                setattr(module, name, nn.Parameter(parameter.numbers(), requires_grad=False))


def own_weights(model: nn.Module) -> None:
    """Copy the weights that are still mapped to their files: they would change with the files."""
    for parameter in model.parameters():
        if (unmap := getattr(parameter, UNMAP, None)) is not None:
            parameter.data = parameter.data.clone()
            unmap()
            delattr(parameter, UNMAP)


def take_weights(model: PreTrainedModel, part: ModelPart, whole: PreTrainedModel, device: torch.device) -> None:
    """Fill a meta model with this rank's part of the loaded model `whole`."""
    for name, tensor in whole.state_dict().items():
        if name in part.names:
            own = _allocate(model, {name}, device)[name]
            _set(model, name, own.copy_(part.slices[name].of(tensor) if name in part.slices else tensor))
    _make_ready(model, set(part.names), device)


class _Lazy:
    """What transformers takes for a tensor in a file: `lazy[...]` reads it."""

    def __init__(self, files: WeightFiles, tensor: Source, coded_dtype: torch.dtype | None) -> None:
        self._files, self._tensor, self._coded_dtype = files, tensor, coded_dtype

    def __getitem__(self, index: Any) -> Tensor:
        host = torch.device("cpu")
        if isinstance(self._tensor, DerivedTensor) and self._coded_dtype is not None:
            return _as_weight(self._files.derive(self._tensor, host), self._coded_dtype)[index]
        return self._files.read(self._tensor, host)[index]


def _as_weight(computed: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    """Return a weight that is codes if it can be."""
    if isinstance(computed, Codes):
        return CodedWeight(computed, dtype) if computed.can_stay else computed.numbers()
    return computed


def load_converted(
    model: PreTrainedModel,
    weights: dict[str, Source],
    device: torch.device,
    dtype: torch.dtype,
    coded_dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Load the same model with transformers, which renames and merges the tensors of some checkpoints, such as those of
    experts. `coded_dtype`: see `load_weights`; only on a CPU. Raises `WeightsDiffer` when they still do not fit."""
    loaded: Any
    info: dict[str, Any]
    files = WeightFiles()
    # The default device of the program may be another one. Values of missing tensors would take up to a minute.
    is_derived = any(isinstance(tensor, DerivedTensor) for tensor in weights.values())
    how = _one_at_a_time() if is_derived else nullcontext()
    with _quiet_transformers(), how, torch.device("cpu"), WithoutDraws():
        loaded, info = type(model).from_pretrained(  # type: ignore[misc]
            None,
            config=model.config,
            state_dict={name: _Lazy(files, tensor, coded_dtype) for name, tensor in weights.items()},
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    missing = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    if missing or info["unexpected_keys"]:
        raise WeightsDiffer(_difference(model, missing, info["unexpected_keys"]))
    for embedding in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
        if embedding is not None:
            use_numbers(embedding)
    if device.type != "cpu":
        loaded = loaded.to(device)
    return loaded.requires_grad_(False).eval()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let transformers read a tensor when it needs it. Its threads would keep many that are computed, as of experts."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Let transformers show no progress bar and no table of what differs: they would stand between the lines of the log."""
    verbosity, shows_progress = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_progress:
            transformers_logging.enable_progress_bar()


def _match(model: PreTrainedModel, part: ModelPart, weights: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each tensor of the whole model. One tensor of a tied pair is enough."""
    expected = part.whole_names
    prefix = f"{model.base_model_prefix}."
    sources: dict[str, str] = {}
    unexpected: list[str] = []
    for name in weights:
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


def _part_of(model: PreTrainedModel, part: ModelPart, target: str, stored: Tensor) -> Tensor:
    """Return this rank's part of a stored tensor. Raises `ModelError` if it does not have the model's shape, or has integers
    in the place of numbers."""
    declared = _declared(model, target)
    own, expected = part.slices.get(target), declared.shape
    if declared.is_floating_point() and not stored.is_floating_point():
        raise ModelError(f"{target} is stored as {stored.dtype}: use a checkpoint in 16 or 32 bits")
    if own is not None:
        expected = own.whole_shape(expected)
    if stored.shape != expected:
        raise ModelError(
            f"{target} is stored as {list(stored.shape)}, but config.json says {list(expected)}: "
            "use the checkpoint that belongs to this config.json"
        )
    return stored if own is None else own.of(stored)


def _can_stay_mapped(model: PreTrainedModel, name: str, stored: Tensor) -> bool:
    module, leaf = _owner(model, name)
    is_packed_later = type(module) in (nn.Linear, nn.Embedding) and leaf == "weight"
    return is_packed_later and stored.dtype == module.weight.dtype and stored.is_contiguous()


def _allocate(model: PreTrainedModel, names: Set[str], device: torch.device) -> dict[str, Tensor]:
    """Return memory for tensors, by name. Layers that become one follow one another, so nothing is copied then."""
    own: dict[str, Tensor] = {}
    for name in sorted(names):
        if name in own:
            continue
        group = [each for each in _merged_with(name) if each in names]
        declared = [_declared(model, each) for each in group]
        if len({(each.shape[1:], each.dtype) for each in declared}) > 1:
            group, declared = [name], [_declared(model, name)]
        shape, dtype = declared[0].shape, declared[0].dtype
        if len(group) == 1:
            own[name] = torch.empty(shape, dtype=dtype, device=device)
        else:
            memory = torch.empty(sum(map(len, declared)), *shape[1:], dtype=dtype, device=device)
            ends = accumulate(map(len, declared))
            own.update(
                (each, memory[end - len(rows) : end]) for each, rows, end in zip(group, declared, ends, strict=True)
            )
    return own


def _merged_with(name: str) -> list[str]:
    """Return the names of the tensors that become one with a tensor, itself included, in their order."""
    parent, layer, leaf = ("." + name).rsplit(".", 2)
    layers = next((layers for layers in MERGED_LAYERS if layer in layers), (layer,))
    return [f"{parent}.{each}.{leaf}"[1:] for each in layers]


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]], num_threads: int) -> None:
    """Copy from the second tensor of each pair, on the host, to the first one. With several threads each copies a part at a
    time, through memory that is pinned for a GPU, which may still read it when this returns. With one thread torch divides
    the work."""
    if num_threads == 1:
        for own, stored in pairs:
            own.copy_(stored)
        return
    before = torch.get_num_threads()
    chunks = (chunk for pair in pairs for chunk in _chunks(*pair))
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(_copy_staged, chunks):
                pass
    finally:
        torch.set_num_threads(before)


def _chunks(own: Tensor, stored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of two tensors, each of some rows."""
    if own.dim() == 0:
        return iter([(own, stored)])
    num_rows = max(1, CHUNK_BYTES * len(own) // max(1, own.nbytes))
    return ((own[first : first + num_rows], stored[first : first + num_rows]) for first in range(0, len(own), num_rows))


def _copy_staged(pair: tuple[Tensor, Tensor]) -> None:
    own, stored = pair
    # torch gives the pinned memory to another tensor only after the device has read it.
    staged = torch.empty(own.shape, dtype=own.dtype, device="cpu", pin_memory=own.is_cuda).copy_(stored)
    own.copy_(staged, non_blocking=True)


def _set(model: PreTrainedModel, name: str, tensor: Tensor) -> None:
    module, leaf = _owner(model, name)
    if isinstance(getattr(module, leaf), nn.Parameter):
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
    with torch.device("cpu"):  # transformers computes them on the default device, which the program may have set
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
