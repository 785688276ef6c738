"""When a worker counts as stuck, with a fake clock."""

from __future__ import annotations

from millrace.executor.limits import Limits
from millrace.executor.watchdog import Watchdog

LIMITS = Limits(stuck_s=10, stuck_factor=20, first_step_s=60, heartbeat_s=10, busy_heartbeat_s=60, longest_step_s=300)


class Bench:
    """A watchdog over ranks with a heartbeat every second, whose steps the test ends."""

    def __init__(self, world_size: int = 1, *, is_cpu: bool = False) -> None:
        self.now_s = 100.0
        self.world_size = world_size
        self.silent: set[int] = set()
        self.is_busy = False
        self.watchdog = Watchdog(LIMITS, world_size, self.now_s, is_cpu=is_cpu)

    def run_steps(self, number: int, took_s: float, num_tokens: int = 1) -> None:
        for _ in range(number):
            self.watchdog.step_sent(num_tokens, self.now_s)
            self.now_s += took_s
            for rank in range(self.world_size):
                self.watchdog.step_done(rank, self.now_s)

    def pass_time(self, seconds: int) -> tuple[int, str] | None:
        """Return the first stuck rank within this many seconds."""
        for _ in range(seconds):
            self.now_s += 1
            for rank in set(range(self.world_size)) - self.silent:
                self.watchdog.heartbeat_received(rank, "step", self.now_s)
            if stuck := self.watchdog.find_stuck(self.now_s, is_busy=self.is_busy):
                return stuck
        return None


def test_an_idle_worker_is_well_for_ever() -> None:
    assert Bench().pass_time(1000) is None


def test_a_step_that_lasts_longer_than_ten_seconds_is_stuck_when_steps_are_usually_short() -> None:
    bench = Bench()
    bench.run_steps(10, took_s=0.02)
    bench.watchdog.step_sent(1, bench.now_s)
    assert bench.pass_time(10) is None
    stuck = bench.pass_time(2)
    assert stuck is not None
    assert stuck[1].startswith("stuck: a step")


def test_where_steps_are_long_twenty_usual_ones_are_waited_for() -> None:
    bench = Bench()
    bench.run_steps(10, took_s=2.0)
    bench.watchdog.step_sent(1, bench.now_s)
    assert bench.pass_time(39) is None
    assert bench.pass_time(3) is not None


def test_a_long_prompt_gets_the_time_that_its_tokens_need() -> None:
    bench = Bench()
    bench.run_steps(5, took_s=2.0, num_tokens=20)
    bench.run_steps(200, took_s=0.2)
    bench.watchdog.step_sent(1000, bench.now_s)  # at 0.1 s a token: 100 s of honest work
    assert bench.pass_time(290) is None
    assert bench.pass_time(20) is not None


def test_the_first_steps_may_take_longer_and_on_a_cpu_longest() -> None:
    for is_cpu, limit_s in ((False, 60), (True, 300)):
        bench = Bench(is_cpu=is_cpu)
        bench.watchdog.step_sent(2048, bench.now_s)
        assert bench.pass_time(limit_s) is None
        assert bench.pass_time(2) is not None


def test_the_rank_that_does_not_answer_is_named() -> None:
    bench = Bench(world_size=4)
    bench.run_steps(5, took_s=0.1)
    bench.watchdog.step_sent(1, bench.now_s)
    for rank in (0, 1, 3):
        bench.watchdog.step_done(rank, bench.now_s)
    stuck = bench.pass_time(20)
    assert stuck is not None
    assert stuck[0] == 2


def test_a_step_behind_another_is_timed_from_the_answer_to_that() -> None:
    bench = Bench()
    bench.run_steps(5, took_s=0.01)
    bench.watchdog.step_sent(1, bench.now_s)
    bench.watchdog.step_sent(1, bench.now_s)
    assert bench.pass_time(4) is None
    bench.watchdog.step_done(0, bench.now_s)
    assert bench.pass_time(9) is None
    assert bench.pass_time(3) is not None


def test_a_heartbeat_that_stops_is_noticed_in_ten_seconds_or_later_during_calls() -> None:
    for is_busy, limit_s in ((False, 10), (True, 60)):
        bench = Bench(world_size=2)
        bench.silent, bench.is_busy = {1}, is_busy
        assert bench.pass_time(limit_s) is None
        stuck = bench.pass_time(2)
        assert stuck is not None
        assert stuck[0] == 1
        assert "heartbeat" in stuck[1]


def test_an_engine_that_was_suspended_itself_finds_no_rank_stuck() -> None:
    bench = Bench()
    bench.watchdog.step_sent(1, bench.now_s)
    bench.now_s += 3600
    assert bench.watchdog.find_stuck(bench.now_s, is_busy=False) is None
    assert bench.pass_time(9) is None


def test_a_surplus_reply_changes_nothing() -> None:
    bench = Bench()
    bench.watchdog.step_done(0, bench.now_s)
    assert bench.pass_time(100) is None


def test_a_step_that_failed_early_does_not_make_honest_ones_late() -> None:
    bench = Bench()
    bench.run_steps(5, took_s=2.0, num_tokens=20)
    bench.watchdog.step_sent(2048, bench.now_s)
    bench.watchdog.step_done(0, bench.now_s + 0.001, has_failed=True)
    bench.watchdog.step_sent(1000, bench.now_s)  # at 0.1 s a token: 100 s of honest work
    assert bench.pass_time(290) is None


def test_a_plan_without_rows_does_not_change_the_usual_time() -> None:
    bench = Bench()
    bench.run_steps(5, took_s=1.0, num_tokens=0)
    assert bench.watchdog.pace.limit_s(1) == LIMITS.first_step_s


def test_the_usual_time_is_that_of_the_rank_that_answers_last() -> None:
    bench = Bench(world_size=2)
    bench.watchdog = Watchdog(LIMITS, 2, bench.now_s, measured_rank=1)
    for _ in range(5):
        bench.watchdog.step_sent(1, bench.now_s)
        bench.watchdog.step_done(0, bench.now_s + 0.01)
        bench.now_s += 2.0
        bench.watchdog.step_done(1, bench.now_s)
    assert bench.watchdog.pace.limit_s(1) == 40
