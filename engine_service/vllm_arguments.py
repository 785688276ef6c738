"""The arguments of vLLM's `LLM` that ours does not have: what they mean here, or why they are refused."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from millrace.engine_service.config import EngineConfig, add_option
from millrace.engine_service.errors import ConfigurationError
from millrace.producer.checks import remedy
from millrace.results.errors import shown

logger = logging.getLogger("millrace.engine")

_RENAMED = {
    "swap_space": "swap_space_gib",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "async_scheduling": "run_ahead",
    "distributed_executor_backend": "executor",
}
"""Arguments that have another name here."""
_EXECUTORS = {"external_launcher": "external"}
"""Values of `distributed_executor_backend` that have another name here."""
_WITHOUT_EFFECT = frozenset(
    [
        "attention_config",
        "compilation_config",
        "cuda_graph_sizes",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_sleep_mode",
        "guided_decoding_backend",
        "hf_token",
        "max_seq_len_to_capture",
        "optimization_level",
        "profiler_config",
        "scheduling_policy",
        "use_v2_block_manager",
        "worker_use_ray",
    ]
)
"""Arguments that change how vLLM works, and not what it generates."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "enable_lora": (False,),
    "enable_return_routed_experts": (False,),
    "generation_config": ("auto", "vllm"),
    "hf_overrides": ({},),
    "language_model_only": (True, False),
    "limit_mm_per_prompt": ({},),
    "load_format": ("auto", "safetensors"),
    "logits_processors": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf", "fast"),
    "trust_remote_code": (False,),
}
"""Arguments for what Millrace does not have, and the values that do not ask for it. None never does, also for arguments that
are not named here, such as `code_revision` and `speculative_config`."""
_REMEDIES = {
    "enable_lora": "name a LoRA adapter, which is merged into the model: adapter=DIR",
    "logprobs_mode": "log-probabilities are always those of the model's own logits",
}
"""By argument, where it is not "leave it out"."""


def dtype_name(dtype: Any) -> Any:
    """Return our name for one of vLLM's names of a dtype, or for a dtype of torch."""
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype
    return {"half": "float16", "float": "float32"}.get(name, name)


def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for those of vLLM. Raises `ConfigurationError` for one that Millrace cannot do, by name."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _RENAMED:
            if name == "distributed_executor_backend" and isinstance(value, str):
                value = _EXECUTORS.get(value, value)
            if value is not None:
                found[_RENAMED[name]] = value
        elif name in _WITHOUT_EFFECT or (name == "structured_outputs_config" and _only_chooses_backend(value)):
            logger.debug("%s has no effect in Millrace", name)
        elif value is not None and not any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            rule, what_to_do = "is not an argument of LLM", remedy(name, (*EngineConfig.__struct_fields__, *_RENAMED))
            if name in _NEUTRAL:
                rule = f"must be {' or '.join(map(repr, _NEUTRAL[name]))}"
                what_to_do = _REMEDIES.get(name, "leave it out")
            raise ConfigurationError(f"{name}: {rule}, got {shown(value)}; {what_to_do}")
    return found


def _only_chooses_backend(config: Any) -> bool:
    return isinstance(config, Mapping) and config.keys() <= {"backend", "disable_fallback"}


@contextmanager
def names_as_given(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let a `ConfigurationError` of the block begin with vLLM's name of an option where `arguments` have that name."""
    try:
        yield
    except ConfigurationError as error:
        option, _, message = str(error).partition(": ")
        given = next((name for name in arguments if _RENAMED.get(name) == option), None)
        if given is None:
            raise
        raise ConfigurationError(f"{given}: {message}") from error


class EngineArgs:
    """Options for the command line of a script that makes an `LLM`, with vLLM's names."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each argument of `LLM`, with its default: `LLM(**vars(parser.parse_args()))`. Return the parser.

        The options have the names of the arguments here, and those of vLLM where they differ."""
        group = parser.add_argument_group("arguments of LLM")
        of_vllm = {ours: f"--{theirs.replace('_', '-')}" for theirs, ours in _RENAMED.items()}
        aliases = {**of_vllm, "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp"}
        for field in msgspec.structs.fields(EngineConfig):
            others = [aliases[field.name]] if field.name in aliases else []
            default = None if field.required else field.default
            if field.type in (bool, bool | None):
                name = f"--{field.name.replace('_', '-')}"
                group.add_argument(name, *others, action=argparse.BooleanOptionalAction, default=default)
            else:
                add_option(group, field, *others, default=default)
        group.add_argument("--seed", type=int, default=0, help="seed of the requests that give none (default: 0)")
        return parser
