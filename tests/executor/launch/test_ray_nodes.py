"""Ranks on an existing Ray cluster of several nodes, some of which die, and the end of a local Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from millrace.engine_service import worker_group
from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.executor.base import Executor
from millrace.executor.errors import StartError, WorkerDied
from millrace.executor.launch.ray import RayExecutor
from millrace.executor.launch.ray_cluster import users_of
from millrace.executor.launch.select import make_executor
from millrace.executor.limits import Limits
from tests.executor.kinds import STUB, check_health_for, first_step, start, stub_config, wait_until_gone
from tests.executor.launch.ray_nodes import Process, RayNodes, ray_nodes
from tests.executor.stub import next_token
from tests.executor.test_real_ranks import TP2, expected, generate, make_llm
from tests.processes import ROOT, wait_until

__all__ = ["expected"]

TOKEN_IDS = [next_token(7, 3)]
"""What `first_step` yields."""

LIMITS = Limits(heartbeat_s=4.0, busy_heartbeat_s=20.0, replacement_s=30.0)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs millrace[ray]"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two nodes with capacity for two ranks each. A test that kills one adds another."""
    with ray_nodes(2) as started:
        yield started


@pytest.fixture
def user(nodes: RayNodes) -> Iterator[Process]:
    process = nodes.user()
    yield process
    process.end()


# --- in the process that uses the cluster ---

_executor: Executor


def begin() -> list[int]:
    """Start an executor of two stages of two ranks, which stays, and have it run a step."""
    global _executor
    config = stub_config(tensor_parallel_size=2, pipeline_parallel_size=2)
    _executor = start(RayExecutor(config, worker_module=STUB, limits=LIMITS))
    return step(1)


def begin_scattered() -> list[int]:
    """The same in a group whose bundles alternate between the nodes, as may happen in a full cluster."""
    import ray

    global _executor
    config = stub_config(tensor_parallel_size=2, pipeline_parallel_size=2)
    _executor = executor = RayExecutor(config, worker_module=STUB, limits=LIMITS)
    executor._join()
    executor._group = ray.util.placement_group([{"CPU": 1}] * 4, strategy="SPREAD")
    executor._is_group_ours = True
    ray.get(executor._group.ready(), timeout=60)
    start(executor)
    return step(1)


def step(step_id: int) -> list[int]:
    """The sequences that it brings a token."""
    return _executor.execute_model(first_step(_executor, step_id)).result().token_ids


def hosts() -> list[str]:
    """In rank order."""
    return hosts_of(_executor)


def hosts_of(executor: Executor) -> list[str]:
    return [handle.host for handle in executor._handles]  # type: ignore[attr-defined]


def priorities() -> set[int]:
    """The nice values of the ranks, relative to this process."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    return {os.getpriority(os.PRIO_PROCESS, pid) - own for pid in _executor.worker_pids()}  # type: ignore[attr-defined]


def wait_for_a_loss() -> str:
    """What the executor says of it."""
    with pytest.raises(WorkerDied) as caught:
        check_health_for(_executor, seconds=60)
    return caught.value.reason


def restart() -> list[int]:
    _executor.restart()
    return step(2)


def recover() -> tuple[int, list[int]]:
    """Recover as the engine does, with shorter pauses. Returns (number of ranks, sequences with a token of a step)."""
    worker_group.RESTART_BACKOFF_S = (0.0, 0.5)  # type: ignore[assignment]
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    worker_group.WorkerGroup(_executor, config)._bring_up(_executor.restart)
    _executor.initialize_cache(*_executor.determine_num_available_blocks())
    return _executor.world_size, step(3)


def end() -> bool:
    """Whether this process is a part of the cluster after that."""
    import ray

    _executor.shutdown()
    return bool(ray.is_initialized())


def run_inside_a_group() -> tuple[list[int], list[str], int]:
    """From a task in a placement group whose bundles alternate between the nodes: (sequences that a step brings a token,
    hosts in rank order, groups that the cluster has)."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Ray gives a task's process a nice value of 15: beside the other tests, the executor in it would starve.
    variables = {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}
    ray.init(log_to_driver=False, runtime_env={"env_vars": variables})
    group = ray.util.placement_group([{"CPU": 1}] * 4, strategy="SPREAD")
    ray.get(group.ready(), timeout=60)
    place = PlacementGroupSchedulingStrategy(group)
    answer = ray.remote(num_cpus=0)(choose_and_step).options(scheduling_strategy=place).remote()
    result: tuple[list[int], list[str], int] = ray.get(answer, timeout=80)
    ray.shutdown()
    return result


