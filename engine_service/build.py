"""Make the executor of an engine from the engine's options, for the service and for `LLM`."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from millrace.engine_service.config import EngineConfig
from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.model_files import check_parallel_sizes, resolve_adapter
from millrace.executor.base import Executor
from millrace.executor.launch.select import make_executor

_Config = TypeVar("_Config", bound=EngineConfig)


def with_local_adapter(config: _Config) -> _Config:
    """Return the options with the local directory of the adapter, and with its tokenizer if it has one. Raises
    `ConfigurationError`."""
    if config.adapter is None:
        return config
    path = resolve_adapter(config.adapter)
    tokenizer = config.tokenizer or (str(path) if (path / "tokenizer.json").is_file() else None)
    return msgspec.structs.replace(config, adapter=str(path), tokenizer=tokenizer)


def build_executor(config: EngineConfig, path: Path, *, is_service: bool, log_level: str = "WARNING") -> Executor:
    """Return the executor for the model in `path`, not yet started. Raises `ConfigurationError`."""
    check_parallel_sizes(path, config.tensor_parallel_size, config.pipeline_parallel_size)
    try:
        return make_executor(config.executor, config.for_worker(path), is_service=is_service, log_level=log_level)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
