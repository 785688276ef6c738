"""The options of an engine: one frozen Struct, filled from the command line and from a TOML file."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from msgspec.structs import FieldInfo

from millrace.engine_service.chat.output_format import REASONING_PARSERS, TOOL_CALL_PARSERS
from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.model_files import eos_token_ids
from millrace.executor.launch.select import NAMES as EXECUTORS
from millrace.executor.logs import FORMATS as LOG_FORMATS
from millrace.executor.wire.messages import WorkerConfig
from millrace.results.errors import shown
from millrace.results.keys import QUEUE_PATTERN

if TYPE_CHECKING:
    from millrace.engine_service.core.scheduler import SchedulerConfig

_MAX_COUNT = 2**31 - 1
_MAX_TEXT = 4096
_MAX_S = 604_800.0  # a week

_RANGES: dict[str, tuple[float, float]] = {
    "tensor_parallel_size": (1, 4096),
    "pipeline_parallel_size": (1, 4096),
    "max_parallel_loading_workers": (1, _MAX_COUNT),
    "max_model_len": (2, _MAX_COUNT),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**24),
    "max_logprobs": (-1, _MAX_COUNT),
    "block_size": (1, 2**16),
    "num_blocks": (2, _MAX_COUNT),
    "swap_space_gib": (0, 2**20),
    "drain_grace": (0, _MAX_S),
    "exit_when_idle": (0, _MAX_S),
    "heartbeat": (0.2, _MAX_S),
    "inter_token_latency": (0.001, _MAX_S),
    "metrics_port": (0, 65535),
}
"""The lowest and the highest value."""

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("int8",),
    "executor": EXECUTORS,
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "fp8"),
    "attention": ("auto", "cpu", "triton", "reference"),
    "tool_call_parser": TOOL_CALL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "log_format": LOG_FORMATS,
}
_PATTERNS = {
    "device": (r"auto|cpu|cuda(:\d{1,3})?", "must be auto, cpu, cuda or cuda:N"),
    "queue": (QUEUE_PATTERN.pattern, f"must match {QUEUE_PATTERN.pattern}"),
}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

_HELP = {
    "model": ("DIR_OR_ID", "directory with config.json and safetensors files, or a Hugging Face Hub id"),
    "revision": ("COMMIT", "commit, tag or branch of a Hub model (default: main); a commit never changes"),
    "served_model_name": ("NAME", "model name that jobs give (default: --model, or its last part)"),
    "adapter": ("DIR_OR_ID", "LoRA adapter that is merged into the model while it is loaded: directory or Hub id"),
    "tokenizer": ("DIR", "directory of the tokenizer (default: that of --adapter if it has one, else the model's)"),
    "chat_template": ("FILE", "Jinja template that makes prompts of chats (default: the tokenizer's)"),
    "queue": ("NAME", "queue to take jobs from"),
    "redis": (
        "URL",
        "Redis server (default: $MILLRACE_REDIS_URL, else the text of the file $MILLRACE_REDIS_URL_FILE, else "
        "$REDIS_URL, else localhost)",
    ),
    "device": (
        "DEVICE",
        "auto (where there are GPUs, those that no other engine has locked), cpu, cuda or cuda:N",
    ),
    "device_locks": ("DIR", "directory of the locks of --device auto, shared by the engines of this host"),
    "dtype": (None, "number format of weights and activations; auto chooses by model and device"),
    "quantization": (
        None,
        "int8 rounds the weights of linear layers to 8 bits: half the memory and faster, only on a CPU (default: none)",
    ),
    "executor": (None, "how the ranks run: in one process, in processes on this host, on Ray, under torchrun"),
    "tensor_parallel_size": ("N", "number of ranks that divide each layer"),
    "pipeline_parallel_size": ("N", "number of stages that divide the layers"),
    "max_parallel_loading_workers": ("N", "number of ranks that load weights at the same time (default: all)"),
    "max_model_len": ("TOKENS", "longest prompt and output together (default: the model's limit)"),
    "max_num_seqs": ("N", "most sequences in one step"),
    "max_num_batched_tokens": ("TOKENS", "most tokens in one step"),
    "max_logprobs": ("N", "most log-probabilities that a job can request for each token; -1: the whole vocabulary"),
    "block_size": ("TOKENS", "size of one KV block in tokens"),
    "num_blocks": ("N", "size of the KV pool in blocks (default: as many as fit)"),
    "kv_cache_memory": ("BYTES", "size of the KV pool in bytes, such as 512M or 4GiB (default: as many as fit)"),
    "kv_cache_dtype": (None, "number format of the KV pool; auto takes that of the activations; fp8 needs a GPU"),
    "attention": (None, "implementation of attention; auto takes the fastest one for the device"),
    "swap_space_gib": ("GIB", "host memory of each rank for KV blocks that do not fit on its GPU; 0 for none"),
    "gpu_memory_utilization": ("SHARE", "share of a GPU's memory that the engine may use, above 0 and up to 1"),
    "tool_call_parser": (
        "NAME",
        f"how tool calls are read from the outputs of chats: {', '.join(TOOL_CALL_PARSERS[1:])}; auto: by the chat template",
    ),
    "reasoning_parser": (
        "NAME",
        f"how reasoning is read from the outputs of chats: {', '.join(REASONING_PARSERS[1:])}; auto: by the chat template",
    ),
    "drain_grace": ("SECONDS", "time for running jobs to finish after SIGTERM"),
    "exit_when_idle": ("SECONDS", "exit with status 0 after this time without a job (default: never)"),
    "inter_token_latency": (
        "SECONDS",
        "longest step while a client reads the output of a running job; prompts are computed in smaller chunks",
    ),
    "heartbeat": ("SECONDS", "time without a heartbeat after which other engines take this engine's jobs"),
    "metrics_port": ("PORT", "port that serves /metrics and /health over HTTP; 0 takes a free one (default: off)"),
    "metrics_host": ("ADDRESS", "address that serves /metrics and /health"),
    "log_level": (None, "lowest level of the messages to log"),
    "log_format": (None, "text lines, or one JSON object a line"),
}
"""By option: how the help calls its value, and what it says."""

_SWITCHES = {
    "--no-prefix-caching": (
        "enable_prefix_caching",
        False,
        "compute every prompt completely, even if its beginning is cached",
    ),
    "--no-run-ahead": (
        "run_ahead",
        False,
        "do not plan the next step while a step runs; slower, for comparisons",
    ),
    "--enforce-eager": ("enforce_eager", True, "use no CUDA graphs; slower, without effect on a CPU"),
    "--isolate-tenants": (
        "isolate_tenants",
        True,
        "share cached prompts only within a tenant: otherwise the number of cached tokens shows a tenant what others asked",
    ),
    "--batch-invariant": (
        "batch_invariant",
        True,
        "make the tokens of a job independent of other jobs, cached prompts and restarts; on a CPU only AMX is slower",
    ),
}
"""By switch: the option that it sets, the value, and what the help says."""

_OTHER_OPTIONS = {
    "--data-parallel-size": "start that many engines; each one takes GPUs that are free",
    **dict.fromkeys(("--num-ctx", "--ctx-size", "-c"), "use --max-model-len"),
    **dict.fromkeys(("--threads", "--num-threads", "-t"), "set the environment variable OMP_NUM_THREADS"),
    **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "-ngl"), "all layers are on the device; use --device"),
    "--guided-decoding-backend": "Millrace has one, llguidance; leave it out",
    **dict.fromkeys(("--host", "--port"), "an engine takes its jobs from Redis and has no HTTP API (docs/web.md)"),
}
"""By option of vLLM, Ollama or llama.cpp: what to do here."""

_EXITS = """\
Exit status: 0 after SIGTERM, SIGINT or --exit-when-idle, 1 for a failure of the
program or a metrics port that is in use, 2 when an option or the model can't
work, 4 when Redis cannot be used or did not take the last results, 6 when the
workers are lost and cannot be replaced, 7 when the device is lost, 8 when the
device's memory is too small."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine, for `LLM` and for a service. `_HELP` and `_SWITCHES` say what they mean."""

    model: str
    revision: str | None = None
    adapter: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    executor: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_logprobs: int = 20
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: str = "auto"
    attention: str = "auto"
    enforce_eager: bool = False
    """Whether no step of a GPU runs as a graph."""
    batch_invariant: bool = False
    """Whether the bits of a token depend on its sequence alone: not on the batch, chunks, caches or restarts."""
    swap_space_gib: float = 0.0
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_parallel_loading_workers: int | None = None
    enable_prefix_caching: bool = True
    """Whether sequences that begin alike share the KV blocks of their beginning."""
    run_ahead: bool | None = None
    """Whether the engine plans a step while the one before it runs. None: where the workers run beside the engine."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) is not None:
                _check(name, getattr(self, name))
        share, num_ranks = self.gpu_memory_utilization, self.tensor_parallel_size * self.pipeline_parallel_size
        _require(0 < share <= 1, "gpu_memory_utilization", "must be above 0 and up to 1", share)
        parse_bytes(self.kv_cache_memory)
        _require(
            ":" not in self.device or num_ranks == 1,
            "device",
            f'names one GPU, but {num_ranks} ranks need one each; use "cuda", and CUDA_VISIBLE_DEVICES to choose GPUs',
            self.device,
        )
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigurationError("kv_cache_memory: num_blocks sets the size of the KV pool too; give one of them")
        if self.batch_invariant:
            rule = "must be a multiple of 16 with batch_invariant"
            _require(self.block_size % 16 == 0, "block_size", rule, self.block_size)

    def for_worker(self, path: Path) -> WorkerConfig:
        """Return the worker's part, for the model in `path`."""
        shared = msgspec.convert(self, WorkerConfig, from_attributes=True)
        return msgspec.structs.replace(
            shared,
            model=str(path),
            weights=self.adapter,
            tokenizer=str(self.tokenizer_path) if self.tokenizer_path else None,
            eos_token_ids=eos_token_ids(path, self.adapter),
            kv_cache_memory_bytes=parse_bytes(self.kv_cache_memory),
            swap_space_bytes=int(self.swap_space_gib * 2**30),
            force_swap=_is_swap_forced(),
        )

    @property
    def tokenizer_path(self) -> Path | None:
        """The absolute path of the tokenizer's directory: ranks may have another working directory. None: the model's."""
        return Path(self.tokenizer).expanduser().resolve() if self.tokenizer else None

    @property
    def is_pool_automatic(self) -> bool:
        """Whether no option sets the size of the KV pool."""
        return self.num_blocks is None and self.kv_cache_memory is None

    def for_scheduler(self) -> SchedulerConfig:
        """Return the scheduler's part."""
        from millrace.engine_service.core.scheduler import (
            SchedulerConfig,  # a rank starts before the scheduler is imported
        )

        config = msgspec.convert(self, SchedulerConfig, from_attributes=True)
        return msgspec.structs.replace(config, force_swap=_is_swap_forced())


class ServeConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine service: an engine and the queue that it takes jobs from."""

    served_model_name: str | None = None
    queue: str = "default"
    redis: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    drain_grace: float = 25.0
    exit_when_idle: float | None = None
    heartbeat: float = 10.0
    device_locks: str = "/tmp/millrace-devices"
    isolate_tenants: bool = False
    """Whether only jobs of one tenant share cached prompts."""
    inter_token_latency: float = 0.1
    log_level: str = "INFO"
    log_format: str = "text"
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metrics_port is None and self.metrics_host != "127.0.0.1":  # its default, which nobody need have given
            raise ConfigurationError("metrics_host: has no effect without metrics_port; add --metrics-port PORT")

    def for_scheduler(self) -> SchedulerConfig:
        return msgspec.structs.replace(super().for_scheduler(), inter_token_latency_s=self.inter_token_latency)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that a job's `model` may have. Logs and metrics show the first one."""
        if self.served_model_name:
            return (self.served_model_name,)
        return os.path.basename(os.path.abspath(os.path.expanduser(self.model))), self.model


Config = TypeVar("Config", bound=EngineConfig)


def parse(argv: list[str] | None = None) -> ServeConfig:
    """Return the options of `millrace serve`: of the command line, else of its --config, else the defaults. Raises
    `ConfigurationError`, which names the option."""
    given = {name: value for name, value in vars(make_parser().parse_args(argv)).items() if value is not None}
    file = given.pop("config", None)
    options = {**(_read_toml(file) if file else {}), **given}
    if "model" not in options:
        raise ConfigurationError("model: is missing; add --model DIR_OR_ID")
    return checked(options, ServeConfig)


