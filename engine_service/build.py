"""Make the executor of an engine from the engine's options, for the service and for `LLM`."""

from __future__ import annotations

from pathlib import Path

from millrace.engine_service.config import EngineConfig
from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.model_files import check_parallel_sizes
from millrace.executor.base import Executor
from millrace.executor.launch.select import make_executor


def build_executor(config: EngineConfig, path: Path, *, is_service: bool, log_level: str = "WARNING") -> Executor:
    """Return the executor for the model in `path`, not yet started. Raises `ConfigurationError`."""
    check_parallel_sizes(path, config.tensor_parallel_size, config.pipeline_parallel_size)
    try:
        return make_executor(config.executor, config.for_worker(path), is_service=is_service, log_level=log_level)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
