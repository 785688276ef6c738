"""The other ranks of this model, and all that is said between them. Tensors only: nothing is ever pickled.

Tensors of the GPU travel over NCCL, those of the CPU over gloo; one process group speaks both. Between two ranks
the messages of one direction arrive in the order in which they were sent, and of each direction there is one kind:

    stage s -> stage s + 1      activations [1, T, H]
    last stage -> stage s       sampled ids [M], on the host
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from millrace.worker.errors import RendezvousError
from millrace.worker.parallel.topology import Topology

logger = logging.getLogger("millrace.worker")

MEETING_LIMIT = timedelta(minutes=5)
"""How long a rank waits for the others at the start."""
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
LOOPBACK_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Set, where nobody set them, when the ranks meet on this machine: then nothing listens to the network."""


class Peers:
    """Owns the process groups of this rank, and the sends that are under way."""

    def __init__(self, topology: Topology, device: torch.device, rendezvous: str) -> None:
        """Meet the others; returns when all of them are there. Raises `RendezvousError`."""
        self.topology = topology
        self._sends: dict[int, list[tuple[dist.Work, Tensor]]] = {}
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=_open_store(topology, rendezvous),
                rank=topology.rank,
                world_size=topology.world_size,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise RendezvousError(
                f"rank {topology.rank} of {topology.world_size} did not meet the others at {rendezvous!r}: {error}"
            ) from error
        self._stage_group = self._make_stage_groups()
        self._is_rehearsal = False
        logger.info("%r is connected", topology)

    # --- between the ranks of a stage ---

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place."""
        if self._is_rehearsal:
            return tensor
        dist.all_reduce(tensor, group=self._stage_group)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors, which have one shape, in rank order."""
        if self._is_rehearsal:
            return [tensor] * self.topology.tp_size
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.topology.tp_size)]
        dist.all_gather(parts, tensor, group=self._stage_group)
        return parts

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Meanwhile nothing is sent, and each rank takes the others' tensors to be like its own: the shapes are right."""
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    # --- between stages, from each rank to those at its own place in them ---

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send without waiting, but for what was sent to that stage before."""
        for work, _ in self._sends.get(stage, []):
            work.wait()
        self._sends[stage] = [(_started(dist.isend(tensor, self._rank_in(stage))), tensor)]

    def finish_sends(self) -> None:
        """Wait for what was sent, and let go of it."""
        for sent in self._sends.values():
            for work, _ in sent:
                work.wait()
        self._sends.clear()

    def receive(self, tensor: Tensor, stage: int) -> Tensor:
        """Fill a tensor with what the stage sends next."""
        self.expect(tensor, stage).wait()
        return tensor

    def expect(self, tensor: Tensor, stage: int) -> dist.Work:
        """Like `receive`, but the tensor is filled when the returned work is done."""
        return _started(dist.irecv(tensor, self._rank_in(stage)))

    def close(self) -> None:
        """Leave. The others fail if they still wait for this rank."""
        self._sends.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _rank_in(self, stage: int) -> int:
        return self.topology.rank_of(stage, self.topology.tp_rank)

    def _make_stage_groups(self) -> dist.ProcessGroup | None:
        """This rank's own. Every rank has to make all of them, in the same order. None stands for all ranks."""
        topology = self.topology
        if topology.pp_size == 1 or topology.tp_size == 1:
            return None
        members = [[topology.rank_of(stage, i) for i in range(topology.tp_size)] for stage in range(topology.pp_size)]
        groups = [dist.new_group(ranks) for ranks in members]
        return groups[topology.stage]


def _open_store(topology: Topology, rendezvous: str) -> TCPStore:
    """Where the ranks leave their addresses for each other. Rank 0 serves it, at the named address only: left to itself,
    torch would listen on every network interface."""
    url = urlsplit(rendezvous)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError("it has to look like tcp://127.0.0.1:29500")
    if url.hostname in LOOPBACK_HOSTS:
        for variable, interface in LOOPBACK_INTERFACES.items():
            os.environ.setdefault(variable, interface)
    listener = None
    if topology.rank == 0:
        family = socket.AF_INET6 if ":" in url.hostname else socket.AF_INET
        listener = socket.create_server((url.hostname, url.port), family=family).detach()
    return TCPStore(
        url.hostname, url.port, topology.world_size, topology.rank == 0, MEETING_LIMIT, master_listen_fd=listener
    )


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
