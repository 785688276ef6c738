"""The handshake of a start: Hello, Boot, phases, Ready, each with a time limit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from msgspec.structs import replace

from millrace.executor.errors import StartError
from millrace.executor.launch.process import RankHandle, dump_all
from millrace.executor.limits import Limits
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import (
    PROTOCOL,
    Beat,
    Boot,
    Failure,
    FromWorker,
    Go,
    Hello,
    ModelFacts,
    Phase,
    Ready,
    Stacks,
    StartFailed,
    WorkerConfig,
    encode,
)

logger = logging.getLogger("millrace.executor")

_CAUSE_S = 0.5
"""When one of several ranks fails, the cause may be the death of another: the engine waits this long to see that. It
waits as long for the last messages of a rank that has ended."""

_FOREVER = float("inf")


class Handshake:
    """Owns the state of each rank until all are ready."""

    def __init__(
        self,
        channel: Channel,
        handles: Sequence[RankHandle],
        config: WorkerConfig,
        limits: Limits,
        epoch: int,
        rendezvous: str,
    ) -> None:
        self._channel = channel
        self._handles = handles
        self._limits = limits
        self._max_loading = config.max_parallel_loading_workers or len(handles)
        world_size, has_queue = len(handles), self._max_loading < len(handles)
        self._boot = Boot(
            epoch=epoch, rank=0, world_size=world_size, config=config, rendezvous=rendezvous, has_to_queue=has_queue
        )
        self._queue: deque[int] = deque()
        """Ranks that wait until they may load the model."""
        self._loading: set[int] = set()
        self._phases = {handle.rank: "spawn" for handle in handles}
        self._deadlines_s = {handle.rank: time.monotonic() + limits.phase_s["spawn"] for handle in handles}
        self._entered_s = {handle.rank: time.monotonic() for handle in handles}
        self._durations: dict[int, list[str]] = {handle.rank: [] for handle in handles}
        """By rank: the phases that are over, as "import 0.52 s"."""
        self._heard_s: dict[int, float] = {}
        """By rank: when Hello or, after it, the last heartbeat came. Before Hello only the phase's limit applies."""
        self._has_heartbeat: set[int] = set()
        self._facts: dict[int, ModelFacts] = {}
        self._failed: StartError | None = None

    def run(self) -> list[ModelFacts]:
        """Block until every rank is ready and has a heartbeat. Returns the facts in rank order. Raises `StartError`."""
        while min(len(self._facts), len(self._has_heartbeat)) < len(self._handles):
            self._channel.wait(min(1.0, max(0.0, min(self._deadlines_s.values()) - time.monotonic())))
            self._receive()
            self._check_ranks()
        self._compare_layouts()
        return [self._facts[handle.rank] for handle in self._handles]

    def _receive(self) -> None:
        for rank, message in self._channel.receive():
            self._handle(rank, message)
        if len(self._heard_s.keys() & self._has_heartbeat) == len(self._handles):
            self._channel.remove_socket_file()  # both sockets of every rank are connected

    def _handle(self, rank: int, message: FromWorker) -> None:
        match message:
            case Hello(protocol=protocol):
                self._heard_s[rank] = time.monotonic()
                self._send_boot(rank, protocol)
            case Phase(name=name) if name in self._limits.phase_s:
                self._begin_phase(rank, name)
            case Ready(facts=facts):
                self._end_phase(rank)
                logger.info("rank %d is ready: %s", rank, ", ".join(self._durations[rank]))
                self._facts[rank] = facts
                self._deadlines_s[rank] = _FOREVER
                self._loading.discard(rank)
                self._let_next_load()
            case StartFailed(phase=phase, failure=failure):
                self._fail(phase, rank, failure)
            case Beat():
                self._has_heartbeat.add(rank)
                if rank in self._heard_s:
                    self._heard_s[rank] = time.monotonic()
            case Stacks(text):
                logger.error("the stacks of rank %d:\n%s", rank, text)
            case unexpected:
                logger.warning("ignored an unexpected message during the start: %r", unexpected)

    def _send_boot(self, rank: int, protocol: int) -> None:
        if protocol != PROTOCOL:
            message = f"the worker has protocol {protocol}, this engine {PROTOCOL}; install one version of Millrace"
            raise StartError("spawn", rank, message, is_retryable=False)
        self._channel.send(rank, encode(replace(self._boot, rank=rank)))

    # --- phases, and the queue for loading ---

    def _end_phase(self, rank: int) -> None:
        now_s = time.monotonic()
        self._durations[rank].append(f"{self._phases[rank]} {now_s - self._entered_s[rank]:.2f} s")
        self._entered_s[rank] = now_s

    def _begin_phase(self, rank: int, phase: str) -> None:
        self._end_phase(rank)
        self._phases[rank] = phase
        self._deadlines_s[rank] = time.monotonic() + self._limits.phase_s[phase]
        if phase == "load_model" and self._boot.has_to_queue:
            self._deadlines_s[rank] = _FOREVER
            self._queue.append(rank)
            self._let_next_load()

    def _let_next_load(self) -> None:
        while self._queue and len(self._loading) < self._max_loading:
            rank = self._queue.popleft()
            self._loading.add(rank)
            self._deadlines_s[rank] = time.monotonic() + self._limits.phase_s["load_model"]
            self._channel.send(rank, encode(Go()))

    # --- failures ---

    def _compare_layouts(self) -> None:
        """Check that a block table means the same on every rank. It does not where hosts have other files of the model."""
        expected = self._facts[0].kv_layout
        for rank, facts in sorted(self._facts.items()):
            for name in expected.__struct_fields__:
                value, of_first = getattr(facts.kv_layout, name), getattr(expected, name)
                if value != of_first:
                    remedy = "give every rank the same model files and the same versions of Millrace and transformers"
                    message = f"kv_layout: {name} is {value}, but {of_first} on rank 0; {remedy}"
                    raise StartError("load_model", rank, message, is_retryable=False)

    def _fail(self, phase: str, rank: int, failure: Failure) -> None:
        logger.info("rank %d failed in phase %s: %s", rank, phase, failure.message)
        logger.debug("traceback of rank %d:\n%s", rank, failure.traceback)
        self._deadlines_s[rank] = time.monotonic() + (_CAUSE_S if len(self._handles) > 1 else 0.0)
        if self._failed is None:
            retryable = failure.is_retryable
            self._failed = StartError(phase, rank, failure.message, is_retryable=retryable, failure=failure)

    def _check_ranks(self) -> None:
        now_s = time.monotonic()
        for handle in self._handles:
            self._check_end(handle)
        if self._failed is not None and now_s >= self._deadlines_s[self._failed.rank]:
            raise self._failed
        for handle in self._handles:
            self._check_time(handle.rank, now_s)

    def _check_end(self, handle: RankHandle) -> None:
        end = handle.end()
        if end is not None and not end.is_killed:
            self._receive_last_messages()
        if end is not None and (self._failed is None or end.is_killed):
            phase = self._phases[handle.rank]
            message = f"the process ended: {end.reason}"
            raise StartError(phase, handle.rank, message, is_retryable=end.is_retryable)

    def _receive_last_messages(self) -> None:
        """A rank has ended by itself. Wait for a `StartFailed` that is still on its way."""
        deadline_s = time.monotonic() + _CAUSE_S
        while self._failed is None and time.monotonic() < deadline_s:
            self._receive()
            time.sleep(0.01)

    def _check_time(self, rank: int, now_s: float) -> None:
        phase = self._phases[rank]
        if now_s > self._deadlines_s[rank]:
            self._end_stuck(rank, f"not done within {self._limits.phase_s[phase]:g} s")
        silence_s = now_s - self._heard_s.get(rank, now_s)
        if silence_s > self._limits.busy_heartbeat_s:
            self._end_stuck(rank, f"no heartbeat for {silence_s:.0f} s")

    def _end_stuck(self, rank: int, message: str) -> NoReturn:
        phase = self._phases[rank]
        consequence = "the ranks are ended after their stacks are logged"
        logger.error("rank %d is stuck in phase %s: %s; %s", rank, phase, message, consequence)
        dump_all(self._handles, self._channel, self._limits.dump_s, self._receive)
        self._handles[rank].kill()  # the executor ends the others
        raise StartError(phase, rank, message, is_retryable=True)
