"""Tells a slow worker from a stuck one: heartbeats must come, and steps must move."""

from __future__ import annotations

from collections import deque

import msgspec

from millrace.executor.limits import Limits

_LOOK_EVERY_S = 1.0
_MEASURED_STEPS = 3
"""Steps of a life after which the usual time is known well enough."""
_SMOOTHING = 0.1


class _Sent(msgspec.Struct, frozen=True):
    at_s: float
    num_tokens: int


class Pace:
    """Owns what is known of how long steps take in one life."""

    def __init__(self, limits: Limits, *, is_cpu: bool = False) -> None:
        """`is_cpu`: a first step is given all the time there is, since a long prompt may honestly take it there."""
        self._limits = limits
        self._first_step_s = limits.longest_step_s if is_cpu else limits.first_step_s
        self._num_measured = 0
        self.usual_s = 0.0
        self._token_s = float("inf")
        """Seconds a token in the best step so far: what a long prompt costs at least."""

    def measure(self, took_s: float, num_tokens: int) -> None:
        """A step is done. One without tokens tells nothing."""
        if num_tokens:
            self._num_measured += 1
            self.usual_s += (took_s - self.usual_s) * (1.0 if self._num_measured == 1 else _SMOOTHING)
            self._token_s = min(self._token_s, took_s / num_tokens)

    def limit_s(self, num_tokens: int) -> float:
        """How long a step of so many tokens may take before it is stuck."""
        if self._num_measured < _MEASURED_STEPS:
            return self._first_step_s
        expected_s = max(self.usual_s, num_tokens * self._token_s)
        return min(self._limits.longest_step_s, max(self._limits.stuck_s, self._limits.stuck_factor * expected_s))


class Watchdog:
    """Owns what is known of the ranks' progress in one life. Pure: time comes in as an argument, in seconds."""

    def __init__(
        self, limits: Limits, world_size: int, now_s: float, *, is_cpu: bool = False, measured_rank: int = 0
    ) -> None:
        """`is_cpu`: as `Pace` has it.
        `measured_rank`: whose steps tell what is usual; the output rank, behind whose answer no other stage works on."""
        self._limits = limits
        self.pace = Pace(limits, is_cpu=is_cpu)
        self._measured_rank = measured_rank
        self._heard_s = [now_s] * world_size
        self._phases = [""] * world_size
        self._under_way: list[deque[_Sent]] = [deque() for _ in range(world_size)]
        self._answered_s = [now_s] * world_size
        self._looked_s = now_s

    def heard(self, rank: int, phase: str, now_s: float) -> None:
        """A heartbeat has come."""
        self._heard_s[rank] = now_s
        self._phases[rank] = phase

    def sent_step(self, num_tokens: int, now_s: float) -> None:
        sent = _Sent(now_s, num_tokens)
        for under_way in self._under_way:
            under_way.append(sent)

    def answered_step(self, rank: int, now_s: float, *, has_failed: bool = False) -> None:
        """The rank's oldest step is over. An answer too many, from a rank that is out of its mind, changes nothing."""
        if not self._under_way[rank]:
            return
        sent = self._under_way[rank].popleft()
        if rank == self._measured_rank and not has_failed:  # a step that failed was no whole one
            self.pace.measure(now_s - max(sent.at_s, self._answered_s[rank]), sent.num_tokens)
        self._answered_s[rank] = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for `verdict` again."""
        return now_s - self._looked_s >= _LOOK_EVERY_S

    def verdict(self, now_s: float, *, is_busy: bool) -> tuple[int, str] | None:
        """(rank, reason) of a stuck rank, after all that has arrived was taken in. `is_busy`: calls are under way.

        When the engine itself was away for long, nothing is said about the workers: they are looked at afresh.
        """
        away_s, self._looked_s = now_s - self._looked_s, now_s
        if away_s > 3 * _LOOK_EVERY_S:
            self._forgive(now_s)
            return None
        silence_s = self._limits.busy_heartbeat_s if is_busy else self._limits.heartbeat_s
        for rank, phase in enumerate(self._phases):
            if (lasts_s := self.silence_s(rank, now_s)) > silence_s:
                return rank, f"stuck: no heartbeat for {lasts_s:.1f} s (last seen: {phase})"
        return self._slowest_step(now_s)

    def silence_s(self, rank: int, now_s: float) -> float:
        """How long ago the rank's last heartbeat was taken in."""
        return now_s - self._heard_s[rank]

    def _slowest_step(self, now_s: float) -> tuple[int, str] | None:
        """Ranks wait for each other: of those that are late, the one is named whose heartbeat was heard longest ago."""
        late = [rank for rank, steps in enumerate(self._under_way) if steps and self._is_late(rank, now_s)]
        if not late:
            return None
        rank = min(late, key=lambda rank: self._heard_s[rank])
        lasts_s = self._lasts_s(rank, now_s)
        return rank, f"stuck: a step has lasted {lasts_s:.1f} s, usual are {self.pace.usual_s:.3f} s"

    def _is_late(self, rank: int, now_s: float) -> bool:
        return self._lasts_s(rank, now_s) > self.pace.limit_s(self._under_way[rank][0].num_tokens)

    def _lasts_s(self, rank: int, now_s: float) -> float:
        return now_s - max(self._under_way[rank][0].at_s, self._answered_s[rank])

    def _forgive(self, now_s: float) -> None:
        self._heard_s = [now_s] * len(self._heard_s)
        self._answered_s = [now_s] * len(self._answered_s)