def checked(options: dict[str, Any], kind: type[Config]) -> Config:
    """Return the options as a config of this kind. Raises `ConfigurationError`, which names the option."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        message, _, name = str(error).partition(" - at `$.")
        raise ConfigurationError(f"{name.rstrip('`')}: {message[0].lower()}{message[1:]}") from error


def parse_bytes(value: int | str | None) -> int | None:
    """Return the bytes of kv_cache_memory: a number, or a text with a unit: 512M, 4GiB."""
    if value is None:
        return None
    if isinstance(value, int):
        num_bytes = value
    else:
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmg]i?)?b?", value.strip().lower())
        num_bytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    _require(0 < num_bytes < 2**63, "kv_cache_memory", "must be a positive number of bytes such as 512M or 4GiB", value)
    return num_bytes


def _is_swap_forced() -> bool:
    """Return whether blocks move to the host tier on a CPU too, and where computing them again is faster. For tests."""
    return os.environ.get("MILLRACE_FORCE_SWAP") == "1"


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="millrace serve",
        description="Run an engine that takes jobs from a queue and generates their text.",
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an option that is added later would change what a short form means
    )
    fields = {field.name: field for field in msgspec.structs.fields(ServeConfig)}
    for name in _HELP:
        add_option(parser, fields[name])
    for option, (name, value, text) in _SWITCHES.items():
        parser.add_argument(option, dest=name, action="store_const", const=value, help=text)
    parser.add_argument("--config", metavar="FILE", help="TOML file with these options, such as max_model_len = 4096")
    return parser


def add_option(parser: Any, field: FieldInfo, *aliases: str, default: Any = None) -> None:
    """Add the option of a field that is no switch. `parser` is one of argparse, or a group of options."""
    metavar, text = _HELP[field.name]
    has_default = not field.required and field.default is not None
    parser.add_argument(
        f"--{field.name.replace('_', '-')}",
        *aliases,
        type={int: _integer, int | None: _integer, float: _number, float | None: _number}.get(field.type, str),
        metavar=metavar,
        choices=_CHOICES.get(field.name),
        default=default,
        help=f"{text} (default: {field.default})" if has_default else text,
    )


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {shown(text)}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {shown(text)}") from None


class _Parser(argparse.ArgumentParser):
    """Raises an error of one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        _, _, unknown = message.partition("unrecognized arguments: ")
        first = unknown.split(" ")[0]
        if first.startswith("-"):
            option = first.partition("=")[0].replace("_", "-")
            known = [
                each for each in self._option_string_actions if each.startswith("--no-") == first.startswith("--no-")
            ]
            similar = get_close_matches(option, known, 1, 0.75)
            if option in _OTHER_OPTIONS:
                message += f": {_OTHER_OPTIONS[option]}"
            elif similar:
                message += f"; did you mean {similar[0]}?"
        elif unknown:
            message += f"; did you mean --model {first}?"
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def _read_toml(file: str) -> dict[str, Any]:
    try:
        options = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"config: must be a readable TOML file, got {file!r}: {error}") from error
    for name in options.keys() - set(ServeConfig.__struct_fields__):
        switch = f"--{name.replace('_', '-')}"
        similar = get_close_matches(name, ServeConfig.__struct_fields__, 1, 0.75)
        rule = f"did you mean {similar[0]}?" if similar else "write it as in max_num_seqs = 64"
        if switch in _SWITCHES:
            option, value, _ = _SWITCHES[switch]
            rule = f"for {switch} write {option} = {str(value).lower()}"
        raise ConfigurationError(f"config: has an unknown option {shown(name)}; {rule}")
    return options


def _check(name: str, value: Any) -> None:
    """Check a value by the tables above. Raises `ConfigurationError`."""
    if name in _PATTERNS:
        pattern, rule = _PATTERNS[name]
        _require(re.fullmatch(pattern, value) is not None, name, rule, value)
    if isinstance(value, str) and not (0 < len(value) <= _MAX_TEXT and value.isprintable()):
        raise ConfigurationError(f"{name}: must be printable text of 1 to {_MAX_TEXT} characters")  # maybe a password
    if name in _RANGES:
        low, high = _RANGES[name]
        _require(low <= value <= high, name, f"must be {low:.15g} to {high:.15g}", value)
    if name in _CHOICES:
        rule = " (leave it out for a checkpoint that is quantized)" if name == "quantization" else ""
        _require(value in _CHOICES[name], name, f"must be one of {', '.join(_CHOICES[name])}{rule}", value)


def _require(is_fine: bool, name: str, rule: str, value: object) -> None:
    if not is_fine:
        raise ConfigurationError(f"{name}: {rule}, got {shown(value)}")
