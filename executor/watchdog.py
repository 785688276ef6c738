"""Finds stuck workers: those without heartbeats, and those whose step takes much longer than usual."""

from __future__ import annotations

from collections import deque

import msgspec

from millrace.executor.limits import Limits

_CHECK_EVERY_S = 1.0
_MEASURED_STEPS = 3
"""Steps after a start before the usual duration is known."""
_SMOOTHING = 0.1


class _SentStep(msgspec.Struct, frozen=True):
    sent_s: float
    num_tokens: int


class Pace:
    """Owns the usual duration of a step, measured since the start of the workers."""

    def __init__(self, limits: Limits, *, is_cpu: bool = False) -> None:
        """`is_cpu`: the first steps have the longest limit, since a long prompt may need it on a CPU."""
        self._limits = limits
        self._first_step_s = limits.longest_step_s if is_cpu else limits.first_step_s
        self._num_measured = 0
        self.usual_s = 0.0
        self._token_s = float("inf")
        """Seconds per token in the fastest step so far. A long prompt takes at least that per token."""

    def measure(self, took_s: float, num_tokens: int) -> None:
        """Record the duration of a step. A step without tokens is ignored."""
        if num_tokens:
            self._num_measured += 1
            self.usual_s += (took_s - self.usual_s) * (1.0 if self._num_measured == 1 else _SMOOTHING)
            self._token_s = min(self._token_s, took_s / num_tokens)

    def limit_s(self, num_tokens: int) -> float:
        """Return after how many seconds a step of this size is stuck."""
        if self._num_measured < _MEASURED_STEPS:
            return self._first_step_s
        expected_s = max(self.usual_s, num_tokens * self._token_s)
        return min(self._limits.longest_step_s, max(self._limits.stuck_s, self._limits.stuck_factor * expected_s))


class Watchdog:
    """Owns the progress of the ranks since their start. Pure: time is an argument, in seconds."""

    def __init__(
        self, limits: Limits, world_size: int, now_s: float, *, is_cpu: bool = False, measured_rank: int = 0
    ) -> None:
        """`is_cpu`: see `Pace`. `measured_rank`: whose steps are measured, the output rank, which ends a step last."""
        self._limits = limits
        self.pace = Pace(limits, is_cpu=is_cpu)
        self._measured_rank = measured_rank
        self._heard_s = [now_s] * world_size
        self._phases = [""] * world_size
        self._in_flight: list[deque[_SentStep]] = [deque() for _ in range(world_size)]
        self._replied_s = [now_s] * world_size
        self._checked_s = now_s

    def heartbeat_received(self, rank: int, phase: str, now_s: float) -> None:
        self._heard_s[rank] = now_s
        self._phases[rank] = phase

    def step_sent(self, num_tokens: int, now_s: float) -> None:
        step = _SentStep(now_s, num_tokens)
        for steps in self._in_flight:
            steps.append(step)

    def step_done(self, rank: int, now_s: float, *, has_failed: bool = False) -> None:
        """Remove the rank's oldest step. A surplus reply, which is an error of the rank, is ignored."""
        if not self._in_flight[rank]:
            return
        step = self._in_flight[rank].popleft()
        if rank == self._measured_rank and not has_failed:  # a failed step was not run to its end
            self.pace.measure(now_s - max(step.sent_s, self._replied_s[rank]), step.num_tokens)
        self._replied_s[rank] = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for `find_stuck` again."""
        return now_s - self._checked_s >= _CHECK_EVERY_S

    def find_stuck(self, now_s: float, *, is_busy: bool) -> tuple[int, str] | None:
        """Return (rank, reason) of a stuck rank. Handle received messages before. `is_busy`: other calls than steps run."""
        since_check_s, self._checked_s = now_s - self._checked_s, now_s
        if since_check_s > 3 * _CHECK_EVERY_S:  # the engine itself was suspended: do not blame the workers
            self._heard_s = [now_s] * len(self._heard_s)
            self._replied_s = [now_s] * len(self._replied_s)
            return None
        silence_s = self._limits.busy_heartbeat_s if is_busy else self._limits.heartbeat_s
        for rank, phase in enumerate(self._phases):
            if (lasts_s := self.silence_s(rank, now_s)) > silence_s:
                return rank, f"stuck: no heartbeat for {lasts_s:.1f} s (last seen: {phase})"
        return self._slowest_step(now_s)

    def silence_s(self, rank: int, now_s: float) -> float:
        """Return the time since the rank's last heartbeat."""
        return now_s - self._heard_s[rank]

    def _slowest_step(self, now_s: float) -> tuple[int, str] | None:
        """Ranks wait for each other, so several may be late. Return the one with the oldest heartbeat."""
        late = [rank for rank, steps in enumerate(self._in_flight) if steps and self._is_late(rank, now_s)]
        if not late:
            return None
        rank = min(late, key=lambda rank: self._heard_s[rank])
        lasts_s = self._lasts_s(rank, now_s)
        return rank, f"stuck: a step has lasted {lasts_s:.1f} s, {self.pace.usual_s:.3f} s are usual"

    def _is_late(self, rank: int, now_s: float) -> bool:
        return self._lasts_s(rank, now_s) > self.pace.limit_s(self._in_flight[rank][0].num_tokens)

    def _lasts_s(self, rank: int, now_s: float) -> float:
        return now_s - max(self._in_flight[rank][0].sent_s, self._replied_s[rank])
