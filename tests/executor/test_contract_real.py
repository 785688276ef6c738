"""The contract of executors once more, with a real model on the workers of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.executor.base import Executor
from millrace.executor.errors import ExecutorTimeout, WorkerError
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.remote import RemoteExecutor
from millrace.executor.wire.messages import WorkerConfig
from tests.e2e.engines import TINY
from tests.executor.kinds import KINDS, begin_call, check_health_for, decode, first_step, kinds, start

pytestmark = pytest.mark.ranks


def make_real(kind: type[Executor], sizes: dict[str, int]) -> Executor:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32, "block_size": 4, **sizes}
    return kind(WorkerConfig(model=str(TINY), **options), worker_module="millrace.worker")


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Executor]:
    executor = make_real(*KINDS[request.param])
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The two tokens of one rank in this process."""
    executor = start(make_real(UniprocExecutor, {}))
    tokens = two_tokens(executor)
    executor.shutdown()
    return tokens


def two_tokens(executor: Executor) -> list[int]:
    plans = (first_step(executor), decode(executor, 2))
    return [token_id for plan in plans for token_id in executor.execute_model(plan).result(60.0).token_ids]


@kinds()
def test_the_contract_holds_with_a_real_model(make: Executor, expected: list[int]) -> None:
    executor = make
    facts = executor.start()
    assert (facts.architecture, facts.dtype) == ("LlamaForCausalLM", "float32")
    assert executor.determine_num_available_blocks() == (32, 0)
    with pytest.raises(WorkerError, match="there is no KV pool yet") as caught:
        executor.execute_model(first_step(executor)).result(60.0)
    assert caught.value.failure.kind == "PlanError"
    assert "Traceback" in caught.value.failure.traceback
    executor.initialize_cache(32, 0)
    assert two_tokens(executor) == expected

    futures = [begin_call(executor, "stats"), begin_call(executor, "check_health")]
    assert futures[1].result(60.0) == [None] * executor.world_size
    assert len(futures[0].result(60.0)) == executor.world_size
    if isinstance(executor, RemoteExecutor):
        with pytest.raises(WorkerError, match="unknown method 'eval'"):
            executor.collective_rpc("eval")
        with pytest.raises(ExecutorTimeout):
            executor.collective_rpc("check_health", timeout_s=0.0)
        check_health_for(executor, 0.5)
        assert executor.stats().num_stale_replies >= executor.world_size

    for level in (1, 2):
        executor.sleep(level)
        with pytest.raises(AssertionError):
            executor.execute_model(first_step(executor))
        executor.wake_up(["kv_cache"])
        executor.wake_up()
        assert two_tokens(executor) == expected
    executor.shutdown()
    executor.shutdown()
