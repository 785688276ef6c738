"""Which executor runs a model: what was asked for, or the one that fits."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from importlib.util import find_spec

from millrace.executor.base import Executor
from millrace.executor.launch.devices import num_visible_gpus
from millrace.executor.launch.external import COMMAND_LINE, RENDEZVOUS_DIR, ExternalLauncherExecutor, is_torchrun_rank
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.ray_cluster import known_address
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig

logger = logging.getLogger("millrace.executor")

NAMES = ("auto", "uni", "mp", "ray", "external")


def make_executor(
    name: str,
    config: WorkerConfig,
    *,
    is_service: bool,
    worker_module: str = "millrace.worker",
    log_level: str = "INFO",
) -> Executor:
    """The executor called `name`, or with "auto" the one that fits; not yet started.

    Raises ValueError, naming what would work, for a name that is none of `NAMES` and for ranks that have no device.
    """
    if name not in NAMES:
        raise ValueError(f"executor: must be one of {', '.join(NAMES)}, got {name!r}")
    world_size = config.tensor_parallel_size * config.pipeline_parallel_size
    num_gpus = None if config.device == "cpu" else num_visible_gpus()
    if not is_service:
        _check_offline(name, world_size)
    chosen, reason = _choose(world_size, num_gpus, is_service=is_service) if name == "auto" else (name, "as asked for")
    _check(chosen, world_size, num_gpus)
    logger.info("executor: %s, %d rank%s (%s)", chosen, world_size, "s" if world_size > 1 else "", reason)
    return _class_of(chosen)(config, worker_module=worker_module, log_level=log_level)


def is_ray_reachable() -> bool:
    """Whether Ray is installed and a cluster is known: named by RAY_ADDRESS, started on this host, or joined already."""
    if find_spec("ray") is None:
        return False
    return _is_ray_joined() or known_address() is not None


def _choose(world_size: int, num_gpus: int | None, *, is_service: bool) -> tuple[str, str]:
    """(name, reason)."""
    if RENDEZVOUS_DIR in os.environ:
        return "external", "torchrun started the ranks"
    if _is_in_placement_group():
        return "ray", "this process runs in a placement group of Ray"
    if world_size == 1:
        return ("mp", "a service survives its worker") if is_service else ("uni", "one rank, offline")
    if num_gpus is None:
        return "mp", "the ranks share this host's CPU"
    if num_gpus >= world_size:
        return "mp", f"this host has {num_gpus} GPUs"
    if is_ray_reachable():
        return "ray", f"this host has {num_gpus} of the GPUs, and Ray is reachable"
    return "mp", "no other way is open"


def _check_offline(name: str, world_size: int) -> None:
    """`LLM` starts its ranks itself, and does so in each process that torchrun has made of a script."""
    if name == "external":
        raise ValueError(
            f"executor: external is for `millrace serve` under torchrun ({COMMAND_LINE}); LLM starts its ranks itself: run "
            "the script with python alone, and take mp, or ray for several hosts"
        )
    if name == "auto" and world_size > 1 and is_torchrun_rank(os.environ) and os.environ.get("WORLD_SIZE") != "1":
        raise ValueError(
            f"executor: torchrun runs this script in {os.environ.get('WORLD_SIZE')} processes, and LLM would start "
            f"{world_size} ranks in each; run it with python alone, or take executor mp where that is what you want"
        )


def _check(chosen: str, world_size: int, num_gpus: int | None) -> None:
    if chosen == "uni" and world_size > 1:
        raise ValueError(f"executor: uni runs one rank, but {world_size} are wanted; take mp")
    if chosen in ("uni", "mp", "external") and num_gpus is not None and num_gpus < world_size:
        raise ValueError(
            f"tensor_parallel_size x pipeline_parallel_size: needs {world_size} GPUs, this host shows {num_gpus}; take "
            "smaller sizes, or executor ray with a cluster: pip install 'millrace[ray]', `ray start`, and RAY_ADDRESS"
        )
    if chosen == "ray" and find_spec("ray") is None:
        raise ValueError("executor: ray is not installed; run: pip install 'millrace[ray]'")


def _class_of(name: str) -> type[UniprocExecutor] | type[MultiprocExecutor] | type[ExternalLauncherExecutor]:
    if name == "ray":
        ray_executor: type[MultiprocExecutor] = importlib.import_module("millrace.executor.launch.ray").RayExecutor
        return ray_executor
    known = {"uni": UniprocExecutor, "mp": MultiprocExecutor, "external": ExternalLauncherExecutor}
    return known[name]  # type: ignore[return-value]


def _is_ray_joined() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _is_in_placement_group() -> bool:
    if not _is_ray_joined():
        return False
    return importlib.import_module("ray.util").get_current_placement_group() is not None
