"""Engines that an operator puts to sleep: they release their devices, the jobs wait, and none is lost."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from millrace import LLM, Client, GenerationRequest, SamplingParams
from millrace.engine_service.errors import EngineDead
from millrace.executor.launch.multiproc import MultiprocExecutor
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, TINY, EngineProcess, wait_until
from tests.e2e.models import make_servable
from tests.results.invariants import check_all_ended
from tests.worker.models import make_model


@pytest.fixture(scope="module")
def shared(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, str]]:
    """An engine of eight sequences at a time, and its queue, for tests that leave it awake."""
    queue = f"sleep-{uuid.uuid4().hex[:12]}"
    log = tmp_path_factory.mktemp("sleep") / "engine.log"
    with EngineProcess(log, redis_url, queue, "--max-num-seqs", "8") as engine:
        yield engine.wait_until_serving(), queue
        assert engine.terminate() == 0, engine.text()


@pytest.fixture
def engine(shared: tuple[EngineProcess, str]) -> EngineProcess:
    return shared[0]


@pytest.fixture
def shared_client(shared: tuple[EngineProcess, str], redis_url: str) -> Iterator[Client]:
    with Client(redis_url, queue=shared[1]) as client:
        yield client


def long_jobs(num_jobs: int, max_tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=f"Count from {number} to 99:",
            sampling=SamplingParams(temperature=0.8, seed=number, max_tokens=max_tokens, ignore_eos=True),
            stream=number % 2 == 0,
        )
        for number in range(num_jobs)
    ]


def undisturbed(requests: list[GenerationRequest]) -> list[str]:
    """Return the texts that the jobs have when nothing disturbs them."""
    with LLM(TINY, device="cpu") as llm:
        prompts, params = [request.prompt or "" for request in requests], [request.sampling for request in requests]
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def two_waves() -> tuple[list[GenerationRequest], list[str]]:
    """More jobs than run at a time, and their texts."""
    requests = long_jobs(24, max_tokens=300)
    return requests, undisturbed(requests)


def assert_all_whole(client: Client, ids: list[str], texts: list[str]) -> None:
    jobs = [client.wait(job_id, LIMIT_S) for job_id in ids]
    assert [job.state for job in jobs] == ["finished"] * len(ids)
    assert [job.text for job in jobs] == texts
    assert ["".join(event.text for event in client.stream(job_id)) for job_id in ids] == texts


def wait_for_level(client: Client, *levels: int) -> None:
    """Wait until the engines of the queue have these sleep levels, in any order."""
    wait_until(lambda: sorted(client.stats().sleep_levels.values()) == sorted(levels), what=f"sleep {levels}")


def resident_bytes(pid: int) -> int:
    """Return the anonymous memory of a process."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("level", [1, 2])
def test_jobs_wait_while_the_engine_sleeps_and_go_on_where_they_were(
    level: int,
    engine: EngineProcess,
    shared_client: Client,
    two_waves: tuple[list[GenerationRequest], list[str]],
    redis_client: redis.Redis,
) -> None:
    client, (requests, texts) = shared_client, two_waves
    num_finished_before = client.stats().finished
    ids = client.submit_many(requests[:16])
    wait_until(lambda: any(client.get(job_id).token_ids for job_id in ids))
    (engine_id,) = client.sleep(level)
    wait_for_level(client, level)
    ids += client.submit_many(requests[16:])
    wait_until(lambda: client.stats().running == 0)
    waiting = [client.get(job_id) for job_id in ids]
    assert {job.state for job in waiting} <= {"queued", "finished"}
    assert any(job.state == "queued" and job.token_ids for job in waiting), "tokens so far are kept"
    assert [job.state for job in waiting[16:]] == ["queued"] * 8
    num_finished = client.stats().finished - num_finished_before
    (pid,) = engine.worker_pids()
    assert client.wake() == [engine_id]
    assert_all_whole(client, ids, texts)
    assert num_finished < len(ids)
    assert {client.get(job_id).attempt for job_id in ids} == {1}
    assert engine.worker_pids() == [pid]
    check_all_ended(redis_client, client._keys.queue, ids)


@pytest.mark.slow
def test_another_engine_goes_on_with_the_jobs_of_one_that_sleeps(start_engine: StartEngine, client: Client) -> None:
    requests = long_jobs(16, max_tokens=400)
    start_engine("--max-num-seqs", "8")
    (first,) = client.stats().sleep_levels
    ids = client.submit_many(requests)
    wait_until(lambda: any(client.get(job_id).token_ids for job_id in ids))
    start_engine("--max-num-seqs", "8")
    assert client.sleep(engine_id=first) == [first]
    assert_all_whole(client, ids, undisturbed(requests))
    assert client.stats().sleep_levels[first] == 1
    assert sorted(client.stats().sleep_levels.values()) == [0, 1]


