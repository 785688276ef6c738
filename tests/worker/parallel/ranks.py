"""Ranks in their own processes, started once. Tests use them for one group of ranks after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from millrace.executor.wire.messages import ModelFacts, StepPlan, StepResult, WorkerConfig
from millrace.worker.rank import Rank
from tests.worker.driver import BLOCK_SIZE, NUM_BLOCKS

REPLY_LIMIT_S = 60.0


class RankFailed(Exception):
    """Raised when a rank answers a call with an error."""

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}")
        self.kind = kind


class RankProcesses:
    """Owns the processes. Each has at most one rank at a time."""

    def __init__(self, count: int, start_method: str = "forkserver") -> None:
        context: Any = multiprocessing.get_context(start_method)
        context.set_forkserver_preload([__name__])  # torch is imported once, for all of them
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    @contextlib.contextmanager
    def group(self, model: Path, tp: int = 1, pp: int = 1, **options: Any) -> Iterator[RankGroup]:
        """Ranks for one model, started and with their KV pools."""
        settings: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "max_num_seqs": 4,
            "device": "cpu",
        } | options
        config = WorkerConfig(model=str(model), tensor_parallel_size=tp, pipeline_parallel_size=pp, **settings)
        connections = self._connections[: tp * pp]
        group = RankGroup(connections, (pp - 1) * tp, [])
        rendezvous = f"tcp://127.0.0.1:{_free_port()}"
        try:
            for rank, connection in enumerate(connections):
                connection.send(("create", (rank, len(connections), 1, config, rendezvous)))
            group.facts = group.replies()
            group.call("initialize_cache", settings["num_blocks"], 0)
            yield group
        finally:
            group.call("shutdown")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()


@dataclass
class RankGroup:
    """The ranks of one model. Steps like a single worker."""

    connections: list[Connection]
    output_rank: int
    facts: list[ModelFacts]

    def launch(self, plan: StepPlan) -> None:
        self.send("launch", plan)
        self.send("collect")

    def collect(self) -> StepResult:
        self.replies()
        results: list[StepResult] = self.replies()
        for rank, result in enumerate(results):
            assert rank == self.output_rank or not (result.token_ids or result.failures)
        return results[self.output_rank]

    def call(self, method: str, *args: Any) -> list[Any]:
        """The results of all ranks, in order."""
        self.send(method, *args)
        return self.replies()

    def send(self, method: str, *args: Any) -> None:
        for connection in self.connections:
            connection.send((method, args))

    def replies(self) -> list[Any]:
        replies = [self._reply(rank, connection) for rank, connection in enumerate(self.connections)]
        for reply in replies:
            if isinstance(reply, RankFailed):
                raise reply
        return replies

    def _reply(self, rank: int, connection: Connection) -> Any:
        assert connection.poll(REPLY_LIMIT_S), f"rank {rank} does not answer"
        outcome, value = connection.recv()
        return value if outcome == "ok" else RankFailed(rank, *value)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    rank: Rank | None = None
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            if method == "create":
                rank = Rank(*args)
                result: Any = rank.start(lambda _: None)
            elif method == "inspect":
                result = args[0](rank)
            else:
                result = getattr(rank, method)(*args)
            connection.send(("ok", result))
        except Exception as error:
            connection.send(("error", (type(error).__name__, str(error))))


def _free_port() -> int:
    """Return one below those that the kernel gives to others, so that none of them takes it before the ranks do."""
    while True:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
