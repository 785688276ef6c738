"""What happens to jobs when gateways die, sleep, meet, or lose the server: each is run once and ends once."""

from __future__ import annotations

import random
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from rq import Queue, Retry, Worker
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer

from millrace.embedded import EmbeddedServer
from millrace.producer.rq.gateway import Gateway
from millrace.producer.rq.source_queue import SourceQueue
from millrace.results.connection import connect
from millrace.results.errors import RedisUnavailable
from tests.processes import wait_until
from tests.producer.rq.parts import (
    EchoEngine,
    GatewayProcess,
    answer_to,
    enqueue_many,
    value_of,
    wait_for,
    wait_for_finished,
)

RESTART_LIMIT_S = 60
"""RQ itself gives a job back after an hour."""


def _assert_each_ended_once(queue: Queue, jobs: Sequence[Job], engine: EchoEngine) -> None:
    for i, job in enumerate(jobs):
        assert engine.runs[job.id] == 1, f"{job.id} was run {engine.runs[job.id]} times"
        (result,) = job.results()
        assert result.type == Result.Type.SUCCESSFUL
        assert value_of(job)["text"] == answer_to(f"hello {i}")
        assert job.is_finished
    assert queue.connection.zcard(queue.started_job_registry.key) == 0
    assert queue.connection.zcard(queue.failed_job_registry.key) == 0
    assert queue.connection.llen(queue.intermediate_queue_key) == 0
    assert queue.connection.keys(f"millrace:gateway:rq:taken:*:{queue.name}") == []


@pytest.fixture
def halfway(redis_url: str, rq_queue: Queue, queue_name: str) -> Iterator[Gateway]:
    """A gateway that no thread drives: a test has it do some of its steps, and then be dead."""
    client = connect(redis_url)
    yield Gateway(client, client, [rq_queue.name], queue_name, 1024)
    client.close()


def _next(tmp_path: Path, redis_url: str, queue: Queue, engine: EchoEngine, name: str = "next") -> GatewayProcess:
    log = tmp_path / f"{name}.log"
    return GatewayProcess(log, redis_url, queue.name, engine.queue.keys.queue)


# --- kill -9 -------------------------------------------------------------------------------------------------------


