"""The stub with errors of a real device: `worker_module="tests.executor.fragile_worker"`.

It has these faults in `model`, besides those of the stub:

    lose-device          every step, check and shutdown fails, as in torch after a sticky error; a rank aborts where it
                         frees pinned memory then
    memory-at-start=PATH the start runs out of memory if PATH does not exist, and makes PATH
    memory-at-step=N     step N runs out of memory deep in a forward pass
    fewest-ranks=N       the start fails with fewer than N ranks
    lose-gpu=PATH        the first start has a GPU and makes PATH; if PATH exists there is no GPU
    lose-stats           `stats` fails after the first step
    lose-peer=DIR        of two ranks the second dies in its first step, just after the first has reported its loss
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from millrace.executor.rank.serve import serve_rank
from millrace.executor.wire.messages import ModelFacts, StepPlan, WorkerConfig
from tests.executor.faulty_stub import FaultyStub
from tests.executor.stub import OutOfMemoryError

LOST_PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


class AcceleratorError(RuntimeError):
    """Has the name of torch's class."""


class ModelError(RuntimeError):
    """Has the name of the worker's class."""


class DeviceError(RuntimeError):
    """Has the name of the worker's class."""


class Activations:
    """Stands for what a step allocates."""

    alive: ClassVar[weakref.WeakSet[Activations]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


class PinnedMemory:
    """Stands for memory that a lost GPU has used. torch ends the process when it is freed; in a test's own process that is
    counted."""

    num_freed: ClassVar[int] = 0

    def __del__(self) -> None:
        type(self).num_freed += 1  # the module's names are gone at the end of a process
        if __name__ == "__main__":
            os.abort()


class FragileWorker(FaultyStub):
    _pinned: PinnedMemory | None = None

    def start(self, on_phase: Callable[[str], None]) -> ModelFacts:
        mark = self._faults.get("memory-at-start")
        if mark is not None and not Path(mark).exists():
            Path(mark).touch()
            self._run_forward()
        if self._world_size < self._faults.get("fewest-ranks", 0):
            raise ModelError(f"the model does not fit on {self._world_size}")
        facts = super().start(on_phase)
        return replace(facts, device=self._choose_device()) if "lose-gpu" in self._faults else facts

    def _choose_device(self) -> str:
        """Choose like the real worker: with "auto" a GPU or the CPU."""
        mark = Path(self._faults["lose-gpu"])
        if not mark.exists():
            mark.touch()
            return "cuda:0"
        if self._config.device == "auto":
            return "cpu"
        raise DeviceError(f"torch sees no GPU for {self._config.device}")

    def launch(self, plan: StepPlan) -> None:
        self._touch_device()
        if self._num_steps + 1 == self._faults.get("memory-at-step"):
            self._num_steps += 1
            self._run_forward()
        if "lose-peer" in self._faults:
            self._lose_peer(Path(self._faults["lose-peer"]))
        super().launch(plan)

    def check_health(self) -> None:
        self._touch_device()

    def stats(self) -> dict[str, Any]:
        if "lose-stats" in self._faults and self._num_steps > 0:
            raise AcceleratorError("CUDA error: unknown error")
        return super().stats()

    def shutdown(self) -> None:
        self._touch_device()

    def _touch_device(self) -> None:
        if "lose-device" in self._faults:
            self._pinned = self._pinned or PinnedMemory()
            self._lose_device(PinnedMemory())

    def _lose_device(self, _of_the_step: PinnedMemory) -> None:
        raise AcceleratorError("CUDA error: an illegal memory access was encountered")

    def _run_forward(self) -> None:
        """Wrap an error as the worker does with one of a library. The frames of the first error hold what it allocated."""
        try:
            self._run_layer()
        except OutOfMemoryError as error:
            raise OutOfMemoryError(f"in the first layer: {error}") from error

    def _run_layer(self) -> None:
        activations = Activations()
        raise OutOfMemoryError(f"CUDA out of memory beside {type(activations).__name__}")

    def _lose_peer(self, place: Path) -> None:
        if self._rank == 0:
            (place / "lost").touch()
            raise RuntimeError(LOST_PEER)
        while not (place / "lost").exists():
            time.sleep(0.01)
        time.sleep(0.1)  # as a dying process's connections close before its end is known
        os.kill(os.getpid(), signal.SIGKILL)


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> FragileWorker:
    return FragileWorker(epoch, config, rank, world_size)


if __name__ == "__main__":
    sys.exit(serve_rank(create_worker))
