"""What an engine reads from a model's directory itself, without loading the model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from millrace.engine_service.errors import ConfigurationError
from millrace.executor.sizes import why_impossible

_SAMPLE_BYTES = 1 << 16


def resolve_model(model: str) -> Path:
    """The directory of a model: `model` itself, or the local copy of a hub id, downloaded when there is none."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigurationError(f"model: there is no directory {model}; name a directory or a hub id like org/name")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the hub's client raises its own and its transport's errors
        raise ConfigurationError(f"model: {model} is no directory, and the hub did not give it: {error}") from error


def eos_token_ids(path: Path) -> list[int]:
    """Ids that end a sequence: generation_config.json goes before config.json, as in transformers."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(path / name).get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


def check_parallel_sizes(path: Path, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raise `ConfigurationError` when the model can't be divided so; read from config.json, before anything starts."""
    config = _read_json(path / "config.json")
    config = config.get("text_config") or config
    num_heads, num_layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    if not isinstance(num_heads, int) or not isinstance(num_layers, int):
        return  # the worker knows more of such a model
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    reason = why_impossible(
        tensor_parallel_size,
        pipeline_parallel_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_layers=num_layers,
    )
    if reason is not None:
        raise ConfigurationError(reason)


def fingerprint(path: Path, tokenizer_path: Path, dtype: str) -> str:
    """Tells whether two engines would go on with each other's tokens: same weights, tokenizer and number format.

    Hashes the configurations, the tokenizer and its templates whole, and of each weight file its size, its header and a
    sample.
    """
    digest = hashlib.sha256(dtype.encode())
    texts = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for file in (path / "config.json", path / "generation_config.json", *(tokenizer_path / name for name in texts)):
        digest.update(hashlib.sha256(file.read_bytes() if file.exists() else b"").digest())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(_SAMPLE_BYTES))
            weights.seek(max(0, file.stat().st_size // 2))
            digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: {path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"model: {path} must hold a JSON object")
    return content
