"""Engines that differ from the others: another clock, another version, another model, or a job that kills them."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from millrace import GenerationRequest, SamplingParams
from millrace.results.messages import TERMINAL_STATES
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import LIMIT_S, wait_until
from tests.chaos.workload import make_jobs
from tests.e2e.models import make_servable

pytestmark = [pytest.mark.slow, TEST_LIMIT]

POISON = [7, 7, 7, 7]


def poison_job() -> GenerationRequest:
    return GenerationRequest(id="poison", prompt_token_ids=[*POISON, 8], sampling=SamplingParams(max_tokens=8, seed=1))


def test_clocks_an_hour_apart(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines and a producer whose clocks differ by hours. All times are the server's: a job with ten minutes left does
    not expire, and one with a delay of a second waits for a second."""
    true_time = time.time
    engines = [
        place.engine("--max-num-seqs", "4", faults={"clock_offset_s": 3600}),
        place.engine("--max-num-seqs", "4", faults={"clock_offset_s": -3600}),
    ]
    monkeypatch.setattr(time, "time", lambda: true_time() + 7200)
    hurried = [msgspec.structs.replace(job, deadline_s=600.0) for job in make_jobs(8, max_tokens=60)]
    delayed = [msgspec.structs.replace(job, delay_s=1.0) for job in make_jobs(8, max_tokens=60, first=8)]
    ids = place.submit([*hurried, *delayed, *make_jobs(16, max_tokens=60, first=16)])
    place.wait_all()
    victim, heir = engines
    place.submit(make_jobs(8, max_tokens=600, first=100))
    wait_until(lambda: place.num_tokens_kept() > 0)
    victim.kill()
    place.wait_all()
    for job_id in ids:
        timings = place.client.get(job_id).timings
        assert timings.started_ms is not None and timings.ended_ms is not None
        assert timings.created_ms <= timings.started_ms <= timings.ended_ms < (true_time() + 60) * 1000
        assert timings.started_ms - timings.created_ms >= (1000 if job_id in ids[8:16] else 0)
    assert {place.record(job_id)["attempt"] for job_id in ids} == {"1"}
    place.check(ALL, heir)


def test_a_job_that_kills_workers_fails_alone(place: Place) -> None:
    """The other jobs of its batch lose their worker too, and end with their undisturbed output."""
    engine = place.engine(faults={"poison": POISON})
    place.submit(make_jobs(6, max_tokens=200))
    place.submit([poison_job()])
    place.wait_all()
    place.check(ALL, engine, states={"poison": "failed"})
    error = place.client.get("poison").error
    assert error is not None and error.kind == "crashed"


def test_a_job_that_kills_engines_fails_alone(place: Place) -> None:
    """A new engine is started whenever one has died. After five deaths the job is not tried again."""
    place.submit(make_jobs(6, max_tokens=60))
    place.submit([poison_job()])
    num_deaths, engine = 0, place.launch(faults={"fatal": POISON})
    while place.states()["poison"] != "failed":
        if engine.has_ended:
            num_deaths, engine = num_deaths + 1, place.launch(faults={"fatal": POISON})
        time.sleep(0.02)
    place.wait_all()
    num_deaths += engine.has_ended
    if engine.has_ended:
        engine = place.launch(faults={"fatal": POISON})
    engine.wait_until_serving()
    place.check(ALL, engine, states={"poison": "failed"})
    assert num_deaths == 5
    error = place.client.get("poison").error
    assert error is not None and error.kind == "crashed"


def test_a_machine_that_dies_again_and_again_fails_nobody(place: Place) -> None:
    """Every engine dies after 20 steps, before the usual checkpoints. The tokens that each job gets when it runs alone show
    that the jobs are not the cause."""
    ids = place.submit(make_jobs(2, max_tokens=100))
    num_deaths, engine = 0, place.launch(faults={"dies_after_steps": 20})
    while not set(place.states().values()) <= TERMINAL_STATES:
        if engine.has_ended:
            num_deaths, engine = num_deaths + 1, place.launch(faults={"dies_after_steps": 20})
        time.sleep(0.02)
    assert num_deaths > 5
    assert place.states() == dict.fromkeys(ids, "finished")
    place.check(ALL)


