"""The options of an engine: one frozen Struct, filled from a TOML file and the command line, the latter first."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.errors import ConfigurationError
from millrace.executor.launch.select import NAMES as EXECUTOR_NAMES
from millrace.executor.wire.messages import WorkerConfig
from millrace.results.keys import QUEUE_PATTERN

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

_EXITS = """\
Exit status: 0 after SIGTERM or SIGINT, 1 for a failure of the program, 2 when an option or the model can't work,
4 when Redis cannot be used or did not take the last results, 6 when the workers are lost for good, 7 when the device
is, 8 when the device's memory is too small."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is made from; the same for `LLM` and for a service."""

    model: str
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    executor: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    """Bytes, or a text such as "512M" or "4GiB"."""
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    """Ranks that divide each layer."""
    pipeline_parallel_size: int = 1
    """Stages that divide the layers."""
    max_parallel_loading_workers: int | None = None
    """Ranks that load weights at a time, where host memory is short. None: all."""

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", *sizes):
            _require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        for name in ("max_model_len", "num_blocks"):
            value = getattr(self, name)
            _require(value is None or value >= 2, name, "must be at least 2", value)
        _require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            "must be in (0, 1]",
            self.gpu_memory_utilization,
        )
        loading = self.max_parallel_loading_workers
        _require(loading is None or loading >= 1, "max_parallel_loading_workers", "must be at least 1", loading)
        parse_bytes("kv_cache_memory", self.kv_cache_memory)
        _require(
            ":" not in self.device or self.tensor_parallel_size * self.pipeline_parallel_size == 1,
            "device",
            'names one GPU, and several ranks need one each: take "cuda", and CUDA_VISIBLE_DEVICES to choose them',
            self.device,
        )

    def for_worker(self, path: Path) -> WorkerConfig:
        """The worker's part, for the model in `path`."""
        return WorkerConfig(
            model=str(path),
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_memory_bytes=parse_bytes("kv_cache_memory", self.kv_cache_memory),
            gpu_memory_utilization=self.gpu_memory_utilization,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            max_parallel_loading_workers=self.max_parallel_loading_workers,
        )

    def for_scheduler(self) -> SchedulerConfig:
        """The scheduler's part."""
        return SchedulerConfig(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)


class ServeConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine service: an engine and the queue that it drains."""

    served_model_name: str | None = None
    """The name that a job's `model` is checked against; default: the last part of `model`."""
    queue: str = "default"
    redis: str | None = None
    drain_grace: float = 25.0
    """Seconds that running jobs get to finish after SIGTERM before they are released."""
    heartbeat: float = 10.0
    """Seconds without a heartbeat after which another engine takes this one's jobs."""
    log_level: str = "INFO"
    metrics_port: int | None = None
    """Serves /metrics and /health over HTTP; 0: on any free port, which the log names. None: not at all."""
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.drain_grace >= 0, "drain_grace", "must not be negative", self.drain_grace)
        _require(self.heartbeat >= 0.2, "heartbeat", "must be at least 0.2 s", self.heartbeat)
        is_name = QUEUE_PATTERN.fullmatch(self.queue) is not None
        _require(is_name, "queue", f"must match {QUEUE_PATTERN.pattern}", repr(self.queue))
        _require(self.log_level in LOG_LEVELS, "log_level", f"must be one of {', '.join(LOG_LEVELS)}", self.log_level)
        port = self.metrics_port
        _require(port is None or 0 <= port <= 65535, "metrics_port", "must be 0 to 65535", port)

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(os.path.abspath(Path(self.model).expanduser())).name


Config = TypeVar("Config", bound=EngineConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `millrace serve`. Those that are left out come from --config, else they have their default."""
    parser.add_argument("--model", metavar="DIR_OR_ID", help="directory with safetensors and config.json, or a hub id")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="name that jobs use (default: last part of --model)"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="directory of the tokenizer (default: the model's)")
    parser.add_argument("--queue", metavar="NAME", help="queue to drain (default: default)")
    parser.add_argument("--redis", metavar="URL", help="server (default: $MILLRACE_REDIS_URL, $REDIS_URL, localhost)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--executor", choices=EXECUTOR_NAMES, help="where the ranks run (default: auto)")
    parser.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="ranks that divide each layer (default: 1)"
    )
    parser.add_argument("--pipeline-parallel-size", type=int, metavar="N", help="stages of layers (default: 1)")
    parser.add_argument("--max-parallel-loading-workers", type=int, metavar="N", help="ranks that load at a time")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest sequence (default: the model's)")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in one step (default: 256)")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens in one step (default: 2048)")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens in one KV block (default: 16)")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="size of the KV pool in blocks")
    parser.add_argument("--kv-cache-memory", metavar="BYTES", help="size of the KV pool, e.g. 512M or 4GiB")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="of a GPU's memory (default: 0.9)"
    )
    parser.add_argument(
        "--drain-grace", type=float, metavar="SECONDS", help="for running jobs at SIGTERM (default: 25)"
    )
    parser.add_argument("--heartbeat", type=float, metavar="SECONDS", help="limit for a dead engine (default: 10)")
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve /metrics and /health over HTTP (default: off)"
    )
    parser.add_argument("--metrics-host", metavar="ADDRESS", help="where to serve them (default: 127.0.0.1)")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="default: INFO")
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same names, as max_model_len = 4096")


def parse(argv: list[str] | None = None) -> ServeConfig:
    """The options from the command line and its --config. Raises `ConfigurationError` naming the option."""
    parser = _Parser(
        prog="millrace serve",
        description="Run an engine that drains a queue.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    file = given.pop("config", None)
    options = {**(_read_toml(file) if file else {}), **given}
    if "model" not in options:
        raise ConfigurationError("model: is missing; say --model DIR_OR_ID")
    return checked(options, ServeConfig)


def checked(options: dict[str, Any], kind: type[Config]) -> Config:
    """The options as a config of this kind. Raises `ConfigurationError` naming the option."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        message, _, name = str(error).partition(" - at `$.")
        raise ConfigurationError(f"{name.rstrip('`') or 'option'}: {message[0].lower()}{message[1:]}") from error


class _Parser(argparse.ArgumentParser):
    """Leaves the usage to --help, so that an error is one sentence here too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Bytes from a number, or from a text with a unit: 512M, 4GiB."""
    if value is None or isinstance(value, int):
        _require(value is None or value > 0, name, "must be positive", value)
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", value.strip().lower())
    num_bytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    _require(num_bytes > 0, name, "must be a number of bytes such as 512M or 4GiB", repr(value))
    return num_bytes


def _read_toml(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"config: {file} can't be read: {error}") from error


def _require(is_fine: bool, name: str, rule: str, value: object) -> None:
    if not is_fine:
        raise ConfigurationError(f"{name}: {rule}, got {value}")
