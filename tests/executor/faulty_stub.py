"""The stub with faults: `worker_module="tests.executor.faulty_stub"`.

The option `model` may also have faults, ACTION-at-PLACE. Actions are `die`, `raise`, `hang`, `stop` (SIGSTOP), `exit` (with
status 0) and `oom` (out of memory; in a step after the plan's sequences were added). Places are a step, as in
`hang-at-step=3`, and `import`, `device`, `start` (the phase load_model), `kv-pool`, `sleep`, `wake-up` and `shutdown`, as in
`die-at-start`. Other options:

    on-rank=R             only rank R has the fault
    once=PATH             the fault occurs if PATH does not exist, and makes PATH
    never-start-rank=R    rank R dies in every start, unless it is the only one, or the file of `unless=PATH` exists
    lacks-blocks=N        N fewer blocks fit
    window=W              the model has one group of layers with this window; with on-rank=R, on that rank only
    barrier=DIR           the ranks wait for each other in every step, as in collectives
    weights=PATH          the file of the weights
    count-loading=DIR     records in DIR how many ranks load at the same time, in the start and in `wake_up`
    idle-parts=N          there are N parts of idle work, of a millisecond each
    idle-done=DIR         records in DIR which ranks have done all of it

A grammar is the path of a file, and compiled once that exists.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from millrace.executor.rank.serve import serve_rank
from millrace.executor.wire.messages import ModelFacts, StepPlan, WorkerConfig
from tests.executor.stub import OutOfMemoryError, StubWorker


def create_worker(rank: int, world_size: int, epoch: int, config: WorkerConfig, rendezvous: str) -> FaultyStub:
    worker = FaultyStub(epoch, config, rank, world_size)
    worker.fault_at("import")
    return worker


class FaultyStub(StubWorker):
    """A stub that fails where its options say."""

    _grammars: tuple[tuple[int, Path], ...] = ()
    """Those that are not compiled, with their numbers."""
    _num_idle_parts = 0
    """Done so far."""

    def start(self, on_phase: Callable[[str], None]) -> ModelFacts:
        facts = replace(super().start(on_phase), weights_checksum=self._read_weights())
        if "window" in self._faults and self._faults.get("on-rank", self._rank) == self._rank:
            return replace(facts, kv_layout=replace(facts.kv_layout, windows=(self._faults["window"],)))
        return facts

    def determine_num_available_blocks(self) -> tuple[int, int]:
        num_blocks, num_host_blocks = super().determine_num_available_blocks()
        is_short = self._faults.get("on-rank", self._rank) == self._rank
        return num_blocks - is_short * self._faults.get("lacks-blocks", 0), num_host_blocks

    @property
    def has_idle_work(self) -> bool:
        return self._num_blocks > 0 and self._num_idle_parts < self._faults.get("idle-parts", 0)

    def do_idle_work(self) -> None:
        time.sleep(0.001)
        self._num_idle_parts += 1
        if not self.has_idle_work and "idle-done" in self._faults:
            Path(self._faults["idle-done"], f"{self._rank}").touch()

    def compile_grammar(self, number: int, grammar: str) -> None:
        self._grammars = (*self._grammars, (number, Path(grammar)))

    @property
    def last_compiled(self) -> int:
        while self._grammars and self._grammars[0][1].exists():
            (self._last_compiled, _), *others = self._grammars
            self._grammars = tuple(others)
        return self._last_compiled

    def wake_up(self, tags: list[str], epoch: int, new_weights: str | None = None) -> int:
        is_reading = self._is_on_disk and "weights" in tags
        super().wake_up(tags, epoch, new_weights)
        if is_reading:
            self._count_loading()
        return self._read_weights()

    def fault_at(self, place: str, when: object = True) -> None:
        for action in _ACTIONS if place == "step" else (*_ACTIONS, "oom"):
            if self._has_fault(f"{action}-at-{place}", when):
                if place in ("import", "device", "start"):
                    time.sleep(_SEND_S)
                act(action)
        if place == "start":
            self._die_in_start()
            self._count_loading()

    def _has_fault(self, fault: str, when: object) -> bool:
        wanted = self._faults.get(fault)
        if wanted is None or wanted != when or self._faults.get("on-rank", self._rank) != self._rank:
            return False
        return self._is_first_time()

    def _wait_for_ranks(self, plan: StepPlan) -> None:
        if "barrier" in self._faults:
            place = Path(self._faults["barrier"]) / f"{plan.epoch}-{plan.step_id}"
            place.mkdir(exist_ok=True)
            (place / str(self._rank)).touch()
            while len(list(place.iterdir())) < self._world_size:
                time.sleep(0.001)

    def _die_in_start(self) -> None:
        may_start = Path(str(self._faults.get("unless"))).exists()
        if self._faults.get("never-start-rank") == self._rank and self._world_size > 1 and not may_start:
            os.kill(os.getpid(), signal.SIGKILL)

    def _read_weights(self) -> int:
        path = self._faults.get("weights")
        return 0 if path is None else zlib.crc32(Path(path).read_bytes()) + self._rank

    def _count_loading(self) -> None:
        directory = self._faults.get("count-loading")
        if directory is None:
            return
        mark = Path(directory) / f"loading-{self._rank}"
        mark.touch()
        time.sleep(0.1)
        num_loading = len(list(Path(directory).glob("loading-*")))
        (Path(directory) / f"seen-{self._rank}-{num_loading}").touch()
        mark.unlink()

    def _is_first_time(self) -> bool:
        once = self._faults.get("once")
        if once is None:
            return True
        if Path(str(once)).exists():
            return False
        Path(str(once)).touch()
        return True


_SEND_S = 0.2
"""For ZeroMQ's thread to send the message that the phase has begun, before the process ends."""

_ACTIONS = ("die", "raise", "hang", "stop", "exit")


def act(action: str) -> None:
    match action:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
        case "exit":
            os._exit(0)
        case "oom":
            raise OutOfMemoryError("the stub has no memory")
        case _:
            raise RuntimeError("the stub was told to raise")


if __name__ == "__main__":
    sys.exit(serve_rank(create_worker))
