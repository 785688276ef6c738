"""`RayExecutor`: Ray places the ranks, on several hosts if need be, starts and watches them. Everything else is as ever.

Ray is asked for a placement group with one bundle for each rank, packed by host, and for one actor in each bundle. An actor
does two things: it says where it is, and then it becomes a rank, which dials back over ZeroMQ with CURVE keys. That second
call ends only when the rank does, so its end is how the rank's is noticed, whether the process, the node or Ray was lost.
Nothing of ours is pickled but the actor's arguments and what it says of its place: strings, bytes and numbers.

Ray 2.60 or later of version 2. Without a cluster a local Ray is started, on the loopback interface alone, and stopped again.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import time
from typing import Any

import msgspec

from millrace.executor.errors import StartError
from millrace.executor.launch.devices import num_visible_gpus
from millrace.executor.launch.process import python_path
from millrace.executor.launch.ray_cluster import LocalRay, does_answer, known_address
from millrace.executor.launch.ray_rank import RankActor, RayRank
from millrace.executor.rank.serve import Invitation
from millrace.executor.remote import RemoteExecutor
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import WorkerConfig

logger = logging.getLogger("millrace.executor")

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


_ANY_BUNDLE = -1
_HOST_AND_PORT = re.compile(r"[^/]+:\d+")


class RayExecutor(RemoteExecutor):
    """Owns the placement group and the actors in it, and a local Ray where there was none."""

    name = "ray"
    can_restart = True
    can_resize = True

    def __init__(self, config: WorkerConfig, **options: Any) -> None:
        """Takes `worker_module`, `log_level` and `limits`."""
        super().__init__(config, **options)
        self._ray: Any = None
        self._local: LocalRay | None = None
        self._group: Any = None
        self._is_group_ours = False
        self._is_connection_ours = False
        """Whether we have joined the cluster, and not who uses us."""
        self._rendezvous_address = ""

    # --- placement ---

    def _open_channel(self) -> Channel:
        self._join()
        return Channel(self._num_starts, self.world_size, host=self._ray.util.get_node_ip_address())

    def _join(self) -> None:
        """Use the Ray that this process has joined, else the cluster that RAY_ADDRESS or this host names, else our own."""
        if self._ray is not None:
            return
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        is_joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        address = None if is_joined else known_address()
        if not is_joined and address is None:
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
            places = self._ask_for_places(actors)
        except StartError:
            for actor in actors:
                self._ray.kill(actor)
            raise
        here = self._ray.util.get_node_ip_address()
        # Ranks of one host stand together, those of this host first: ranks of one stage are to be neighbours.
        placed = sorted(zip(places, actors, strict=True), key=lambda one: (one[0][0] != here, one[0][0]))
        host, port, _ = placed[0][0]
        self._rendezvous_address = f"{host}:{port}"
        return [self._invite(rank, actor, host, pid, channel) for rank, ((host, _, pid), actor) in enumerate(placed)]

    def _ask_for_places(self, actors: list[Any]) -> list[tuple[str, int, int]]:
        """What each actor says of where it is; see `RankActor.introduce`. Until then a rank is known by its bundle."""
        introductions = [actor.introduce.remote() for actor in actors]
        deadline_s = time.monotonic() + self._placement_limit_s
        places = []
        for rank, introduction in enumerate(introductions):
            try:
                places.append(self._ray.get(introduction, timeout=max(0.0, deadline_s - time.monotonic())))
            except self._ray.exceptions.GetTimeoutError as error:
                raise self._no_room(f"the placement group has {self._group.bundle_specs}") from error
            except Exception as error:
                raise StartError("spawn", rank, f"Ray did not start it: {error}", is_retryable=True) from error
        return places

    def _place(self) -> Any:
        """The placement group that this process runs in, else one of our own."""
        group = self._ray.util.get_current_placement_group()
        if group is not None:
            return group
        self._require_nodes()
        if self._group is not None and len(self._group.bundle_specs) == self.world_size:
            return self._group
        self._give_back_group()
        group = self._ray.util.placement_group([self._resources()] * self.world_size, strategy="PACK")
        if not group.wait(self._placement_limit_s):
            self._ray.util.remove_placement_group(group)
            raise self._no_room(f"the cluster has {self._ray.cluster_resources()}")
        self._is_group_ours = True
        return group

    @property
    def _placement_limit_s(self) -> float:
        return self._limits.placement_s if self._num_starts == 1 else self._limits.replacement_s

    def _require_nodes(self) -> None:
        """After a loss, don't wait for room that the nodes that are left do not have."""
        there = self._ray.cluster_resources()
        if self._num_starts > 1 and any(
            there.get(name, 0) < amount * self.world_size for name, amount in self._resources().items()
        ):
            raise self._no_room(f"the nodes that are left have {there}")

    def _no_room(self, what_there_is: str) -> StartError:
        wanted = [self._resources()] * self.world_size
        message = f"Ray has no room for {wanted} within {self._placement_limit_s:g} s; {what_there_is}"
        return StartError("spawn", self.world_size - 1, message, is_retryable=True)

    def _resources(self) -> dict[str, float]:
        """Of one rank. A GPU where the cluster has any and the ranks may use them."""
        has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0 and self._config.device != "cpu"
        return {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}

    def _make_actor(self, index: int) -> Any:
        """One for each bundle of our group; in somebody else's, where there is room."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        resources = self._resources()
        bundle = index if self._is_group_ours else _ANY_BUNDLE
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor_class = self._ray.remote(RankActor).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=place,
            runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
        )
        return actor_class.remote()

    def _invite(self, rank: int, actor: Any, host: str, pid: int, channel: Channel) -> RayRank:
        assert channel.keys is not None
        invitation = Invitation(
            address=channel.address,
            identity=channel.identity(rank),
            log_level=self._log_level,
            keys=channel.keys,
        )
        ending = actor.serve.remote(self._worker_module, msgspec.json.encode(invitation))
        logger.info("rank %d is process %d on %s", rank, pid, host)
        return RayRank(self._ray, rank, host, pid, actor, ending, channel)

    def _rendezvous(self) -> str:
        return f"tcp://{self._rendezvous_address}" if self.world_size > 1 else ""

    # --- life ---

    def shutdown(self) -> None:
        """Leaves a cluster that was there before as it was."""
        super().shutdown()
        if self._ray is not None:
            self._give_back_group()
        if self._local is not None:
            self._local.stop()
        elif self._is_connection_ours:
            self._ray.shutdown()
        self._ray, self._local, self._is_connection_ours = None, None, False

    def _give_back_group(self) -> None:
        if self._group is not None and self._is_group_ours:
            self._ray.util.remove_placement_group(self._group)
        self._group, self._is_group_ours = None, False


def _connect(ray: Any, address: str) -> None:
    try:
        if _HOST_AND_PORT.fullmatch(address) and not does_answer(address):
            raise ConnectionError("nobody listens there")
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        message = f"Ray at {address} can't be joined: {error}; start it, or correct RAY_ADDRESS"
        raise StartError("spawn", 0, message, is_retryable=True) from error