def test_memory_is_given_back_and_taken_again(start_engine: StartEngine, client: Client, tmp_path: Path) -> None:
    """Weights of about 190 MB, and a KV pool that jobs have filled in part."""
    model = make_servable("llama", tmp_path)
    make_model("llama", model, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    engine = start_engine("--max-model-len", "512", model=model)
    job = {"prompt_token_ids": [7, 8, 9], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    expected = client.wait(client.submit(**job), LIMIT_S).token_ids  # type: ignore[arg-type]
    (pid,) = engine.worker_pids()
    awake = resident_bytes(pid)
    client.sleep(1)
    wait_for_level(client, 1)
    assert resident_bytes(pid) <= awake
    client.sleep(2)
    wait_for_level(client, 2)
    assert resident_bytes(pid) < awake - 100_000_000
    client.wake()
    assert client.wait(client.submit(**job), LIMIT_S).token_ids == expected  # type: ignore[arg-type]
    assert resident_bytes(pid) > awake - 50_000_000


def test_sigterm_ends_a_sleeping_engine_well(start_engine: StartEngine, client: Client) -> None:
    engine = start_engine()
    client.sleep()
    wait_for_level(client, 1)
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4)
    pids = engine.worker_pids()
    assert engine.terminate() == 0
    assert client.stats().engines == 0
    assert client.get(job_id).state == "queued"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_worker_that_dies_asleep_is_replaced_on_waking(engine: EngineProcess, shared_client: Client) -> None:
    client = shared_client
    client.sleep(2)
    wait_for_level(client, 2)
    (pid,) = engine.worker_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "State:\tZ" in status(pid) or not status(pid))
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0)
    client.wake()
    assert client.wait(job_id, LIMIT_S).text == " 7"
    assert engine.worker_pids() != [pid]
    wait_for_level(client, 0)


@pytest.mark.slow
def test_an_engine_does_not_wake_up_with_other_weights(
    start_engine: StartEngine, client: Client, tmp_path: Path
) -> None:
    model = make_servable("llama", tmp_path)
    engine = start_engine(model=model)
    client.sleep(2)
    wait_for_level(client, 2)
    job_id = client.submit(prompt="x", max_tokens=4)
    make_model("llama", model, seed=1)
    client.wake()
    assert engine.process.wait(LIMIT_S) == 6
    assert "tensors are not what they were before the sleep" in engine.text().splitlines()[-1]
    assert (client.get(job_id).state, client.stats().engines) == ("queued", 0)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_that_died_asleep_does_not_come_back_with_other_weights(level: int, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    with LLM(tmp_path, device="cpu", executor="mp") as llm:
        prompt, greedy = [7, 8, 9], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (before,) = llm.generate(prompt, greedy, use_tqdm=False)
        llm.sleep(level)
        make_model("llama", tmp_path, seed=1)
        executor = llm._engine._executor
        assert isinstance(executor, MultiprocExecutor)
        os.kill(executor.worker_pids()[0], signal.SIGKILL)
        with pytest.raises(EngineDead, match="weights are not what they were"):
            llm.wake_up()
        with pytest.raises(EngineDead, match="weights are not what they were"):
            llm.generate(prompt, greedy, use_tqdm=False)
        make_model("llama", tmp_path)
        (after,) = llm.generate(prompt, greedy, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.slow
def test_an_engine_that_loses_its_worker_on_the_way_into_sleep_tries_again(
    redis_url: str, queue_name: str, client: Client, tmp_path: Path
) -> None:
    doom = f"sleep:killed:{tmp_path / 'done'}"
    where = (tmp_path / "engine.log", redis_url, queue_name)
    with EngineProcess(*where, module="tests.e2e.doomed_worker", before=(doom,)) as engine:
        engine.wait_until_serving()
        client.sleep()
        wait_for_level(client, 1)
        assert "trying again" in engine.text()
        client.wake()
        job_id = client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0)
        assert client.wait(job_id, LIMIT_S).text == " 7"


@pytest.mark.faults
def test_an_engine_and_its_worker_that_are_stopped_while_they_wake_up_end_well(
    redis_url: str, queue_name: str, client: Client, tmp_path: Path
) -> None:
    where = (tmp_path / "engine.log", redis_url, queue_name)
    with EngineProcess(*where, module="tests.e2e.doomed_worker", before=("wake_up:stopped",)) as engine:
        engine.wait_until_serving()
        client.sleep()
        wait_for_level(client, 1)
        job_id = client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0)
        client.wake()
        assert engine.process.wait(LIMIT_S) == 0
        assert "Traceback" not in engine.text()
        assert client.get(job_id).state == "queued"


def status(pid: int) -> str:
    file = Path(f"/proc/{pid}/status")
    return file.read_text() if file.exists() else ""


@pytest.mark.slow
def test_an_engine_that_could_not_reach_redis_sleeps_on(
    launch: StartEngine, client: Client, redis_client: redis.Redis, queue_name: str
) -> None:
    engine = launch().wait_until_serving()
    (engine_id,) = client.sleep()
    wait_for_level(client, 1)
    engine.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: client.stats().engines == 0)
    engine.process.send_signal(signal.SIGCONT)
    wait_until(lambda: client.stats().engines == 1)
    assert client.stats().sleep_levels == {engine_id: 1}
    assert redis_client.hget(f"millrace:{{{queue_name}}}:engine:{engine_id}", "sleep") == b"1"
    assert isinstance(engine, EngineProcess)
    assert engine.text().count("asleep, level") == 1
    assert "awake" not in engine.text()
