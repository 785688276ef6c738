"""`MultiprocExecutor`: one process per rank on this host, over ZeroMQ. It survives the death of its workers."""

from __future__ import annotations

import os
from typing import Any

from millrace.executor.launch.process import WorkerProcess, close_all, kill_all
from millrace.executor.remote import RemoteExecutor, is_of_system
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import WorkerConfig


class MultiprocExecutor(RemoteExecutor):
    """Owns the worker processes. They end when this process ends."""

    name = "mp"
    can_restart = True
    can_resize = True

    def __init__(self, config: WorkerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._devices = visible_devices(self.world_size)
        """Devices that the present ranks may use, in rank order."""
        self._lost_devices: list[str] = []
        """Devices of ranks that did not start since all ranks did, in the order of their loss."""

    def resize(self, tensor_parallel_size: int, pipeline_parallel_size: int, *, lost_rank: int | None = None) -> None:
        lost = [] if lost_rank is None else self._devices[lost_rank : lost_rank + 1]
        super().resize(tensor_parallel_size, pipeline_parallel_size)
        self._lost_devices = [name for name in self._lost_devices if name not in lost] + lost
        self._devices = visible_devices(self._wanted_world_size)
        if self.world_size < self._wanted_world_size:
            good = [name for name in self._devices if name not in self._lost_devices]
            self._devices = (good + self._lost_devices)[: max(len(good), self.world_size)]

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        super().initialize_cache(num_device_blocks, num_host_blocks)
        if self.world_size == self._wanted_world_size:
            self._lost_devices.clear()  # all ranks run again

    def begin_start(self) -> None:
        self._devices = visible_devices(self.world_size)  # they may have been chosen meanwhile
        try:
            self._launch_all()
        except BaseException as error:
            self._discard_workers()
            if not is_of_system(error):
                raise

    def _open_channel(self) -> Channel:
        return Channel(self._num_starts, self.world_size, self._recorder)

    def _launch(self, channel: Channel) -> list[WorkerProcess]:
        processes: list[WorkerProcess] = []
        try:
            for rank in range(self.world_size):
                identity = channel.identity(rank)
                where = (self._worker_module, channel.address, identity, self._log_level)
                processes.append(WorkerProcess(rank, *where, environment=self._environment()))
        except BaseException:
            kill_all(processes)
            close_all(processes)
            raise
        return processes

    def _environment(self) -> dict[str, str]:
        """Return the variables for all ranks: the remaining devices, if there are fewer ranks than wanted."""
        if self.world_size == self._wanted_world_size:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._devices)}


def visible_devices(world_size: int) -> list[str]:
    """Return the names of the GPUs that ranks use in this order. Without meaning on a host without GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named is not None else [str(rank) for rank in range(world_size)]
