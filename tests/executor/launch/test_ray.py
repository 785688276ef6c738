"""Ranks on a local Ray: with a model, lost at each moment, stuck, and ended without leaving anything."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from millrace.executor.errors import StartError, WorkerDied
from millrace.executor.launch.ray import RayExecutor
from millrace.executor.launch.ray_cluster import LocalRay, users_of
from tests.executor.kinds import (
    SHORT,
    Make,
    SharedRay,
    decode,
    first_step,
    start,
    stub_config,
    wait_until_gone,
    worker_pids,
)
from tests.executor.launch.ray_nodes import Process
from tests.executor.test_real_ranks import PP2, TP2, expected, generate, make_llm
from tests.processes import all_children_of

__all__ = ["expected"]

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs millrace[ray]"),
]

on_ray = pytest.mark.parametrize("make", ["ray"], indirect=True)


@pytest.mark.parametrize("sizes", [TP2, PP2])
def test_a_model_on_ray_brings_the_tokens_of_one_rank(sizes: dict[str, int], expected: list[list[int]]) -> None:
    SharedRay.start()
    with make_llm(executor="ray", **sizes) as llm:
        assert generate(llm) == expected


@on_ray
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("action", ["die", "stop"])
def test_a_rank_is_lost_at_every_moment_and_replaced(make: Make, action: str, rank: int, tmp_path: Path) -> None:
    safe, meeting = tmp_path / "safe", tmp_path / "meeting"
    meeting.mkdir()
    moments = ("start", "step=2", "sleep", "shutdown")
    faults = ",".join(f"{action}-at-{moment}" for moment in moments)
    executor = make(f"{faults},on-rank={rank},once={safe},barrier={meeting}", SHORT)
    with pytest.raises(StartError, match=f"rank {rank}"):
        executor.start()
    start(executor)
    executor.execute_model(first_step(executor)).result()
    safe.unlink()
    with pytest.raises(WorkerDied, match=f"rank {rank}"):  # in a prefill
        executor.execute_model(first_step(executor, 2, seq_id=2)).result()
    executor.restart()
    executor.execute_model(first_step(executor)).result()
    safe.unlink()
    with pytest.raises(WorkerDied, match=f"rank {rank}"):  # in a decode
        executor.execute_model(decode(executor, 2)).result()
    executor.restart()
    safe.unlink()
    with pytest.raises(WorkerDied, match=f"rank {rank}"):
        executor.sleep()
    executor.restart()
    assert len(executor.execute_model(first_step(executor, 3)).result().token_ids) == 1
    safe.unlink()
    pids = worker_pids(executor)
    executor.shutdown()
    for pid in pids:
        wait_until_gone(pid)


@on_ray
@pytest.mark.parametrize("rank", [0, 1])
def test_the_stacks_of_all_ranks_are_in_the_engines_log_when_one_hangs(
    make: Make, rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patient = msgspec.structs.replace(SHORT, dump_s=2.0)
    executor = start(make(f"hang-at-step=1,on-rank={rank},barrier={tmp_path},once={tmp_path / 'done'}", patient))
    with pytest.raises(WorkerDied, match="stuck"):
        executor.execute_model(first_step(executor)).result()
    logged = [record.getMessage() for record in caplog.records if "the stacks of rank" in record.getMessage()]
    (of_stuck,), (of_peer,) = ([text for text in logged if f"rank {one}:" in text] for one in (rank, 1 - rank))
    assert "in act" in of_stuck
    assert "in _wait_for_ranks" in of_peer
    executor.restart()
    assert len(executor.execute_model(first_step(executor)).result().token_ids) == 1


@on_ray
def test_ranks_that_fail_before_they_start_are_named_with_the_reason(make: Make) -> None:
    executor = make()
    executor._worker_module = "no_such_module"
    with pytest.raises(StartError, match="no_such_module") as caught:
        executor.start()
    assert (caught.value.phase, caught.value.is_retryable) == ("spawn", False)
    assert caught.value.rank in (0, 1)


# --- a local Ray ---


def test_a_ray_whose_start_lacks_a_process_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory := tmp_path / "ray").mkdir()
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(directory))
    monkeypatch.setattr("sys.executable", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="gone"):
        LocalRay(1)
    assert not directory.exists()


# In a process that knows of no other:


def run_twice() -> list[tuple[list[str], bool, set[int]]]:
    """Of two runs: the GPUs that each rank sees; then, after the end, whether a file and which processes are left."""
    return [run(), run()]


def run() -> tuple[list[str], bool, set[int]]:
    config = stub_config(tensor_parallel_size=2)
    executor = RayExecutor(config, worker_module="tests.executor.seeing_worker")
    try:
        start(executor)
        assert executor._local is not None
        directory = executor._local.directory
        assert len(users_of(directory)) > 2
        devices = [each["devices"] for each in executor.collective_rpc("stats")]
    finally:
        executor.shutdown()
    return devices, Path(directory).exists(), users_of(directory) | set(all_children_of(os.getpid()))


def test_a_local_ray_gives_each_rank_a_gpu_and_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    process = Process({"RAY_TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "4,7"})
    try:
        runs = process.run(run_twice)
    finally:
        process.end()
    for devices, has_file, left in runs:
        assert sorted(devices) == ["4", "7"]
        assert not has_file
        assert left == set()
    assert list(tmp_path.iterdir()) == []
