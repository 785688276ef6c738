"""A Ray cluster of several nodes, all of them real and on this machine, and processes that use it."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

QUIET = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the loopback interface only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Heard of a node for the last time 2 s ago: it is dead.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

_CALL_LIMIT_S = 100.0


class Process:
    """A fresh interpreter with an environment of its own, which runs functions of the tests one after the other."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_set, initargs=({**QUIET, **environment},)
        )

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What the function returns or raises there. One that takes too long writes its threads' stacks to stderr."""
        return self._pool.submit(_watched, function, *arguments).result(_CALL_LIMIT_S)

    def end(self) -> None:
        self._pool.shutdown()


def _watched(function: Callable[..., Result], *arguments: Any) -> Result:
    faulthandler.dump_traceback_later(_CALL_LIMIT_S - 5)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _set(environment: dict[str, str]) -> None:
    os.environ.update(environment)


class RayNodes:
    """Owns the cluster: a head without a CPU, and nodes of two CPUs each. All run here, each at an address of its own."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="mr-nodes-", dir="/tmp")  # Ray's socket paths are long already
        self._process = Process({"RAY_TMPDIR": self._directory})
        self.address = self._process.run(_start, self._directory)

    def add(self) -> None:
        """One more node."""
        self._process.run(_add)

    def kill(self, place: int) -> None:
        """A node with all that runs on it, by its place in the order in which they came."""
        self._process.run(_kill, place)

    def count(self) -> int:
        """Nodes that live, the head among them."""
        return self._process.run(_count)

    def user(self, **environment: str) -> Process:
        """A process that knows of the cluster, and of no other."""
        return Process({"RAY_ADDRESS": self.address, "RAY_TMPDIR": self._directory, **environment})

    def stop(self) -> None:
        self._process.run(_stop)
        self._process.end()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def ray_nodes(number: int) -> Iterator[RayNodes]:
    nodes = RayNodes()
    try:
        for _ in range(number):
            nodes.add()
        yield nodes
    finally:
        nodes.stop()


# --- in the process of the cluster ---

_cluster: Any = None
_nodes: list[Any] = []


def _start(directory: str) -> str:
    global _cluster
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": f"{directory}/ray", "node_ip_address": "127.0.0.1"}
    _cluster = Cluster(initialize_head=True, head_node_args=head)
    address: str = _cluster.address
    return address


def _add() -> None:
    options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    _nodes.append(_cluster.add_node(node_ip_address=f"127.0.0.{2 + len(_nodes)}", **options))


def _kill(place: int) -> None:
    _cluster.remove_node(_nodes[place], allow_graceful=False)


def _count() -> int:
    return sum(node["Alive"] for node in _cluster.global_state.node_table())


def _stop() -> None:
    _cluster.shutdown()