def test_a_killed_gateway_is_succeeded_within_15_seconds(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    """With 150 jobs in flight, of which 50 end while no gateway runs."""
    engine.hold()
    jobs = enqueue_many(rq_queue, 150)
    wait_until(lambda: len(engine.held) == 150, what="the claims")
    gateway.process.send_signal(signal.SIGSTOP)
    ended = {job.id for job in jobs[:50]}
    engine.may_finish = lambda job: job.job_id in ended
    _wait_for_runs(engine, 50)
    gateway.kill()
    more = enqueue_many(rq_queue, 1)
    with _next(tmp_path, redis_url, rq_queue, engine) as following:
        engine.let_go()
        wait_for_finished(rq_queue, 151, RESTART_LIMIT_S)
        assert [worker.name for worker in Worker.all(queue=rq_queue)] == [following.name]
        _assert_each_ended_once(rq_queue, jobs, engine)
        assert more[0].is_finished


def test_a_result_that_expires_while_no_gateway_runs_is_no_empty_text(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    engine.hold()
    (job,) = enqueue_many(rq_queue, 1)
    wait_until(lambda: len(engine.held) == 1, what="the claim")
    gateway.process.send_signal(signal.SIGSTOP)
    engine.let_go()
    wait_until(lambda: engine.queue.get(job.id).state == "finished", what="the result")
    gateway.kill()
    rq_queue.connection.delete(engine.queue.keys.result(job.id))
    with _next(tmp_path, redis_url, rq_queue, engine):
        wait_until(lambda: job.get_status() == "failed", what="the end", limit_s=RESTART_LIMIT_S)
    result = job.latest_result()
    assert result is not None
    assert result.exc_string == "finished, but the result has expired"


@pytest.mark.slow
def test_gateways_that_are_killed_again_and_again_lose_nothing(
    engine: EchoEngine, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    """At any moment: two gateways, one of them killed every now and then, under a stream of jobs."""
    jobs: list[Job] = []
    dice = random.Random(7)
    engine.may_finish = lambda job: dice.random() < 0.2
    gateways = [_next(tmp_path, redis_url, rq_queue, engine, f"first-{i}") for i in range(2)]
    try:
        for kill in range(10):
            jobs += enqueue_many(rq_queue, 200)
            _wait_for_runs(engine, len(jobs) - dice.randrange(150))
            gateways[kill % 2].kill()
            gateways[kill % 2] = _next(tmp_path, redis_url, rq_queue, engine, f"next-{kill}")
        wait_for_finished(rq_queue, len(jobs))
    finally:
        for one in gateways:
            one.kill()
    assert all(engine.runs[job.id] == 1 for job in jobs)
    assert all(len(job.results()) == 1 for job in jobs)


def _wait_for_runs(engine: EchoEngine, number: int) -> None:
    wait_until(lambda: sum(engine.runs.values()) >= number, 30, f"{number} ends in the engine")


# --- each window by itself -----------------------------------------------------------------------------------------


def test_taken_and_not_registered(
    engine: EchoEngine, halfway: Gateway, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    jobs = enqueue_many(rq_queue, 20)
    (source,) = halfway._sources
    assert source.take(20) == [job.id.encode() for job in jobs]
    source.sign_off()
    assert rq_queue.count == 0
    with _next(tmp_path, redis_url, rq_queue, engine):
        wait_for_finished(rq_queue, 20)
    _assert_each_ended_once(rq_queue, jobs, engine)


def test_registered_and_not_submitted(
    engine: EchoEngine,
    halfway: Gateway,
    rq_queue: Queue,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(requests: object) -> list[str]:
        raise RedisUnavailable("gone")

    jobs = enqueue_many(rq_queue, 20)
    monkeypatch.setattr(halfway._millrace, "submit", fail)
    with pytest.raises(RedisUnavailable):
        halfway._intake.take()
    halfway._sources[0].sign_off()
    assert all(job.get_status() == "started" for job in jobs)
    assert engine.queue.stats().queued == 0
    with _next(tmp_path, redis_url, rq_queue, engine):
        wait_for_finished(rq_queue, 20)
    _assert_each_ended_once(rq_queue, jobs, engine)


def test_over_in_millrace_and_not_in_rq(
    engine: EchoEngine, halfway: Gateway, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    jobs = enqueue_many(rq_queue, 20)
    assert halfway._intake.take() == "taken"
    _wait_for_runs(engine, 20)
    halfway._sources[0].sign_off()
    with _next(tmp_path, redis_url, rq_queue, engine):
        wait_for_finished(rq_queue, 20)
    _assert_each_ended_once(rq_queue, jobs, engine)


def test_rqs_cleanup_has_failed_what_goes_on_in_millrace(
    engine: EchoEngine, halfway: Gateway, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    """As any `rq info` does when there has been no gateway for an hour; a job with a Retry goes back to its queue."""
    engine.hold()
    failed = enqueue_many(rq_queue, 5)
    retried = rq_queue.enqueue("millrace.generate", "hello 5", max_tokens=8, retry=Retry(max=1))
    later = rq_queue.enqueue("millrace.generate", "hello 6", max_tokens=8, retry=Retry(max=1, interval=100))
    assert halfway._intake.take() == "taken"
    wait_until(lambda: len(engine.held) == 7, what="the claims")
    halfway._sources[0].sign_off()
    rq_queue.started_job_registry.cleanup(timestamp=time.time() + 1e6)
    assert all(job.is_failed for job in failed)
    assert retried.is_queued
    assert later.is_scheduled
    with _next(tmp_path, redis_url, rq_queue, engine):
        wait_for("started", *failed, retried, later)
        engine.let_go()
        wait_for_finished(rq_queue, 7)
    for job in [*failed, retried, later]:
        assert engine.runs[job.id] == 1
        assert value_of(job)["token_ids"] == [1, 2]
    assert rq_queue.count == 0
    assert rq_queue.failed_job_registry.count == 0
    assert rq_queue.scheduled_job_registry.count == 0
    assert rq_queue.started_job_registry.count == 0


def test_rqs_cleanup_fails_jobs_of_a_gateway_that_runs(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue
) -> None:
    engine.hold()
    jobs = enqueue_many(rq_queue, 5)
    wait_until(lambda: len(engine.held) == 5, what="the claims")
    rq_queue.started_job_registry.cleanup(timestamp=time.time() + 1e6)
    engine.let_go()
    wait_for_finished(rq_queue, 5)
    assert all(value_of(job)["token_ids"] == [1, 2] and engine.runs[job.id] == 1 for job in jobs)
    assert rq_queue.failed_job_registry.count == 0


def test_the_reply_to_a_take_is_lost(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, queue_name: str, redis_url: str
) -> None:
    jobs = enqueue_many(rq_queue, 5)
    client = connect(redis_url)
    SourceQueue(client, rq_queue, queue_name, gateway.name).take(5)  # in its name, and it does not know
    wait_for_finished(rq_queue, 5)
    _assert_each_ended_once(rq_queue, jobs, engine)
    client.close()


def test_a_job_that_waits_for_a_takeover_can_be_cancelled(
    engine: EchoEngine, halfway: Gateway, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    engine.hold()
    cancelled, other = enqueue_many(rq_queue, 2)
    assert halfway._intake.take() == "taken"
    wait_until(lambda: len(engine.held) == 2, what="the claims")
    halfway._sources[0].sign_off()
    cancelled.cancel()
    with _next(tmp_path, redis_url, rq_queue, engine):
        wait_until(lambda: cancelled.id not in engine.held, what="the cancellation in the engine")
        engine.let_go()
        wait_for("finished", other)
    assert cancelled.is_canceled


@pytest.mark.slow
def test_millrace_has_lost_a_job(engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, queue_name: str) -> None:
    """The gateway finds out within half a minute, by looking for jobs of which it has heard nothing."""
    engine.hold()
    (job,) = enqueue_many(rq_queue, 1)
    wait_until(lambda: job.id in engine.held, what="the claim")
    keys = engine.queue.keys
    rq_queue.connection.delete(keys.job(job.id), keys.body(job.id))
    engine.held.clear()
    engine.let_go()
    wait_for("finished", job, limit_s=100)
    assert value_of(job)["text"] == answer_to("hello 0")


# --- two gateways --------------------------------------------------------------------------------------------------


def test_two_gateways_share_a_queue(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    with _next(tmp_path, redis_url, rq_queue, engine).wait_until_serving() as second:
        jobs: list[Job] = []
        while not {gateway.name, second.name} <= _owners(jobs):
            jobs += enqueue_many(rq_queue, 200)
            wait_for_finished(rq_queue, len(jobs))
        assert all(engine.runs[job.id] == 1 for job in jobs)
        assert all(len(job.results()) == 1 for job in jobs)
        assert sum(worker.successful_job_count for worker in Worker.all(queue=rq_queue)) == len(jobs)


def _owners(jobs: Sequence[Job]) -> set[str | None]:
    if not jobs:
        return set()
    found = Job.fetch_many([job.id for job in jobs], connection=jobs[0].connection, serializer=JSONSerializer)
    return {job.worker_name for job in found if job is not None}


def test_a_gateway_that_was_suspended_drops_the_jobs_that_were_taken_over(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    engine.hold()
    jobs = enqueue_many(rq_queue, 50)
    wait_until(lambda: len(engine.held) == 50, what="the claims")
    gateway.process.send_signal(signal.SIGSTOP)
    with _next(tmp_path, redis_url, rq_queue, engine).wait_until_serving() as second:
        wait_until(lambda: _owners(jobs) == {second.name}, what="the takeover")
        engine.may_finish = lambda job: job.job_id != jobs[0].id
        gateway.process.send_signal(signal.SIGCONT)
        wait_for_finished(rq_queue, 49)
        wait_until(lambda: len(Worker.all(queue=rq_queue)) == 2, what="the return of the first one")
        engine.let_go()
        wait_for_finished(rq_queue, 50)
        wait_until(lambda: "no longer ours" in gateway.text(), what="the first one's log line")
    _assert_each_ended_once(rq_queue, jobs, engine)


# --- the server ----------------------------------------------------------------------------------------------------


def test_the_server_dies_and_returns(tmp_path: Path) -> None:
    with EmbeddedServer(appendonly=True) as server:
        queue_name = f"test-{uuid.uuid4().hex[:8]}"
        connection = redis.Redis.from_url(server.url)
        rq_queue = Queue("generate", connection=connection, serializer="json")
        with (
            EchoEngine(server.url, queue_name) as engine,
            GatewayProcess(tmp_path / "log", server.url, "generate", queue_name) as gateway,
        ):
            engine.hold()
            jobs = enqueue_many(rq_queue, 100)
            wait_until(lambda: len(engine.held) == 100, what="the claims")
            server.kill()
            gateway.wait_for_log("outage, seen by ")
            server.start()
            engine.let_go()
            wait_for_finished(rq_queue, 100)
            jobs += enqueue_many(rq_queue, 1)
            wait_for("finished", jobs[-1])
            wait_until(lambda: len(Worker.all(queue=rq_queue)) == 1, what="the worker's return")
            channel = f"rq:pubsub:{gateway.name}"
            wait_until(lambda: connection.pubsub_numsub(channel)[0][1] == 1, what="the new subscription")
            assert all(len(job.results()) == 1 for job in jobs)
            gateway.wait_for_log("the outage is over after ")
            assert gateway.text().count("outage, seen by ") <= 3, "the connection is closed, refused, and loads"
            assert gateway.terminate() == 0
        connection.close()
