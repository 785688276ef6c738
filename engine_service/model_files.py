"""What the engine itself reads from a model's directory, without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from millrace.engine_service.errors import ConfigurationError
from millrace.executor.sizes import why_impossible
from millrace.results.errors import shown

_PLACE_BYTES, _NUM_PLACES = 4096, 4
"""What `fingerprint` reads of a tensor: so many places of this size, evenly spaced. A smaller tensor is read as a whole."""
_MAX_HEADER_BYTES = 100_000_000
"""Longer headers are invalid, as in safetensors."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_ADAPTER_FILE = "adapter_config.json"
_GGUF_RULE = "is in GGUF, which is not supported; use the model's checkpoint in safetensors, in 16 bits"


def resolve_model(model: str, revision: str | None = None, *, or_adapter: bool = False) -> Path:
    """Return the directory of a model: `model` itself, or the local copy of a hub id, which is downloaded if needed.
    `revision`: of the hub's repository. `or_adapter`: whether it may be an adapter instead."""
    path = os.path.expanduser(model)
    if os.path.isfile(path):
        if path.endswith(".gguf"):
            raise ConfigurationError(f"model: {model} {_GGUF_RULE}")
        raise ConfigurationError(f"model: {model} is a file; name the directory of a model")
    if os.path.isdir(path):  # unlike `Path.is_dir`, false for a name that is too long
        if is_adapter(Path(path)):
            return _adapter_in_place_of_model(model, Path(path).resolve(), or_adapter)
        if not os.path.isfile(os.path.join(path, "config.json")):
            if any(Path(path).glob("*.gguf")):
                raise ConfigurationError(f"model: {model} {_GGUF_RULE}")
            raise ConfigurationError(f"model: {model} has no config.json; name the directory of a model")
        if revision is not None:
            raise ConfigurationError(f"revision: is of a hub id, and {model} is a directory; leave it out")
        return _without_pooling(model, Path(path).resolve())
    found = _from_hub("model", model, revision)
    if is_adapter(found):
        return _adapter_in_place_of_model(model, found, or_adapter)
    if model.lower().endswith("gguf") and not any(found.glob("*.safetensors")):
        raise ConfigurationError(f"model: {model} {_GGUF_RULE}")
    return _without_pooling(model, found)


def _adapter_in_place_of_model(model: str, path: Path, is_allowed: bool) -> Path:
    if is_allowed:
        return path
    base = _read_json(path / _ADAPTER_FILE).get("base_model_name_or_path") or "its base model"
    raise ConfigurationError(f"model: {model} is a LoRA adapter ({_ADAPTER_FILE}); name {base}, and it as adapter")


def resolve_adapter(adapter: str) -> Path:
    """Return the directory of a LoRA adapter: `adapter` itself, or the local copy of a hub id."""
    path = os.path.expanduser(adapter)
    if os.path.isfile(path):
        raise ConfigurationError(f"adapter: {adapter} is a file; name the directory of an adapter")
    found = Path(path).resolve() if os.path.isdir(path) else _from_hub("adapter", adapter, None)
    if not is_adapter(found):
        raise ConfigurationError(f"adapter: {adapter} has no {_ADAPTER_FILE}; name the directory that peft has saved")
    return found


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter, and no model. Axolotl saves the model's config.json beside it."""
    is_model = any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    return (path / _ADAPTER_FILE).is_file() and not is_model


