"""`RayExecutor`: Ray places the ranks on one or several hosts, starts them and watches them.

The executor requests a placement group with one bundle per rank, packed by host, and makes one actor in each bundle. The
first call of an actor returns where it runs. In the second call it becomes a rank, which connects to the engine over
ZeroMQ with CURVE keys. That call ends when the rank ends, so its end reports the loss of the process, of the node or of
Ray. Ray pickles only the arguments and results of these calls: strings, bytes and numbers.

Needs Ray 2.60 or later of version 2. Without a cluster the executor starts a local Ray on the loopback interface, and
stops it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from typing import Any

import msgspec

from millrace.executor.errors import StartError
from millrace.executor.launch.devices import num_visible_gpus
from millrace.executor.launch.process import python_path
from millrace.executor.launch.ray_cluster import LocalRay, does_answer, is_joined, known_address
from millrace.executor.launch.ray_rank import RankActor, RayRank
from millrace.executor.logs import FORMAT_VARIABLE
from millrace.executor.rank.serve import RankOptions
from millrace.executor.remote import RemoteExecutor
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import WorkerConfig

logger = logging.getLogger("millrace.executor")

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
_FULL_PRIORITY = {"RAY_worker_niceness": "0"}
"""In an actor's environment. Ray's default of 15 lets a rank compute almost nothing while other processes want the CPU."""
_ANY_BUNDLE = -1
_HOST_AND_PORT = re.compile(r"[^/]+:\d+")


class RayExecutor(RemoteExecutor):
    """Owns the placement group and its actors, and the local Ray if it started one."""

    name = "ray"
    can_restart = True
    can_resize = True

    def __init__(self, config: WorkerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._ray: Any = None
        self._local: LocalRay | None = None
        self._group: Any = None
        self._is_group_ours = False
        self._is_connection_ours = False
        """Whether this executor joined the cluster, and not its caller."""
        self._rendezvous_address = ""

    # --- placement ---

    def _open_channel(self) -> Channel:
        self._join()
        host = self._ray.util.get_node_ip_address()
        return Channel(self._num_starts, self.world_size, self._recorder, host=host)

    def _join(self) -> None:
        """Use the cluster that this process has joined, else that of RAY_ADDRESS or of this host, else a local Ray."""
        if self._ray is not None:
            return
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        address = None if is_joined() else known_address()
        if not is_joined() and address is None:
            self._start_local()
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
        if address is not None:
            _connect(ray, address)
            self._is_connection_ours = True
        self._ray = ray

    def _start_local(self) -> None:
        try:
            self._local = LocalRay(self.world_size, num_visible_gpus() or 0)
            self._local.start()
        except Exception as error:
            if self._local is not None:
                self._local.stop()
                self._local = None
            raise StartError("spawn", 0, f"a local Ray does not start: {error}", is_retryable=True) from error

    def _launch(self, channel: Channel) -> list[RayRank]:
        self._group = self._place()
        actors = [self._make_actor(index) for index in range(self.world_size)]
        try:
            places = self._locate(actors)
        except StartError:
            for actor in actors:
                self._ray.kill(actor)
            raise
        here = self._ray.util.get_node_ip_address()
        # Sorted by host, this host first, so that the ranks of one stage are on one host where possible.
        placed = sorted(zip(places, actors, strict=True), key=lambda one: (one[0][0] != here, one[0][0]))
        host, port, _ = placed[0][0]
        self._rendezvous_address = f"{host}:{port}"
        return [
            self._start_rank(rank, actor, host, pid, channel) for rank, ((host, _, pid), actor) in enumerate(placed)
        ]

    def _locate(self, actors: list[Any]) -> list[tuple[str, int, int]]:
        """Return `RankActor.locate` of each actor. Errors name the number of the bundle, as ranks have no number yet."""
        answers = [actor.locate.remote() for actor in actors]
        deadline_s = time.monotonic() + self._placement_limit_s
        places = []
        for rank, answer in enumerate(answers):
            try:
                places.append(self._ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic())))
            except self._ray.exceptions.GetTimeoutError as error:
                raise self._no_capacity(f"the placement group has {self._group.bundle_specs}") from error
            except Exception as error:
                raise StartError("spawn", rank, f"Ray did not start it: {error}", is_retryable=True) from error
        return places

    def _place(self) -> Any:
        """Return the placement group that this process runs in, else a group of this executor."""
        group = self._ray.util.get_current_placement_group()
        if group is not None:
            return group
        self._require_capacity()
        if self._group is not None and len(self._group.bundle_specs) == self.world_size:
            return self._group
        self._remove_group()
        group = self._ray.util.placement_group([self._resources()] * self.world_size, strategy="PACK")
        if not group.wait(self._placement_limit_s):
            self._ray.util.remove_placement_group(group)
            raise self._no_capacity(f"the cluster has {self._ray.cluster_resources()}")
        self._is_group_ours = True
        return group

    @property
    def _placement_limit_s(self) -> float:
        return self._limits.placement_s if self._num_starts == 1 else self._limits.replacement_s

    def _require_capacity(self) -> None:
        """After a loss, do not wait for capacity that the remaining nodes do not have."""
        available = self._ray.cluster_resources()
        if self._num_starts > 1 and any(
            available.get(name, 0) < amount * self.world_size for name, amount in self._resources().items()
        ):
            raise self._no_capacity(f"the remaining nodes have {available}")

    def _no_capacity(self, available: str) -> StartError:
        wanted = f"{self.world_size} ranks with {self._resources()} each"
        message = f"Ray has no capacity for {wanted} within {self._placement_limit_s:g} s; {available}"
        return StartError("spawn", self.world_size - 1, message, is_retryable=True)

    def _resources(self) -> dict[str, float]:
        """Return the resources of one rank: with a GPU if the cluster has any and the ranks may use it."""
        has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0 and self._config.device != "cpu"
        return {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}

    def _make_actor(self, index: int) -> Any:
        """Make an actor in this bundle of our group, or in any free bundle of the caller's group."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        resources = self._resources()
        bundle = index if self._is_group_ours else _ANY_BUNDLE
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor_class = self._ray.remote(RankActor).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=place,
            runtime_env={
                "env_vars": {
                    "PYTHONPATH": python_path(),
                    FORMAT_VARIABLE: os.environ.get(FORMAT_VARIABLE, "text"),
                    **_FULL_PRIORITY,
                }
            },
        )
        return actor_class.remote()

    def _start_rank(self, rank: int, actor: Any, host: str, pid: int, channel: Channel) -> RayRank:
        assert channel.keys is not None
        options = RankOptions(
            address=channel.address, identity=channel.identity(rank), log_level=self._log_level, keys=channel.keys
        )
        exit_status = actor.serve.remote(self._worker_module, msgspec.json.encode(options))
        logger.info("rank %d is process %d on %s", rank, pid, host)
        return RayRank(self._ray, rank, host, pid, actor, exit_status, channel)

    def _rendezvous(self) -> str:
        return f"tcp://{self._rendezvous_address}" if self.world_size > 1 else ""

    # --- end ---

    def shutdown(self) -> None:
        """Leaves a cluster that existed before as it was."""
        super().shutdown()
        if self._ray is not None:
            self._remove_group()
        if self._local is not None:
            self._local.stop()
        elif self._is_connection_ours:
            self._ray.shutdown()
        self._ray, self._local, self._is_connection_ours = None, None, False

    def _remove_group(self) -> None:
        if self._group is not None and self._is_group_ours:
            self._ray.util.remove_placement_group(self._group)
        self._group, self._is_group_ours = None, False


def _connect(ray: Any, address: str) -> None:
    try:
        if _HOST_AND_PORT.fullmatch(address) and not does_answer(address):
            raise ConnectionError("no server listens there")
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        message = f"Ray at {address} can't be joined: {error}; start it, or correct RAY_ADDRESS"
        raise StartError("spawn", 0, message, is_retryable=True) from error