def choose_and_step() -> tuple[list[int], list[str], int]:
    import ray

    config = stub_config(tensor_parallel_size=2, pipeline_parallel_size=2)
    executor = make_executor("auto", config, is_service=True, worker_module=STUB)
    assert executor.name == "ray"
    try:
        start(executor)
        token_ids = executor.execute_model(first_step(executor)).result().token_ids
        num_groups = sum(each["state"] == "CREATED" for each in ray.util.placement_group_table().values())
        return token_ids, hosts_of(executor), num_groups
    finally:
        executor.shutdown()


def join() -> str:
    """Why the executor did not start."""
    with pytest.raises(StartError) as caught:
        RayExecutor(stub_config(), worker_module=STUB).start()
    assert caught.value.is_retryable
    return str(caught.value)


def run_a_model() -> tuple[list[list[int]], str]:
    """(tokens, where the ranks have met)."""
    with make_llm(executor="ray", **TP2) as llm:
        return generate(llm), llm._engine._executor._rendezvous()  # type: ignore[attr-defined]


# --- an existing cluster ---


def assert_stages_stand_together(places: list[str]) -> None:
    first, second, third, fourth = places
    assert first == second != third == fourth


def test_ranks_stand_on_two_nodes_of_a_cluster_that_is_left_as_it_was(nodes: RayNodes, user: Process) -> None:
    assert user.run(begin) == TOKEN_IDS
    assert_stages_stand_together(user.run(hosts))
    assert user.run(priorities) == {0}
    assert not user.run(end)
    assert nodes.count() == 3


def test_ranks_of_a_stage_are_neighbours_however_the_bundles_lie(user: Process) -> None:
    assert user.run(begin_scattered) == TOKEN_IDS
    assert_stages_stand_together(user.run(hosts))
    assert not user.run(end)


def test_the_ranks_of_a_caller_in_a_placement_group_are_placed_there(user: Process) -> None:
    token_ids, places, num_groups = user.run(run_inside_a_group)
    assert (token_ids, num_groups) == (TOKEN_IDS, 1)
    assert_stages_stand_together(places)


def test_the_ranks_of_a_model_meet_at_the_address_of_their_node(user: Process, expected: list[list[int]]) -> None:
    token_ids, rendezvous = user.run(run_a_model)
    assert token_ids == expected
    assert rendezvous.startswith(("tcp://127.0.0.2:", "tcp://127.0.0.3:"))


def test_a_lost_node_is_noticed_and_another_takes_its_rank(nodes: RayNodes, user: Process) -> None:
    user.run(begin)
    nodes.kill(-1)
    assert user.run(wait_for_a_loss)
    nodes.add()
    assert user.run(restart) == TOKEN_IDS
    assert not user.run(end)


def test_when_no_other_node_comes_the_engine_falls_to_fewer_ranks(nodes: RayNodes, user: Process) -> None:
    user.run(begin)
    nodes.kill(-1)
    try:
        assert user.run(wait_for_a_loss)
        assert user.run(recover) == (2, TOKEN_IDS)
        assert not user.run(end)
    finally:
        nodes.add()


def test_a_cluster_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    process = Process({"RAY_ADDRESS": nobody})
    try:
        assert f"Ray at {nobody} can't be joined" in process.run(join)
    finally:
        process.end()


# --- a local Ray ---

OWNER = """
import sys, time
from millrace.executor.launch.ray import RayExecutor
from millrace.executor.launch.ray_cluster import users_of
from tests.executor.kinds import STUB, start, stub_config
executor = start(RayExecutor(stub_config(tensor_parallel_size=2), worker_module=STUB))
print(executor._local.directory, *executor.worker_pids(), flush=True)
time.sleep(1000)
"""


def test_a_local_ray_whose_owner_is_killed_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # a cluster that was killed has left this
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-P", "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    directory, *pids = owner.stdout.readline().split()
    assert len(pids) == 2
    assert users_of(directory) > {owner.pid}
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not Path(directory).exists(), what=f"the end of {directory}")
    assert users_of(directory) == set()
    for pid in pids:
        wait_until_gone(int(pid))