def _from_hub(option: str, name: str, revision: str | None) -> Path:
    """Return the local copy of a hub id, which is downloaded if needed."""
    if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigurationError(
            f"{option}: there is no directory {name}; use a directory or a hub id such as org/name"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the hub's client raises its own and its transport's errors
        raise ConfigurationError(
            f"{option}: {name} is no directory, and the hub does not return it: {error}"
        ) from error


def _without_pooling(model: str, path: Path) -> Path:
    """Return the path. Raises `ConfigurationError` for embeddings, whose decoder would start, and serve nonsense."""
    if b"Pooling" in _read(path / "modules.json"):  # sentence-transformers; rerankers that generate a token have none
        rule = "is a model for embeddings (it has modules.json); use a model that generates text"
        raise ConfigurationError(f"model: {model} {rule}")
    return path


def eos_token_ids(path: Path, adapter: str | None = None) -> list[int]:
    """Return the ids that end a sequence, from generation_config.json, else from config.json, as transformers does, and the
    end token of the adapter's tokenizer, if it has one: an adapter for chats may have been trained with another one."""
    of_adapter = _tokenizer_eos(Path(adapter)) if adapter is not None else []
    return list(dict.fromkeys([*_own_eos_token_ids(path), *of_adapter]))


def _tokenizer_eos(directory: Path) -> list[int]:
    token = _read_json(directory / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = _read_json(directory / "tokenizer.json").get("added_tokens") or []
    return [each["id"] for each in added if content is not None and each.get("content") == content]


def _own_eos_token_ids(path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        config = _read_json(path / name)
        values = [part.get("eos_token_id") for part in (config, _language_model(config))]
        value = next((each for each in values if each is not None), None)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            message = f"model: eos_token_id in {path / name} must be a token id or a list of them, got {shown(value)}"
            raise ConfigurationError(f"{message}; copy the model again")
        return ids
    return []


def default_sampling(path: Path) -> dict[str, Any]:
    """Return the sampling parameters in generation_config.json, by our names."""
    config = _read_json(path / "generation_config.json")
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        found["max_tokens"] = config["max_new_tokens"]
    return found


def check_parallel_sizes(path: Path, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raise `ConfigurationError` when the model can't be divided by these sizes. Reads config.json; starts nothing."""
    config = _language_model(_read_json(path / "config.json"))
    num_heads = config.get("num_attention_heads")
    counts: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "num_layers": config.get("num_hidden_layers"),
    }
    if not all(isinstance(count, int) and count > 0 for count in counts.values()):
        return  # the worker knows how to divide such a model, or why it can't be loaded
    reason = why_impossible(tensor_parallel_size, pipeline_parallel_size, **counts)
    if reason is not None:
        raise ConfigurationError(reason)


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of the language model: a part of it, in models that take images or audio too."""
    return part if isinstance(part := config.get("text_config"), dict) else config


def fingerprint(path: Path, tokenizer_path: Path, template_file: str | None, adapter: str | None = None) -> str:
    """Return a hash that is equal for engines with the same weights, tokenizer and chat template. With the same number
    formats they can continue each other's generations. `adapter`: its directory.

    It covers the configurations, the tokenizer and its templates, and of each weight file the header and a sample of each
    tensor. A file that can't be read counts as empty: whoever needs it reports that.
    """
    texts = [tokenizer_path / name for name in ("tokenizer.json", "tokenizer_config.json", *_TEMPLATES)]
    texts += [Path(template_file).expanduser()] if template_file is not None else []
    digest = hashlib.sha256()
    for file in (path / "config.json", path / "generation_config.json", *texts):
        digest.update(hashlib.sha256(_read(file)).digest())
    adapter_files = [] if adapter is None else sorted(Path(adapter).glob("*.safetensors"))
    if adapter is not None:
        digest.update(hashlib.sha256(_read(Path(adapter) / _ADAPTER_FILE)).digest())
    for file in (*sorted(path.glob("*.safetensors")), *adapter_files):
        digest.update(file.name.encode() + _hash_of_sample(file))
    return digest.hexdigest()[:32]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _hash_of_sample(file: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as weights:
            number = weights.fileno()
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)  # nothing else is read ahead
            size = int.from_bytes(os.pread(number, 8, 0), "little")
            header = os.pread(number, min(size, _MAX_HEADER_BYTES), 8)
            digest.update(header)
            tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
            places = []
            for begin, end in (entry["data_offsets"] for entry in tensors):  # counted from the end of the header
                last = max(0, end - begin - _PLACE_BYTES)
                offsets = {last * each // (_NUM_PLACES - 1) for each in range(_NUM_PLACES)}
                places += [8 + size + begin + offset for offset in sorted(offsets)]
            for place in places:  # all are fetched at the same time, or each would take the way to a file server
                os.posix_fadvise(number, place, _PLACE_BYTES, os.POSIX_FADV_WILLNEED)
            for place in places:
                digest.update(os.pread(number, _PLACE_BYTES, place))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        pass  # the worker refuses the file, and says why
    return digest.digest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"model: {path} can't be read ({error}); copy the model again") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"model: {path} must hold a JSON object; copy the model again")
    return content
