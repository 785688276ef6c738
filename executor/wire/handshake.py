"""The start of the ranks: Hello, Boot, phases, Ready, each within its limit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

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

_WITNESS_S = 0.5
"""When one of several ranks fails, another that was killed may be the reason; it gets this long to be noticed. What a rank
has said before its end gets as long to arrive."""

_FOREVER = float("inf")


class Handshake:
    """Owns what is known of each rank until all are ready."""

    def __init__(
        self,
        channel: Channel,
        handles: Sequence[RankHandle],
        config: WorkerConfig,
        limits: Limits,
        *,
        epoch: int,
        rendezvous: str,
    ) -> None:
        self._channel = channel
        self._handles = handles
        self._config = config
        self._limits = limits
        self._epoch = epoch
        self._rendezvous = rendezvous
        self._max_loading = config.max_parallel_loading_workers or len(handles)
        self._queue: deque[int] = deque()
        self._loading: set[int] = set()
        self._phases = {handle.rank: "spawn" for handle in handles}
        self._deadlines_s = {handle.rank: time.monotonic() + limits.phase_s["spawn"] for handle in handles}
        self._entered_s = {handle.rank: time.monotonic() for handle in handles}
        self._took_s: dict[int, list[str]] = {handle.rank: [] for handle in handles}
        """By rank: the phases that are over, in words."""
        self._heard_s: dict[int, float] = {}
        """By rank: the last sign of life. Its silence counts from Hello on; before that the phase's limit must do."""
        self._beating: set[int] = set()
        self._facts: dict[int, ModelFacts] = {}
        self._failed: StartError | None = None

    def run(self) -> list[ModelFacts]:
        """What every rank has loaded, once all are ready and their hearts beat."""
        while min(len(self._facts), len(self._beating)) < len(self._handles):
            self._channel.wait(min(1.0, max(0.0, min(self._deadlines_s.values()) - time.monotonic())))
            self._listen()
            self._check_ranks()
        return [self._facts[handle.rank] for handle in self._handles]

    def _listen(self) -> None:
        for rank, message in self._channel.receive():
            self._take(rank, message)
        if len(self._heard_s.keys() & self._beating) == len(self._handles):
            self._channel.forget_address()  # both sockets of every rank are connected

    def _take(self, rank: int, message: FromWorker) -> None:
        match message:
            case Hello(protocol=protocol):
                self._heard_s[rank] = time.monotonic()
                self._greet(rank, protocol)
            case Phase(name=name) if name in self._limits.phase_s:
                self._enter(rank, name)
            case Ready(facts=facts):
                self._leave_phase(rank)
                logger.info("rank %d is ready: %s", rank, ", ".join(self._took_s[rank]))
                self._facts[rank] = facts
                self._deadlines_s[rank] = _FOREVER
                self._loading.discard(rank)
                self._admit()
            case StartFailed(phase=phase, failure=failure):
                self._fail(phase, rank, failure)
            case Beat():
                self._beating.add(rank)
                if rank in self._heard_s:
                    self._heard_s[rank] = time.monotonic()
            case unexpected:
                logger.warning("ignored during the start: %r", unexpected)

    def _greet(self, rank: int, protocol: int) -> None:
        if protocol != PROTOCOL:
            message = f"the worker speaks protocol {protocol}, this engine {PROTOCOL}; install one version of Millrace"
            raise StartError("spawn", rank, message, is_retryable=False)
        boot = Boot(
            epoch=self._epoch,
            rank=rank,
            world_size=len(self._handles),
            config=self._config,
            rendezvous=self._rendezvous,
            has_to_queue=self._has_queue,
        )
        self._channel.send(rank, encode(boot))

    # --- the queue for loading ---

    @property
    def _has_queue(self) -> bool:
        return self._max_loading < len(self._handles)

    def _leave_phase(self, rank: int) -> None:
        now_s = time.monotonic()
        self._took_s[rank].append(f"{self._phases[rank]} {now_s - self._entered_s[rank]:.2f} s")
        self._entered_s[rank] = now_s

    def _enter(self, rank: int, phase: str) -> None:
        self._leave_phase(rank)
        self._phases[rank] = phase
        self._deadlines_s[rank] = time.monotonic() + self._limits.phase_s[phase]
        if phase == "load_model" and self._has_queue:
            self._deadlines_s[rank] = _FOREVER
            self._queue.append(rank)
            self._admit()

    def _admit(self) -> None:
        while self._queue and len(self._loading) < self._max_loading:
            rank = self._queue.popleft()
            self._loading.add(rank)
            self._deadlines_s[rank] = time.monotonic() + self._limits.phase_s["load_model"]
            self._channel.send(rank, encode(Go()))

    # --- what can go wrong ---

    def _fail(self, phase: str, rank: int, failure: Failure) -> None:
        logger.info("rank %d failed in phase %s: %s", rank, phase, failure.message)
        logger.debug("traceback of rank %d:\n%s", rank, failure.traceback)
        witness_s = _WITNESS_S if len(self._handles) > 1 else 0.0
        self._deadlines_s[rank] = time.monotonic() + witness_s
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
            self._hear_out()
        if end is not None and (self._failed is None or end.is_killed):
            phase = self._phases[handle.rank]
            message = f"the process ended: {end.reason}"
            raise StartError(phase, handle.rank, message, is_retryable=end.is_retryable)

    def _hear_out(self) -> None:
        """A rank has ended by itself: the reason that it gave may still be on its way."""
        deadline_s = time.monotonic() + _WITNESS_S
        while self._failed is None and time.monotonic() < deadline_s:
            self._listen()
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
        logger.error(
            "rank %d is stuck in phase %s: %s; the stacks of all ranks follow, then they are ended",
            rank,
            phase,
            message,
        )
        dump_all(self._handles, self._hear_stacks)
        self._handles[rank].kill()  # the others are for the executor to end
        raise StartError(phase, rank, message, is_retryable=True)

    def _hear_stacks(self) -> None:
        """Of ranks that tell them over the channel; others write them meanwhile. What else is said changes nothing now."""
        deadline_s = time.monotonic() + self._limits.dump_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._channel.wait(left_s)
            for rank, message in self._channel.receive():
                if isinstance(message, Stacks):
                    logger.error("the stacks of rank %d:\n%s", rank, message.text)
