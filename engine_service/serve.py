"""The start of an engine service: read the options, start the ranks, and only then import the rest of the service.

This module imports nothing that takes long, so a rank, which needs most of the time, starts a second earlier.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from millrace import __version__
from millrace.engine_service.build import build_executor, with_local_adapter
from millrace.engine_service.config import ServeConfig, parse
from millrace.engine_service.errors import ConfigurationError, EngineDead, PortInUse
from millrace.engine_service.model_files import resolve_model
from millrace.executor.base import Executor
from millrace.executor.launch.devices import lock_free_gpus
from millrace.executor.launch.external import become_rank, is_torchrun_rank
from millrace.executor.logs import FORMAT_VARIABLE, set_up_logs
from millrace.executor.phases import process_age_s
from millrace.executor.wire.failures import EXIT_BY_CAUSE, EXIT_CONFIGURATION
from millrace.results.errors import InvalidRedisURL, QueueError

logger = logging.getLogger("millrace.engine")

EXIT_PORT_IN_USE = 1
EXIT_REDIS = 4
EXIT_WORKERS_LOST = 6


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        signal.signal(signal.SIGTERM, _stop_starting)
        signal.signal(signal.SIGINT, _stop_starting)
        config = parse(argv)
        os.environ[FORMAT_VARIABLE] = config.log_format
        set_up_logs(config.log_level)
        if config.executor in ("auto", "external") and is_torchrun_rank(os.environ):
            _become_rank(config, arguments)
        logger.info("millrace %s", __version__)
        path = resolve_model(config.model, config.revision)
        config = with_local_adapter(config)
        return _serve(config, path, build_executor(config, path, is_service=True, log_level=config.log_level))
    except (ConfigurationError, PortInUse, QueueError, EngineDead) as error:
        if os.environ.get(FORMAT_VARIABLE) == "json":
            set_up_logs("CRITICAL")  # does nothing, unless an option is invalid
            logger.critical("%s", error)
        else:
            print(f"millrace serve: {error}", file=sys.stderr)
        if isinstance(error, EngineDead):
            return EXIT_BY_CAUSE.get(error.cause, EXIT_WORKERS_LOST)
        if isinstance(error, PortInUse):
            return EXIT_PORT_IN_USE
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError | InvalidRedisURL) else EXIT_REDIS


def _become_rank(config: ServeConfig, arguments: list[str]) -> NoReturn:
    """Turn this process, which torchrun started, into a rank. Rank 0 starts the service."""
    world_size, stages = int(os.environ["WORLD_SIZE"]), config.pipeline_parallel_size
    if config.tensor_parallel_size not in (1, world_size // stages) or world_size % stages:
        raise ConfigurationError(
            f"tensor_parallel_size x pipeline_parallel_size: must be torchrun's {world_size} processes, "
            f"got {config.tensor_parallel_size} x {stages}"
        )
    chosen = ["--executor", "external", "--tensor-parallel-size", str(world_size // stages)]
    command = [sys.executable, "-P", "-m", "millrace.engine_service", *arguments, *chosen]
    try:
        become_rank(command, log_level=config.log_level)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


class _Start:
    must_stop = False
    """Whether a signal has come before there was anything to drain."""


def _stop_starting(number: int, frame: FrameType | None) -> None:
    """Handle a signal before there is anything to drain: exit, but run the cleanup."""
    _Start.must_stop = True
    # Where the signal interrupts a callback of Python itself, as in an import, the exception is only reported here.
    sys.unraisablehook = lambda _: None
    raise SystemExit(0)


def _serve(config: ServeConfig, path: Path, executor: Executor) -> int:
    """Start the ranks, import the service beside them, and serve the model in `path`. Return the exit status."""
    if config.device == "auto" and executor.name in ("mp", "uni"):
        _choose_devices(config)
    try:
        executor.begin_start()
        logger.info("start: options and launch %.2f s", process_age_s())
        gc.disable()  # modules are no garbage; `run` enables it again
        from millrace.engine_service.process import run

        logger.info("start: imports %.2f s", process_age_s())
        return 0 if run(config, path, executor, lambda: _Start.must_stop) else EXIT_REDIS
    finally:
        executor.shutdown()


def _choose_devices(config: ServeConfig) -> None:
    try:
        lock_free_gpus(config.tensor_parallel_size * config.pipeline_parallel_size, Path(config.device_locks))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
