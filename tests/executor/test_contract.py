"""One suite for every executor: what `executor.base.Executor` promises."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from executor.errors import Asleep, ExecutorTimeout, StartError, UnknownMethod, WorkerDied, WorkerError
from executor.stub import next_token
from tests.executor.kinds import Make, check_health_for, first_step, kinds, start, wait_until_gone, worker_pids

every_kind = kinds()
restartable = kinds("external")
own_process = kinds("uni")
"""Where the worker is a process of its own, so that it can be killed without the test."""
own_restartable = kinds("uni", "external")


@every_kind
def test_a_start_tells_the_facts_and_begins_epoch_one(make: Make) -> None:
    executor = make()
    facts = executor.start()
    assert (facts.architecture, facts.vocab_size, executor.epoch) == ("Stub", 1000, 1)


@every_kind
def test_the_smallest_rank_decides_the_number_of_blocks(make: Make) -> None:
    executor = make()
    executor.start()
    assert executor.determine_num_available_blocks() == (32, 0)


@every_kind
def test_a_step_brings_the_tokens_of_the_rows_that_sample(make: Make) -> None:
    executor = start(make())
    result = executor.execute_model(first_step(executor)).result()
    assert (result.step_id, result.seq_ids, result.token_ids) == (1, [1], [next_token(7, 3)])


@every_kind
def test_results_come_as_a_list_in_rank_order_or_as_the_one_of_a_rank(make: Make) -> None:
    executor = start(make())
    ranks = range(executor.world_size)
    assert executor.collective_rpc("stats") == [{"rank": rank, "num_steps": 0, "num_sequences": 0} for rank in ranks]
    assert executor.collective_rpc("stats", unique_reply_rank=0) == {"rank": 0, "num_steps": 0, "num_sequences": 0}


@every_kind
def test_futures_may_be_asked_in_any_order(make: Make) -> None:
    executor = start(make())
    step = executor.execute_model(first_step(executor))
    stats = executor.collective_rpc("stats", unique_reply_rank=0, non_block=True)
    assert stats.result(10.0) == {"rank": 0, "num_steps": 1, "num_sequences": 1}
    assert step.result(10.0).seq_ids == [1]
    assert step.done()


@every_kind
def test_several_steps_may_be_in_flight(make: Make) -> None:
    executor = start(make())
    steps = [
        executor.execute_model(step) for step in (first_step(executor, 1, seq_id=1), first_step(executor, 2, seq_id=2))
    ]
    assert [step.result(10.0).step_id for step in reversed(steps)] == [2, 1]
    assert executor.stats().num_completed >= 2


@every_kind
def test_a_nap_begins_a_new_epoch_and_no_step_runs_meanwhile(make: Make) -> None:
    executor = start(make())
    executor.execute_model(first_step(executor)).result()
    executor.sleep(1)
    assert executor.is_asleep
    with pytest.raises(Asleep):
        executor.execute_model(first_step(executor, 2))
    executor.check_health()
    executor.wake_up(["weights"])
    assert executor.is_asleep
    executor.wake_up()
    assert (executor.is_asleep, executor.epoch) == (False, 2)
    assert executor.execute_model(first_step(executor, 3)).result().seq_ids == [1]


@every_kind
def test_a_nap_of_another_kind_is_refused(make: Make) -> None:
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
    assert 0 < figures.latency_s.p50 <= figures.latency_s.p95 <= figures.latency_s.p99
    assert figures.requests_per_s > 0


@every_kind
def test_an_unknown_method_is_refused_before_anything_is_sent(make: Make) -> None:
    executor = start(make())
    with pytest.raises(UnknownMethod, match="__class__"):
        executor.collective_rpc("__class__")


@every_kind
def test_a_worker_that_raises_answers_with_kind_message_and_traceback(make: Make) -> None:
    executor = start(make("raise-at-step=1"))
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(first_step(executor)).result()
    assert caught.value.failure.kind == "RuntimeError"
    assert "told to raise" in caught.value.failure.message
    assert "execute_model" in caught.value.failure.traceback
    assert executor.collective_rpc("stats", unique_reply_rank=0)["num_steps"] == 1


@every_kind
def test_wrong_arguments_are_the_callers_error_and_cost_nothing_else(make: Make) -> None:
    executor = start(make())
    with pytest.raises(WorkerError, match="TypeError"):
        executor.collective_rpc("stats", ("surplus",))
    assert executor.execute_model(first_step(executor)).result().seq_ids == [1]


@restartable
def test_a_restart_begins_a_new_epoch_with_a_pool_of_the_same_size(make: Make) -> None:
    executor = start(make())
    executor.execute_model(first_step(executor)).result()
    executor.restart()
    assert executor.epoch == 2
    assert executor.execute_model(first_step(executor, 2)).result().seq_ids == [1]
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
    before_s = time.monotonic()
    with pytest.raises(WorkerDied, match=r"SIGKILL|lost by Ray"):
        executor.execute_model(first_step(executor)).result()
    assert time.monotonic() - before_s < 10
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
        check_health_for(executor, seconds=5)


@own_restartable
def test_a_worker_that_dies_during_the_start_can_be_tried_again(make: Make, tmp_path: Path) -> None:
    executor = make(f"die-at-start,once={tmp_path / 'done'}")
    with pytest.raises(StartError) as caught:
        executor.start()
    assert caught.value.is_retryable
    assert "SIGKILL" in str(caught.value) or "lost by Ray" in str(caught.value)
    start(executor)
    assert executor.execute_model(first_step(executor)).result().seq_ids == [1]


@own_process
def test_a_reply_that_comes_too_late_is_dropped_and_counted(make: Make) -> None:
    executor = start(make())
    call = executor.collective_rpc("stats", non_block=True)
    with pytest.raises(ExecutorTimeout):
        call.result(timeout_s=0)
    executor.collective_rpc("check_health")
    assert executor.stats().num_stale_replies == executor.world_size


@own_restartable
def test_a_stuck_step_times_out_and_the_worker_can_be_replaced(make: Make) -> None:
    executor = start(make("hang-at-step=1"))
    with pytest.raises(ExecutorTimeout):
        executor.execute_model(first_step(executor)).result(timeout_s=0.3)
    executor.restart()
    executor.check_health()


@own_process
def test_nothing_is_left_behind(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    executor = start(make())
    pids = worker_pids(executor)
    assert list(tmp_path.iterdir()) == []  # the socket's file is gone as soon as all are connected
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
