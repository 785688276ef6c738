"""Chooses the executor: the configured one, or with "auto" the one that fits."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec

from millrace.executor.base import Executor
from millrace.executor.launch.devices import num_visible_gpus
from millrace.executor.launch.external import COMMAND_LINE, RENDEZVOUS_DIR, ExternalLauncherExecutor, is_torchrun_rank
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.ray import RayExecutor
from millrace.executor.launch.ray_cluster import is_joined, known_address
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig

logger = logging.getLogger("millrace.executor")

_EXECUTORS: dict[str, Callable[..., Executor]] = {
    "uni": UniprocExecutor,
    "mp": MultiprocExecutor,
    "ray": RayExecutor,
    "external": ExternalLauncherExecutor,
}
NAMES = ("auto", *_EXECUTORS)


def make_executor(
    name: str,
    config: WorkerConfig,
    *,
    is_service: bool,
    worker_module: str = "millrace.worker",
    log_level: str = "INFO",
) -> Executor:
    """Return the executor of `NAMES` called `name`, or with "auto" the one that fits. It is not started. Raises ValueError,
    with the remedy, for more ranks than devices, and for an executor that does not fit."""
    world_size = config.tensor_parallel_size * config.pipeline_parallel_size
    num_gpus = None if config.device == "cpu" else num_visible_gpus()
    if not is_service:
        _check_offline(name, world_size)
    chosen, reason = _choose(world_size, num_gpus) if name == "auto" else (name, "as configured")
    _check_devices(chosen, world_size, num_gpus)
    executor = _EXECUTORS[chosen](config, worker_module=worker_module, log_level=log_level)
    logger.info("executor: %s, %d rank%s (%s)", chosen, world_size, "s" if world_size > 1 else "", reason)
    return executor


def is_ray_reachable() -> bool:
    """Whether Ray is installed and there is a cluster: joined, named by RAY_ADDRESS, or started on this host."""
    if find_spec("ray") is None:
        return False
    return is_joined() or known_address() is not None


def _choose(world_size: int, num_gpus: int | None) -> tuple[str, str]:
    """Return (name, reason). One rank, too, has a process of its own: it imports less than one that may use transformers
    itself, captures graphs while it is idle, and can be lost without the engine."""
    if RENDEZVOUS_DIR in os.environ:
        return "external", "torchrun started the ranks"
    if _is_in_placement_group():
        return "ray", "this process runs in a Ray placement group"
    if num_gpus is None:
        return "mp", "there is no GPU to use"
    if num_gpus >= world_size:
        return "mp", f"GPUs of this host: {num_gpus}"
    if is_ray_reachable():
        return "ray", f"this host has only {num_gpus} GPUs, and Ray is reachable"
    return "mp", "no other executor fits"


def _check_offline(name: str, world_size: int) -> None:
    """Refuse torchrun for `LLM`, which starts its ranks itself, and so in every process that torchrun starts."""
    if name == "external":
        raise ValueError(
            f"executor: external is for `millrace serve` under torchrun ({COMMAND_LINE}); LLM starts its ranks itself: run "
            "the script with python, and use executor mp, or ray for several hosts"
        )
    if name == "auto" and world_size > 1 and is_torchrun_rank(os.environ) and os.environ.get("WORLD_SIZE") != "1":
        raise ValueError(
            f"executor: torchrun runs this script in {os.environ.get('WORLD_SIZE')} processes, and LLM would start "
            f"{world_size} ranks in each; run it with python, or set executor mp if you want that"
        )


def _check_devices(chosen: str, world_size: int, num_gpus: int | None) -> None:
    if chosen in ("mp", "external") and num_gpus is not None and num_gpus < world_size:
        raise ValueError(
            f"tensor_parallel_size x pipeline_parallel_size: needs {world_size} GPUs, this host has {num_gpus}; use "
            "smaller sizes, or executor ray with a cluster: in the checkout pip install '.[ray]', `ray start`, RAY_ADDRESS"
        )
    if chosen == "ray" and find_spec("ray") is None:
        raise ValueError("executor: ray is not installed; run in the checkout: pip install '.[ray]'")


def _is_in_placement_group() -> bool:
    if not is_joined():
        return False
    return importlib.import_module("ray.util").get_current_placement_group() is not None
