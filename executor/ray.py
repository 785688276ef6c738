"""`RayExecutor`: Ray places the ranks, on several hosts if need be, starts and watches them. Everything else is as ever.

Ray is asked for a placement group with one bundle for each rank, packed by host, and for one actor in each bundle. An actor
does two things: it says where it is, and then it becomes a rank, which dials back over ZeroMQ with CURVE keys. That second
call ends only when the rank does, so its end is how the rank's is noticed, whether the process, the node or Ray was lost.
Nothing of ours is pickled but the actor's arguments: strings and numbers.

Ray 2.60 or later of version 2. Without a cluster a local Ray is started, on the loopback interface alone, and stopped again.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from executor.channel import Channel
from executor.errors import StartError
from executor.failures import describe_exit, is_retryable_exit
from executor.messages import DumpStacks, WorkerConfig
from executor.process import End, python_path
from executor.rank import Invitation, accept
from executor.remote import RemoteExecutor
from executor.select import num_visible_gpus

logger = logging.getLogger("millrace.executor")

_PLACEMENT_LIMIT_S = 120.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has a local Ray listen on 127.0.0.1 and nowhere else; must be there before `import ray`."""


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
        if not is_joined and not _is_cluster_known():
            self._local = LocalRay(self.world_size)
        self._ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
        if self._local is not None:
            self._local.start(self._ray)
        elif not is_joined:
            self._ray.init(address="auto", log_to_driver=False, logging_level="ERROR")

    def _launch(self, channel: Channel) -> list[RayRank]:
        self._group = self._place()
        actors = [self._make_actor(rank) for rank in range(self.world_size)]
        assert channel.keys is not None
        try:
            places = self._ray.get([actor.introduce.remote() for actor in actors], timeout=_PLACEMENT_LIMIT_S)
        except Exception as error:
            for actor in actors:
                self._ray.kill(actor)
            raise StartError("spawn", 0, f"Ray did not start the ranks: {error}", is_retryable=True) from error
        self._rendezvous_address = places[0][0]
        pids = [pid for _, pid in places]
        return [
            self._invite(rank, actor, pid, channel) for rank, (actor, pid) in enumerate(zip(actors, pids, strict=True))
        ]

    def _place(self) -> Any:
        """The placement group that this process runs in, else one of our own."""
        group = self._ray.util.get_current_placement_group()
        if group is not None:
            return group
        if self._group is not None and len(self._group.bundle_specs) == self.world_size:
            return self._group
        self._give_back_group()
        group = self._ray.util.placement_group([self._resources()] * self.world_size, strategy="PACK")
        self._is_group_ours = True
        if not group.wait(_PLACEMENT_LIMIT_S):
            self._ray.util.remove_placement_group(group)
            wanted, there = [self._resources()] * self.world_size, self._ray.cluster_resources()
            message = f"Ray has no room for {wanted} within {_PLACEMENT_LIMIT_S:g} s; the cluster has {there}"
            raise StartError("spawn", 0, message, is_retryable=True)
        return group

    def _resources(self) -> dict[str, float]:
        """Of one rank. A GPU where the cluster has any and the ranks may use them."""
        has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0 and self._config.device != "cpu"
        return {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}

    def _make_actor(self, rank: int) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        resources = self._resources()
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        actor_class = self._ray.remote(RankActor).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=place,
            runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
        )
        return actor_class.remote()

    def _invite(self, rank: int, actor: Any, pid: int, channel: Channel) -> RayRank:
        invitation = Invitation(
            address=channel.address,
            identity=channel.identity(rank),
            log_level=self._log_level,
            keys=channel.keys,
        )
        ending = actor.serve.remote(self._worker_module, msgspec.json.encode(invitation))
        return RayRank(self._ray, rank, pid, actor, ending, channel)

    def _rendezvous(self) -> str:
        return f"tcp://{self._rendezvous_address}" if self.world_size > 1 else ""

    # --- life ---

    def shutdown(self) -> None:
        super().shutdown()
        if self._ray is None:
            return
        self._give_back_group()
        if self._local is not None:
            self._local.stop(self._ray)
            self._local = None
        self._ray = None

    def _give_back_group(self) -> None:
        if self._group is not None and self._is_group_ours:
            self._ray.util.remove_placement_group(self._group)
        self._group, self._is_group_ours = None, False

    def worker_pids(self) -> list[int]:
        """Process ids in rank order, each on the rank's own host."""
        return [rank.pid for rank in self._handles if isinstance(rank, RayRank)]


class RankActor:
    """What Ray starts: a process that becomes a rank."""

    def introduce(self) -> tuple[str, int]:
        """("host:port" for the rendezvous of the ranks should this be rank 0, process id)."""
        host = importlib.import_module("ray.util").get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}", os.getpid()

    def serve(self, worker_module: str, invitation: bytes) -> int:
        """Be a rank until the end; returns the exit status that a process of its own would have."""
        create_worker = importlib.import_module(worker_module).create_worker
        return accept(msgspec.json.decode(invitation, type=Invitation), create_worker)


class RayRank:
    """One actor, and the thread that waits for the end of its never-ending call. Implements `RankHandle`."""

    def __init__(self, ray: Any, rank: int, pid: int, actor: Any, ending: Any, channel: Channel) -> None:
        self.rank = rank
        self.pid = pid
        self._ray = ray
        self._actor = actor
        self._ending = ending
        self._channel = channel
        self._end: End | None = None
        self._has_ended = threading.Event()
        self._event_fd = os.eventfd(0)
        self._watcher = threading.Thread(target=self._watch, name=f"ray-rank-{rank}", daemon=True)
        self._watcher.start()

    def __repr__(self) -> str:
        return f"RayRank(rank={self.rank}, end={self._end})"

    def _watch(self) -> None:
        try:
            status = self._ray.get(self._ending)
            self._end = End(describe_exit(status), is_killed=False, is_retryable=is_retryable_exit(status))
        except Exception as error:  # the actor, its node or Ray itself is gone
            self._end = End(f"lost by Ray: {_first_line(error)}", is_killed=True, is_retryable=True)
        self._has_ended.set()
        os.eventfd_write(self._event_fd, 1)

    def fileno(self) -> int:
        return self._event_fd

    def end(self) -> End | None:
        return self._end

    def dump_stacks(self) -> None:
        self._channel.send_to_heart(self.rank, DumpStacks())

    def wait(self, timeout_s: float) -> bool:
        return self._has_ended.wait(timeout_s)

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def close(self) -> None:
        self.kill()  # its rank has ended; the process that it ran in goes as well
        self._watcher.join()
        os.close(self._event_fd)


class LocalRay:
    """Owns a Ray on this host for this process alone: on the loopback interface, with a token that only this user reads."""

    def __init__(self, num_cpus: int) -> None:
        """Before `import ray`, which reads the environment."""
        self._num_cpus = num_cpus
        self._directory = tempfile.mkdtemp(prefix="mr-ray-", dir="/tmp")  # Ray's socket paths are long already
        token = Path(self._directory, "token")
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(_LOOPBACK_ONLY)
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def start(self, ray: Any) -> None:
        began_s = time.monotonic()
        ray.init(
            address="local",
            num_cpus=self._num_cpus,
            num_gpus=num_visible_gpus() or 0,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=80 << 20,
            _temp_dir=self._directory,
        )
        logger.info(
            "started a local Ray in %.1f s; ranks on several hosts need RAY_ADDRESS", time.monotonic() - began_s
        )

    def stop(self, ray: Any) -> None:
        ray.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)


def _is_cluster_known() -> bool:
    started_here = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    return "RAY_ADDRESS" in os.environ or started_here.exists()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
