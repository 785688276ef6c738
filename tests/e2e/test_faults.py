"""Processes die, Redis goes away: no job is lost, none is done twice, no text is torn."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import redis

from engine_service import LLM
from millrace import Client, GenerationRequest, SamplingParams
from millrace.embedded import EmbeddedServer
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import TINY, EngineProcess, wait_until
from tests.results.invariants import check_all_ended

LIMIT_S = 90.0


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
    with LLM(TINY, device="cpu") as llm:
        prompts, params = [request.prompt or "" for request in requests], [request.sampling for request in requests]
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_all_whole(client: Client, ids: list[str], texts: list[str]) -> None:
    jobs = [client.wait(job_id, LIMIT_S) for job_id in ids]
    assert [job.state for job in jobs] == ["finished"] * len(ids)
    assert [job.text for job in jobs] == texts
    assert ["".join(event.text for event in client.stream(job_id)) for job_id in ids] == texts


def test_an_engine_killed_in_the_middle_of_50_jobs_loses_none_and_tears_no_text(
    start_engine: StartEngine, client: Client, redis_client: redis.Redis, queue_name: str
) -> None:
    requests = long_jobs(50, max_tokens=300)
    first = start_engine()
    ids = client.submit_many(requests)
    wait_until(lambda: any(client.get(job_id).token_ids for job_id in ids))
    first.kill()
    assert client.stats().finished < 50
    start_engine()
    assert_all_whole(client, ids, undisturbed(requests))
    check_all_ended(redis_client, queue_name, ids)


def test_two_engines_share_200_jobs_and_each_is_done_once(
    start_engine: StartEngine, client: Client, redis_client: redis.Redis, queue_name: str
) -> None:
    engines = [start_engine("--max-num-seqs", "8"), start_engine("--max-num-seqs", "8")]
    ids = client.submit_many(long_jobs(200, max_tokens=24))
    jobs = list(client.as_completed(ids, timeout_s=LIMIT_S))
    assert sorted(job.id for job in jobs) == sorted(ids)
    assert {(job.state, job.attempt) for job in jobs} == {("finished", 1)}
    check_all_ended(redis_client, queue_name, ids)
    assert [engine.terminate() for engine in engines] == [0, 0]


def test_a_worker_killed_under_load_is_replaced_and_the_batch_goes_on(
    start_engine: StartEngine, client: Client
) -> None:
    requests = long_jobs(20, max_tokens=300)
    engine = start_engine()
    ids = client.submit_many(requests)
    wait_until(lambda: any(client.get(job_id).token_ids for job_id in ids))
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    assert_all_whole(client, ids, undisturbed(requests))
    assert {client.get(job_id).attempt for job_id in ids} == {1}


def test_a_worker_killed_while_it_starts_is_started_again(launch: StartEngine, client: Client) -> None:
    engine = launch()
    wait_until(lambda: bool(engine.worker_pids()))
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    engine.wait_until_serving()
    assert "trying again" in engine.text()
    assert client.wait(client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0), LIMIT_S).text == " 7"


def test_an_offline_batch_survives_its_worker() -> None:
    requests = long_jobs(8, max_tokens=200)
    expected = undisturbed(requests)
    with LLM(TINY, device="cpu", executor="mp") as llm:
        steps = 0
        engine_step = llm._engine.step

        def step_and_kill() -> list[object]:
            nonlocal steps
            steps += 1
            if steps == 50:
                os.kill(llm._engine._executor.worker_pids()[0], signal.SIGKILL)  # type: ignore[attr-defined]
            return engine_step()  # type: ignore[return-value]

        llm._engine.step = step_and_kill  # type: ignore[assignment,method-assign]
        prompts, params = [request.prompt or "" for request in requests], [request.sampling for request in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == expected


def test_sigterm_lets_running_jobs_finish(start_engine: StartEngine, client: Client) -> None:
    engine = start_engine()
    job_id = client.submit(prompt="Count from 1 to 40:", max_tokens=300, ignore_eos=True, stream=True)
    next(iter(client.stream(job_id)))
    assert engine.terminate() == 0
    assert client.get(job_id).state == "finished"
    assert client.stats().engines == 0


def test_sigterm_during_the_start_leaves_nothing_behind(
    launch: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine = launch()
    wait_until(lambda: bool(engine.worker_pids()))
    pids = engine.worker_pids()
    assert engine.terminate() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(tmp_path.glob("millrace-*")) == []


def test_a_second_sigterm_does_not_wait_for_running_jobs(start_engine: StartEngine, client: Client) -> None:
    engine = start_engine("--drain-grace", "600")
    job_id = client.submit(prompt="A story:", max_tokens=100_000, ignore_eos=True, stream=True)
    other = client.submit(prompt="A story:", max_tokens=100_000, ignore_eos=True, stream=True)
    next(iter(client.stream(job_id)))
    engine.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in engine.text())
    assert engine.terminate() == 0
    assert {client.get(one).state for one in (job_id, other)} <= {"queued", "finished"}


def test_sigterm_past_the_grace_releases_jobs_with_their_tokens_and_counts_no_attempt(
    start_engine: StartEngine, client: Client
) -> None:
    requests = long_jobs(12, max_tokens=700)
    engine = start_engine("--drain-grace", "0")
    ids = client.submit_many(requests)
    wait_until(lambda: any(client.get(job_id).token_ids for job_id in ids))
    assert engine.terminate() == 0
    jobs = [client.get(job_id) for job_id in ids]
    assert {job.state for job in jobs} <= {"queued", "finished"}
    assert any(job.state == "queued" and job.token_ids for job in jobs)
    start_engine()
    assert_all_whole(client, ids, undisturbed(requests))
    assert {client.get(job_id).attempt for job_id in ids} == {1}


@pytest.mark.slow
def test_sigterm_while_redis_is_away_ends_in_time_and_says_so(tmp_path: Path) -> None:
    with EmbeddedServer() as server, EngineProcess(tmp_path / "engine.log", server.url, "away") as engine:
        engine.wait_until_serving()
        with Client(server.url, queue="away") as client:
            next(
                iter(client.stream(client.submit(prompt="A story:", max_tokens=100_000, ignore_eos=True, stream=True)))
            )
        server.kill()
        assert engine.terminate(limit_s=45) == 4
        assert "recovered by another engine" in engine.text()


def test_redis_dies_and_comes_back_with_its_data(tmp_path: Path) -> None:
    requests = long_jobs(20, max_tokens=400)
    with EmbeddedServer(appendonly=True) as server, Client(server.url, queue="restart") as client:
        log = tmp_path / "engine.log"
        with EngineProcess(log, server.url, "restart") as engine:
            engine.wait_until_serving()
            ids = client.submit_many(requests)
            wait_until(lambda: any(client.get(job_id).token_ids for job_id in ids))
            server.kill()
            server.start()
            assert_all_whole(client, ids, undisturbed(requests))
            assert engine.terminate() == 0
