"""Several ranks: whose result counts, what the failure of one rank means for the others, how many load at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.executor.errors import ExecutorTimeout, StartError, WorkerDied, WorkerError
from millrace.executor.wire.messages import output_rank
from tests.executor.kinds import SHORT, Make, first_step, is_alive, start, stub_config, worker_pids

TWO_BY_TWO = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def test_the_output_rank_is_the_first_of_the_last_stage() -> None:
    assert output_rank(stub_config()) == 0
    assert output_rank(stub_config(tensor_parallel_size=4)) == 0
    assert output_rank(stub_config(tensor_parallel_size=2, pipeline_parallel_size=3)) == 4


@pytest.mark.parametrize("rank", range(4))
def test_the_death_of_any_rank_ends_the_step_at_once(make: Make, rank: int, tmp_path: Path) -> None:
    executor = start(make(f"die-at-step=1,on-rank={rank},once={tmp_path / 'died'},barrier={tmp_path}", **TWO_BY_TWO))
    with pytest.raises(WorkerDied, match=f"rank {rank} .*SIGKILL"):
        executor.execute_model(first_step(executor)).result()
    executor.restart()
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_error_of_a_rank_that_does_not_answer_for_all_surfaces(make: Make, rank: int, tmp_path: Path) -> None:
    executor = start(make(f"raise-at-step=1,on-rank={rank},barrier={tmp_path}", SHORT, **TWO_BY_TWO))
    with pytest.raises(WorkerError, match=f"rank {rank}"):
        executor.execute_model(first_step(executor)).result()


def test_replies_of_ranks_that_come_after_the_output_ranks_are_not_stale(make: Make) -> None:
    executor = start(make(**TWO_BY_TWO))
    for number in range(1, 4):
        executor.execute_model(first_step(executor, number, seq_id=number)).result()
    executor.collective_rpc("check_health")
    assert executor.stats().num_stale_replies == 0


def test_a_rank_that_dies_in_the_start_is_named_and_the_others_end_with_it(make: Make) -> None:
    executor = make("die-at-start,on-rank=2", **TWO_BY_TWO)
    with pytest.raises(StartError) as caught:
        executor.start()
    assert (caught.value.rank, caught.value.is_retryable) == (2, True)
    assert worker_pids(executor) == []


def test_a_rank_with_another_layout_of_the_kv_pool_is_refused(make: Make) -> None:
    executor = make("window=8,on-rank=3", **TWO_BY_TWO)
    with pytest.raises(
        StartError, match=r"rank 3 .*kv_layout: windows is \(8,\), but \(None,\) on rank 0; give"
    ) as caught:
        executor.start()
    assert not caught.value.is_retryable
    assert worker_pids(executor) == []


def test_all_ranks_end_when_one_is_stuck_in_its_end(make: Make) -> None:
    executor = start(make("hang-at-shutdown,on-rank=1", SHORT, tensor_parallel_size=2))
    pids = worker_pids(executor)
    executor.shutdown()
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (2, 2), (None, 4)])
def test_no_more_ranks_load_at_a_time_than_allowed(make: Make, tmp_path: Path, limit: int | None, most: int) -> None:
    """In the start, and in `wake_up` if the weights were dropped."""
    executor = start(make(f"count-loading={tmp_path}", max_parallel_loading_workers=limit, **TWO_BY_TWO))
    executor.check_health()
    seen = take_seen(tmp_path)
    assert len(seen) == 4
    assert max(seen) <= most
    assert limit is not None or max(seen) > 1
    executor.sleep(2)
    executor.wake_up()
    assert [len(seen := take_seen(tmp_path)), max(seen) <= most] == [4, True]
    executor.sleep(1)
    executor.wake_up(["kv_cache"])
    executor.wake_up(["weights"])
    assert take_seen(tmp_path) == []
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


def take_seen(directory: Path) -> list[int]:
    """Remove the marks that ranks left while they loaded. Returns how many were loading then, of each mark."""
    marks = list(directory.glob("seen-*"))
    for mark in marks:
        mark.unlink()
    return [int(mark.name.rpartition("-")[2]) for mark in marks]


def test_the_results_of_some_ranks_are_no_result(make: Make) -> None:
    executor = start(make("stop-at-sleep,on-rank=1", SHORT, tensor_parallel_size=2))
    with pytest.raises(ExecutorTimeout):
        executor.collective_rpc("sleep", (1,), timeout_s=0.3)