def test_two_models_at_one_queue_do_not_go_on_with_each_others_output(place: Place, tmp_path: Path) -> None:
    """A job with published output waits for an engine of its model. The other model's engine runs the rest."""
    other_model = make_servable("llama", tmp_path)
    reserve = place.reserve(heartbeat_s=20.0)
    first = place.engine("--drain-grace", "0", heartbeat_s=20.0)
    ids = place.submit([msgspec.structs.replace(job, stream=True) for job in make_jobs(6, max_tokens=600)])
    readers = [place.watch(job_id) for job_id in ids]
    wait_until(lambda: all(reader.num_tokens for reader in readers))
    assert first.terminate() == 0
    waiting = [job_id for job_id, state in place.states().items() if state != "finished"]
    assert waiting
    other = place.engine(model=other_model, heartbeat_s=20.0)
    for job in place.client.as_completed(place.client.submit_many(make_jobs(8, max_tokens=24, first=100)), LIMIT_S):
        assert (job.state, place.record(job.id)["engine"]) == ("finished", other.engine_id)
    wait_until(lambda: all("mismatch" in place.record(job_id) for job_id in waiting))
    assert {place.record(job_id)["attempt"] for job_id in waiting} == {"0"}
    heir = reserve.call()
    place.wait_all()
    assert {place.record(job_id)["engine"] for job_id in waiting} == {heir.engine_id}
    place.check(ALL, other, heir)


def test_a_failure_of_our_own_is_tried_again_after_a_pause_that_grows(place: Place) -> None:
    """The first job fails twice and then finishes; one without retries fails at once."""
    engine = place.launch(faults={"fails_to_admit": 3}, heartbeat_s=20.0)
    strict = msgspec.structs.replace(make_jobs(1, first=1)[0], max_retries=0)
    ids = place.submit([*make_jobs(1), strict])
    wait_until(lambda: place.states() == {ids[0]: "delayed", ids[1]: "failed"})
    place.wait_all()
    place.check(ALL, engine, states={ids[1]: "failed"})
    error = place.client.get(ids[1]).error
    assert error is not None
    assert (error.kind, error.message) == ("internal", "ZeroDivisionError: a bug of ours")
    record = place.record(ids[0])
    assert (record["attempt"], record["retries"]) == ("3", "2")
    assert int(record["ended"]) - int(record["created"]) >= 500 + 1000, "half of 1 s, then half of 2 s, or more"


def test_a_body_of_a_newer_version_is_left_to_a_newer_engine(place: Place) -> None:
    """The record has version 2: this engine gives the job back, runs the others, and keeps unknown fields."""
    (newer,) = place.submit(make_jobs(1))
    job = place.client._keys.job(newer)
    place.redis.hset(job, mapping={"v": "2", "not_known_here": "kept"})
    body = place.client._keys.body(newer)
    place.redis.set(body, b'{"prompt":"hi","of_version_two":true}')
    engine = place.engine()
    others = place.submit(make_jobs(8, first=10))
    place.wait_all(others)
    record = place.record(newer)
    assert record["state"] in ("queued", "delayed", "running")
    assert record["not_known_here"] == "kept"
    del place.accepted[newer]  # its end is a newer engine's to write
    place.check(ALL, engine)
    record = place.record(newer)
    assert record["state"] in ("queued", "delayed")
    assert (record["attempt"], record.get("crashes", "0")) == ("0", "0")


def test_an_old_and_a_new_engine_at_one_queue_and_then_only_the_new_one(place: Place) -> None:
    """A rolling upgrade: the old engine runs the jobs that it can, gives the others back, and is stopped in the middle.
    Every second job has version 2 and a field in its record that the old engine does not know."""
    ids = place.submit(make_jobs(24, max_tokens=300))
    newer = ids[1::2]
    for job_id in newer:
        place.redis.hset(place.client._keys.job(job_id), mapping={"v": "2", "not_known_to_all": "kept"})
    old, new = place.launch("--max-num-seqs", "8"), place.reserve("--max-num-seqs", "8", faults={"protocol": 2})
    old.wait_until_serving()
    wait_until(lambda: place.client.stats().delayed > 0)
    newest = new.call()
    wait_until(lambda: place.client.stats().finished > 0)
    assert old.terminate() == 0
    place.wait_all()
    place.check(ALL, newest)
    old.check_kv_returned()
    assert {place.record(job_id)["not_known_to_all"] for job_id in newer} == {"kept"}
    assert {place.record(job_id)["engine"] for job_id in newer} == {newest.engine_id}
