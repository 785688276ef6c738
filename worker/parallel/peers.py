"""Communication with the other ranks of a model. Tensors only: nothing is pickled.

GPU tensors travel over NCCL, CPU tensors over gloo; one process group has both. Between two ranks messages arrive in
the order in which they were sent, and each direction has one kind of message:

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

RENDEZVOUS_LIMIT = timedelta(minutes=5)
"""How long a rank waits for the others at the start."""
MOST_GATHERED_BYTES = 64 << 10
"""Up to this size more than two ranks on CPUs gather their tensors, and each rank sums them. With 4 ranks that takes 0.7 of
the time of gloo's ring. Larger tensors, and two ranks, gain nothing. NCCL chooses by size itself."""
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
LOOPBACK_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Default environment when the ranks connect on this host: then no socket listens on the network."""


class Peers:
    """Owns the process groups of this rank, and the tensors of unfinished sends."""

    def __init__(
        self, topology: Topology, device: torch.device, rendezvous: str, *, sums_in_order: bool = False
    ) -> None:
        """Connect to the others, and return when all are connected. Raises `RendezvousError`.

        `sums_in_order`: add in the order of the ranks. Without it the order of more than two depends on the size and the
        place in the tensor."""
        self.topology = topology
        self._sums_in_order = sums_in_order and topology.tp_size > 2
        self._sends: dict[int, tuple[dist.Work, Tensor]] = {}
        """The last send to each stage."""
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=_open_store(topology, rendezvous),
                rank=topology.rank,
                world_size=topology.world_size,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise RendezvousError(
                f"rank {topology.rank} of {topology.world_size} cannot connect to the others at {rendezvous!r} ({error}): "
                "check that the address is free and that all ranks reach it"
            ) from error
        self._stage_group = self._make_stage_groups()
        self._is_dry_run = False
        logger.info("%r is connected", topology)

    # --- between the ranks of a stage ---

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the tensors of all ranks, in place."""
        if self._is_dry_run:
            return tensor
        is_small = self.topology.tp_size > 2 and tensor.is_cpu and tensor.nbytes <= MOST_GATHERED_BYTES
        if self._sums_in_order or is_small:
            first, *others = self.all_gather(tensor)
            tensor.copy_(first)
            for each in others:
                tensor += each
            return tensor
        dist.all_reduce(tensor, group=self._stage_group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape, in rank order."""
        if self._is_dry_run:
            return [tensor] * self.topology.tp_size
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.topology.tp_size)]
        dist.all_gather(parts, tensor, group=self._stage_group)
        return parts

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[None]:
        """Inside, nothing is sent: results have the right shapes, and values of this rank only."""
        self._is_dry_run = True
        try:
            yield
        finally:
            self._is_dry_run = False

    # --- between stages, with the rank that has the same tp_rank ---

    def send(self, tensor: Tensor, stage: int) -> None:
        """Start to send a tensor, after the previous send to that stage has finished."""
        if stage in self._sends:
            self._sends[stage][0].wait()
        self._sends[stage] = (_started(dist.isend(tensor, self._rank_in(stage))), tensor)

    def finish_sends(self) -> None:
        """Wait for all sends, and release their tensors."""
        for work, _ in self._sends.values():
            work.wait()
        self._sends.clear()

    def receive(self, tensor: Tensor, stage: int) -> dist.Work:
        """Start to receive the stage's next tensor into `tensor`. It is filled when the returned work is done."""
        return _started(dist.irecv(tensor, self._rank_in(stage)))

    def close(self) -> None:
        """Leave the process groups. Ranks that still wait for this one fail."""
        self._sends.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _rank_in(self, stage: int) -> int:
        return self.topology.rank_of(stage, self.topology.tp_rank)

    def _make_stage_groups(self) -> dist.ProcessGroup | None:
        """Make the groups of all stages, as every rank has to, in order. Return this stage's; None is all ranks."""
        topology = self.topology
        if topology.pp_size == 1 or topology.tp_size == 1:
            return None
        members = [[topology.rank_of(stage, i) for i in range(topology.tp_size)] for stage in range(topology.pp_size)]
        groups = [dist.new_group(ranks) for ranks in members]
        return groups[topology.stage]


def _open_store(topology: Topology, rendezvous: str) -> TCPStore:
    """Open the store in which the ranks find each other's addresses. Rank 0 serves it, and listens at the given address
    only; torch's default is all network interfaces."""
    url = urlsplit(rendezvous)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError("it must look like tcp://127.0.0.1:29500")
    if url.hostname in LOOPBACK_HOSTS:
        for variable, interface in LOOPBACK_INTERFACES.items():
            os.environ.setdefault(variable, interface)
    listener = None
    if topology.rank == 0:
        family = socket.AF_INET6 if ":" in url.hostname else socket.AF_INET
        listener = socket.create_server((url.hostname, url.port), family=family).detach()
    return TCPStore(
        url.hostname, url.port, topology.world_size, topology.rank == 0, RENDEZVOUS_LIMIT, master_listen_fd=listener
    )


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
