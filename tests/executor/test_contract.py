"""One suite for every executor: the contract of `millrace.executor.base.Executor`."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.executor.errors import ExecutorTimeout, StartError, WorkerDied, WorkerError
from millrace.executor.histogram import Histogram
from millrace.executor.metrics import ExecutorMetrics
from tests.executor.kinds import (
    Make,
    begin_call,
    check_health_for,
    first_step,
    kinds,
    start,
    wait_until_gone,
    worker_pids,
)
from tests.executor.stub import DEVICE_S, next_token
from tests.processes import wait_until

every_kind = kinds()
restartable = kinds(can_restart=True)
own_process = kinds(is_remote=True)
own_restartable = kinds(is_remote=True, can_restart=True)


@every_kind
def test_a_start_returns_the_facts_and_begins_epoch_one(make: Make) -> None:
    executor = make()
    facts = executor.start()
    assert (facts.architecture, facts.vocab_size, executor.epoch) == ("Stub", 1000, 1)


@every_kind
def test_the_smallest_rank_decides_the_number_of_blocks_and_is_logged_in_one_line(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    last_rank = make().world_size - 1
    executor = make(f"lacks-blocks=5,on-rank={last_rank}")
    executor.start()
    with caplog.at_level(logging.INFO, "millrace.executor"):
        assert executor.determine_num_available_blocks() == (27, 0)
    (line,) = [record.message for record in caplog.records if "KV cache" in record.message]
    assert line.startswith("KV cache: 104 tokens, 0.0 MiB; rank 0: ")
    for rank in range(executor.world_size):
        num_fit = 27 if rank == last_rank else 32
        assert (
            f"rank {rank}: 27 blocks x {(1 + rank) * 4} bytes = 0.0 MiB besides {1 + rank}.0 MiB of weights, "
            f"budget {num_fit} blocks (set by the stub)"
        ) in line


@every_kind
def test_grammars_are_compiled_beside_the_steps(make: Make, tmp_path: Path) -> None:
    executor = start(make())

    def has_compiled(number: int) -> bool:
        executor.wait_for_grammar(0.01)
        return executor.last_compiled == number

    for number, name in ((3, "a"), (5, "b")):
        executor.compile_grammar(number, str(tmp_path / name))
    assert executor.execute_model(first_step(executor)).result().token_ids == [next_token(7, 3)]
    assert executor.last_compiled == 0
    (tmp_path / "a").touch()
    wait_until(lambda: has_compiled(3))
    (tmp_path / "b").touch()
    wait_until(lambda: has_compiled(5))


@every_kind
def test_a_rank_without_steps_does_its_idle_work(make: Make, tmp_path: Path) -> None:
    executor = start(make(f"idle-parts=3,idle-done={tmp_path}"))
    wait_until(lambda: len(list(tmp_path.iterdir())) == executor.world_size)
    assert executor.execute_model(first_step(executor)).result().token_ids == [next_token(7, 3)]


@own_process
def test_steps_and_calls_do_not_wait_for_the_end_of_the_idle_work(make: Make, tmp_path: Path) -> None:
    executor = start(make(f"idle-parts={10**9},idle-done={tmp_path}"))
    assert executor.execute_model(first_step(executor)).result().token_ids == [next_token(7, 3)]
    assert len(executor.collective_rpc("stats")) == executor.world_size
    assert not list(tmp_path.iterdir())


@every_kind
def test_a_step_brings_the_tokens_of_the_rows_that_sample(make: Make) -> None:
    executor = start(make())
    result = executor.execute_model(first_step(executor)).result()
    assert (result.step_id, result.token_ids) == (1, [next_token(7, 3)])


@every_kind
def test_results_come_as_a_list_in_rank_order(make: Make) -> None:
    executor = start(make())
    assert [figures["rank"] for figures in executor.collective_rpc("stats")] == list(range(executor.world_size))


@every_kind
def test_futures_may_be_asked_in_any_order(make: Make) -> None:
    executor = start(make())
    step = executor.execute_model(first_step(executor))
    stats = begin_call(executor, "stats")
    assert stats.result(60.0)[0]["num_steps"] == 1
    assert len(step.result(60.0).token_ids) == 1
    assert step.result(0.0) is step.result(60.0)


@every_kind
def test_several_steps_may_be_in_flight(make: Make) -> None:
    executor = start(make())
    steps = [executor.execute_model(first_step(executor, number, seq_id=number, depth=number)) for number in (1, 2)]
    assert [step.result(60.0).step_id for step in reversed(steps)] == [2, 1]
    assert executor.stats().num_completed >= 2


@every_kind
def test_a_rank_finishes_its_step_before_it_begins_one_that_was_planned_behind_it(make: Make) -> None:
    """The engine needs the result of one rank only, and on GPUs the step may end a little later on another one."""
    executor = start(make("late=50"))
    for number in range(1, 5):
        result = executor.execute_model(first_step(executor, number, seq_id=number)).result()
        assert (result.step_id, len(result.token_ids)) == (number, 1)


@every_kind
def test_sleep_and_wake_up_begin_a_new_epoch_and_no_step_runs_meanwhile(make: Make) -> None:
    executor = start(make())
    executor.execute_model(first_step(executor)).result()
    executor.sleep(1)
    assert executor.is_asleep
    with pytest.raises(AssertionError):
        executor.execute_model(first_step(executor, 2))
    executor.check_health()
    executor.wake_up(["weights"])
    assert executor.is_asleep
    executor.wake_up()
    assert (executor.is_asleep, executor.epoch) == (False, 2)
    assert len(executor.execute_model(first_step(executor, 3)).result().token_ids) == 1


@every_kind
def test_unknown_sleep_levels_and_tags_are_refused(make: Make) -> None:
    executor = start(make())
    with pytest.raises(ValueError, match="level"):
        executor.sleep(3)
    executor.sleep(2)
    with pytest.raises(ValueError, match="tags"):
        executor.wake_up(["everything"])


@every_kind
def test_figures_count_steps_tokens_and_times(make: Make) -> None:
    executor = start(make("raise-at-step=2"))
    executor.execute_model(first_step(executor)).result()
    with pytest.raises(WorkerError):
        executor.execute_model(first_step(executor, 2, seq_id=2)).result()
    figures = executor.stats()
    assert (figures.num_steps, figures.num_tokens, figures.num_failed, figures.num_blocks) == (2, 1, 1, 32)
    assert figures.num_active_workers == figures.world_size == figures.wanted_world_size
    assert figures.num_requests == figures.num_completed + figures.num_failed


Check = Callable[[Any, ExecutorMetrics], bool]

FIGURES: dict[str, Check] = {
    "num_requests": lambda value, _: value > 3,
    "num_completed": lambda value, all_of: value == all_of.num_requests,
    "num_failed": lambda value, _: value == 0,
    "latency_s": lambda value, all_of: is_sound(value) and value.count == all_of.num_requests,
    "step_s": lambda value, _: is_sound(value) and value.count == 3,
    "host_s": lambda value, _: is_sound(value) and value.count == 2,
    "rpc_s": lambda value, _: is_sound(value) and value.count == 3,
    "device_s": lambda value, _: value == pytest.approx(3 * DEVICE_S),
    "plan_bytes": lambda value, all_of: value == 0 if all_of.name == "uni" else 3 * 20 < value < 3 * 200,
    "reply_bytes": lambda value, all_of: value == 0 if all_of.name == "uni" else 3 * 20 < value < 3 * 200,
    "num_stale_replies": lambda value, _: value == 0,
    "num_restarts": lambda value, _: value == 0,
    "recovery_s": lambda value, _: value == 0,
    "num_active_workers": lambda value, all_of: value == all_of.world_size == all_of.wanted_world_size,
    "num_failed_workers": lambda value, _: value == 0,
    "num_blocks": lambda value, _: value == 32,
    "device_bytes": lambda value, all_of: len(value) == all_of.world_size and all(0 <= one <= 12 for one in value),
    "device_total_bytes": lambda value, all_of: value == [2**20] * all_of.world_size,
    "device_utilization": lambda value, all_of: (
        len(value) == all_of.world_size and all(0 <= one <= 0.3 for one in value)
    ),
}
"""What three steps without a fault leave, each of one token for a prompt of three. The stub's device holds a byte for each
token, and gets busier by a tenth with each step."""


def is_sound(value: Histogram) -> bool:
    """Whether the mean is in the range of the buckets that have values."""
    filled = [number for number, count in enumerate(value.counts) if count]
    lowest, highest = [0.0, *value.bounds, float("inf")][filled[0]], [*value.bounds, float("inf")][filled[-1]]
    return lowest < value.total / value.count <= highest


@every_kind
def test_every_figure_is_there_and_plausible(make: Make) -> None:
    executor = start(make())
    for number in range(1, 4):
        executor.execute_model(first_step(executor, number, seq_id=number)).result()
    executor.collective_rpc("stats")  # answered after the steps, so that every rank's reply to them is in
    figures = executor.stats()
    wrong = {
        name: getattr(figures, name)
        for name, is_right in FIGURES.items()
        if not is_right(getattr(figures, name), figures)
    }
    assert wrong == {}


@every_kind
def test_sleep_and_pauses_are_not_the_hosts_time(make: Make) -> None:
    executor = start(make())
    executor.execute_model(first_step(executor)).result()
    executor.sleep()
    executor.wake_up()
    executor.execute_model(first_step(executor, 2, seq_id=2)).result()
    executor.mark_idle()
    executor.execute_model(first_step(executor, 3, seq_id=3)).result()
    assert executor.stats().host_s.count == 0


@restartable
def test_repairs_are_not_the_hosts_time(make: Make) -> None:
    executor = start(make("oom-at-step=2"))
    executor.execute_model(first_step(executor)).result()
    with pytest.raises(WorkerError):
        executor.execute_model(first_step(executor, 2, seq_id=2)).result()
    executor.execute_model(first_step(executor, 3, seq_id=3)).result()
    assert executor.stats().host_s.count == 1, "from the first step to the second; the third comes after a failure"
    executor.restart()
    executor.execute_model(first_step(executor, 4, seq_id=4)).result()
    assert executor.stats().host_s.count == 1


@own_restartable
def test_a_call_that_is_not_answered_has_failed(make: Make) -> None:
    executor = start(make("hang-at-step=1"))
    before = executor.stats()
    with pytest.raises(ExecutorTimeout, match="rank "):
        executor.execute_model(first_step(executor)).result(timeout_s=0.1)
    assert executor.stats().num_failed == before.num_failed + 1
    for _ in range(2):
        begin_call(executor, "stats")
    executor.restart()
    after = executor.stats()
    assert after.num_failed == before.num_failed + 3
    assert after.num_requests == after.num_completed + after.num_failed


@restartable
def test_recovery_lasts_from_the_loss_until_the_pool_is_there_failed_attempts_included(
    make: Make, tmp_path: Path
) -> None:
    (done := tmp_path / "done").touch()
    executor = start(make(f"raise-at-start,once={done}"))
    done.unlink()
    with pytest.raises(StartError):
        executor.restart()
    assert (executor.stats().recovery_s, executor.stats().num_failed_workers) == (0, 1)
    began_s = time.monotonic()
    executor.restart()
    assert executor.stats().recovery_s > time.monotonic() - began_s


@kinds(can_resize=False)
def test_an_executor_that_can_not_resize_keeps_its_number_of_ranks(make: Make) -> None:
    executor = start(make())
    executor.resize(*executor.parallel_sizes)
    with pytest.raises(ValueError, match="can't change its number of ranks"):
        executor.resize(4, 4)
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


@kinds(can_restart=False)
def test_an_executor_that_can_not_restart_refuses_a_restart(make: Make) -> None:
    executor = start(make())
    with pytest.raises(StartError) as caught:
        executor.restart()
    assert not caught.value.is_retryable


@own_process
@pytest.mark.parametrize("method", ["__class__", "execute_model"])
def test_a_rank_refuses_calls_of_unknown_methods(make: Make, method: str) -> None:
    executor = start(make())
    with pytest.raises(WorkerError, match=f"unknown method '{method}'"):
        executor.collective_rpc(method)
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


@every_kind
def test_a_worker_that_raises_answers_with_kind_message_and_traceback(make: Make) -> None:
    executor = start(make("raise-at-step=1"))
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(first_step(executor)).result()
    assert caught.value.failure.kind == "RuntimeError"
    assert "told to raise" in caught.value.failure.message
    assert "launch" in caught.value.failure.traceback
    assert executor.collective_rpc("stats")[0]["num_steps"] == 1


@every_kind
def test_wrong_arguments_are_the_callers_error_and_cost_nothing_else(make: Make) -> None:
    executor = start(make())
    with pytest.raises(WorkerError, match="TypeError"):
        executor.collective_rpc("stats", ("surplus",))
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


@restartable
def test_a_restart_begins_a_new_epoch_with_a_pool_of_the_same_size(make: Make) -> None:
    executor = start(make())
    executor.execute_model(first_step(executor)).result()
    executor.restart()
    assert executor.epoch == 2
    assert len(executor.execute_model(first_step(executor, 2)).result().token_ids) == 1
    assert executor.stats().num_restarts == 1


@restartable
def test_a_plan_of_another_epoch_is_refused(make: Make) -> None:
    executor = start(make())
    plan = first_step(executor)
    executor.restart()
    with pytest.raises(WorkerError, match="epoch"):
        executor.execute_model(plan).result()


@every_kind
def test_a_failed_start_names_the_phase_the_rank_and_the_reason(make: Make) -> None:
    with pytest.raises(StartError) as caught:
        make("raise-at-start").start()
    assert (caught.value.phase, caught.value.is_retryable) == ("load_model", False)
    assert caught.value.rank in range(4)
    assert "told to raise" in str(caught.value)


@restartable
def test_shutdown_may_be_called_before_the_start_and_again_and_again(make: Make) -> None:
    executor = make()
    executor.shutdown()
    start(executor)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(WorkerDied):
        executor.execute_model(first_step(executor))


@own_restartable
def test_a_worker_killed_in_a_step_is_noticed_at_once_and_replaced(make: Make) -> None:
    executor = start(make("die-at-step=1"))
    with pytest.raises(WorkerDied, match=r"SIGKILL|lost by Ray"):
        executor.execute_model(first_step(executor)).result()
    with pytest.raises(WorkerDied):
        executor.check_health()
    executor.restart()
    executor.check_health()


@own_process
def test_a_worker_killed_while_idle_fails_the_health_check(make: Make) -> None:
    executor = start(make())
    executor.check_health()
    os.kill(worker_pids(executor)[-1], signal.SIGKILL)
    wait_until_gone(worker_pids(executor)[-1])
    with pytest.raises(WorkerDied, match=r"SIGKILL|has ended|lost by Ray"):
        check_health_for(executor, seconds=60)


@own_restartable
def test_a_worker_that_dies_during_the_start_can_be_tried_again(make: Make, tmp_path: Path) -> None:
    executor = make(f"die-at-start,once={tmp_path / 'done'}")
    with pytest.raises(StartError) as caught:
        executor.start()
    assert caught.value.is_retryable
    assert "SIGKILL" in str(caught.value) or "lost by Ray" in str(caught.value)
    start(executor)
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


@own_process
def test_a_reply_that_comes_too_late_is_dropped_and_counted(make: Make) -> None:
    executor = start(make())
    with pytest.raises(ExecutorTimeout):
        executor.collective_rpc("stats", timeout_s=0)
    executor.collective_rpc("check_health")
    assert executor.stats().num_stale_replies == executor.world_size


@own_process
def test_a_call_keeps_its_limit(make: Make) -> None:
    executor = start(make("hang-at-step=1"))
    executor.execute_model(first_step(executor))
    with pytest.raises(ExecutorTimeout, match=r"within 0\.2 s"):
        executor.collective_rpc("stats", timeout_s=0.2)


@own_restartable
def test_a_stuck_step_times_out_and_the_worker_can_be_replaced(make: Make) -> None:
    executor = start(make("hang-at-step=1"))
    with pytest.raises(ExecutorTimeout):
        executor.execute_model(first_step(executor)).result(timeout_s=0.3)
    executor.restart()
    executor.check_health()


@own_process
def test_nothing_is_left_behind(make: Make, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    executor = start(make())
    pids = worker_pids(executor)
    assert list(short_path.iterdir()) == []  # the socket's file is gone as soon as all are connected
    executor.shutdown()
    for pid in pids:
        wait_until_gone(pid)


@own_process
def test_a_temporary_directory_with_a_long_name_is_no_obstacle(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    start(make()).check_health()
    assert list(long.iterdir()) == []
