"""What the engine claims is what it has room for, and nothing is computed while its results cannot be written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from millrace.embedded import EmbeddedServer
from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine as LlmEngine
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.serving.capacity import Capacity, ClaimBudget
from millrace.engine_service.serving.job_table import JobTable
from millrace.engine_service.serving.jobs import Arrived, ServedJob
from millrace.engine_service.serving.output import CHECKPOINT_TOKENS, Output
from millrace.engine_service.serving.service import Service
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig
from millrace.results.connection import connect
from millrace.results.messages import Checkpoint, ClaimedJob, JobId, Lease
from millrace.results.queue import JobQueue
from millrace.results.writer import Writer
from tests.engine_service.core.sequences import make_sequence, stub_output
from tests.processes import wait_until
from tests.results.engines import FINGERPRINT, Engine, submit

NOW = 0.0
"""Ask without waiting."""


@pytest.fixture
def capacity() -> Capacity:
    return Capacity(max_open=3, capacity_tokens=100)


def test_an_empty_engine_offers_all_that_it_has(capacity: Capacity) -> None:
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=3, kv_token_budget=100)


def test_a_job_on_its_way_takes_its_cost_and_one_that_has_arrived_what_it_needs_by_then(capacity: Capacity) -> None:
    capacity.open(30, is_alone=False)
    capacity.open(20, is_alone=False)
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=1, kv_token_budget=50)
    capacity.arrive(30)
    capacity.update(88)  # its prompt stands in 12 tokens of the pool
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=1, kv_token_budget=68)


def test_nothing_is_offered_when_as_many_jobs_are_open_as_may_be_until_one_ends(capacity: Capacity) -> None:
    for _ in range(3):
        capacity.open(1, is_alone=False)
    assert capacity.wait_for_budget(NOW) is None
    capacity.close(is_alone=False)
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=1, kv_token_budget=97)


def test_nothing_is_offered_when_no_tokens_are_free_until_some_are(capacity: Capacity) -> None:
    capacity.open(100, is_alone=False)
    assert capacity.wait_for_budget(NOW) is None
    capacity.arrive(100)
    capacity.update(0)
    assert capacity.wait_for_budget(NOW) is None
    capacity.update(16)
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=2, kv_token_budget=16)


def test_an_engine_without_jobs_offers_itself_however_little_is_free(capacity: Capacity) -> None:
    """Else a job larger than what is free would be left there for ever."""
    capacity.update(0)
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=3, kv_token_budget=0)


def test_a_job_that_runs_alone_keeps_all_others_out(capacity: Capacity) -> None:
    capacity.open(1, is_alone=True)
    capacity.arrive(1)
    assert capacity.wait_for_budget(NOW) is None
    capacity.close(is_alone=True)
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=3, kv_token_budget=100)


def test_a_room_that_is_shut_offers_nothing_until_it_is_opened(capacity: Capacity) -> None:
    capacity.shut(True)
    assert capacity.is_shut
    assert capacity.wait_for_budget(NOW) is None
    capacity.shut(False)
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=3, kv_token_budget=100)


@pytest.mark.parametrize("what", ["close", "update", "shut"])
def test_who_waits_hears_at_once_that_there_is_room(capacity: Capacity, what: str) -> None:
    capacity.open(100, is_alone=False)
    if what == "shut":
        capacity.close(is_alone=False)
        capacity.shut(True)
    budgets: list[ClaimBudget | None] = []
    waiting = threading.Thread(target=lambda: budgets.append(capacity.wait_for_budget(60.0)), daemon=True)
    waiting.start()
    wait_until(lambda: capacity._changed._waiters)  # type: ignore[attr-defined]  # it waits by now
    match what:
        case "close":
            capacity.close(is_alone=False)
        case "update":
            capacity.update(150)
        case "shut":
            capacity.shut(False)
    waiting.join(60.0)
    assert len(budgets) == 1 and budgets[0] is not None


def test_a_job_that_ends_during_a_claim_is_not_waited_for_after_it(capacity: Capacity) -> None:
    capacity.open(50, is_alone=False)
    assert capacity.wait_for_budget(NOW) is not None
    capacity.close(is_alone=False)
    waiting = threading.Thread(target=capacity.wait_for_change, args=(1000.0,), daemon=True)
    waiting.start()
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_lease_is_dropped_before_its_place_is_free(capacity: Capacity) -> None:
    """A claim says how many leases are held: with none of them it gets a job that is larger than what is free."""
    budgets: list[ClaimBudget | None] = []
    jobs = JobTable(capacity, on_over=lambda job_id, lease: budgets.append(capacity.wait_for_budget(NOW)))
    claimed = ClaimedJob(
        job_id=JobId("a"),
        lease=Lease(1),
        attempt=1,
        body=b"",
        seed=1,
        cost=200,
        crash_count=2,  # runs alone
        checkpoints=[Checkpoint([], 0)],
        is_watched=False,
        created_ms=0,
    )
    capacity.open(claimed.cost, is_alone=True)
    jobs.remove_unserved(claimed, "failed")
    assert budgets == [None]
    assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=3, kv_token_budget=100)


# --- results that cannot be written --------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[LlmEngine]:
    executor = UniprocExecutor(WorkerConfig(model="", num_blocks=64, block_size=4), worker_module="tests.executor.stub")
    engine = LlmEngine(executor, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    engine.start()
    yield engine
    engine.shutdown()


def test_no_step_is_made_while_redis_takes_no_results_and_then_it_goes_on(engine: LlmEngine) -> None:
    """What may be on its way is less than two checkpoints take. The server is frozen before the first one."""
    with EmbeddedServer() as server:
        queue = JobQueue(connect(server.url), "q")
        submit(queue, "a")
        claimed = Engine(queue).claim_one()
        sequence = make_sequence(1, 5, max_tokens=200)
        generation = Generation(sequence, TextRules(is_text_wanted=False), tokenizer=None)
        capacity = Capacity(8, engine.scheduler.free_tokens)
        capacity.open(claimed.cost, is_alone=False)
        writer = Writer(JobQueue(connect(server.url), "q"), lambda job_id, lease: None, max_pending_bytes=1000)
        output = Output(writer.put, FINGERPRINT)
        service = Service(
            *(engine, capacity, output, writer),
            is_held=lambda job_id: True,
            on_over=lambda job_id, lease: None,
            on_sleep_change=lambda: None,
        )
        os.kill(server.pid, signal.SIGSTOP)
        service.post(Arrived(ServedJob(claimed, [generation], due_s=0.0)))
        service._process_events()
        while not writer.is_full:
            service._step()
        num_tokens = len(generation.token_ids)
        assert 0 < num_tokens <= 2 * CHECKPOINT_TOKENS
        for _ in range(3):
            service._step()
        assert (len(generation.token_ids), writer.is_full) == (num_tokens, True)
        os.kill(server.pid, signal.SIGCONT)
        while engine.has_work:
            service._step()
        assert writer.close()
        job = queue.get("a")
        assert (job.state, job.token_ids) == ("finished", stub_output(sequence.prompt_token_ids, 200))
        assert capacity.wait_for_budget(NOW) == ClaimBudget(max_jobs=8, kv_token_budget=engine.scheduler.free_tokens)
        queue.close()
