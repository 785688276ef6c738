"""The gateway as somebody sees it who has only RQ: enqueue, look, stop, read the result."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue, Repeat, Retry, Worker
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import Callback, Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from millrace import Client
from millrace.cli import main
from millrace.producer.rq import payload as rq_payload
from millrace.results.keys import QueueKeys
from millrace.results.messages import JobError
from tests.processes import LIMIT_S, wait_until
from tests.producer.rq.parts import (
    EchoEngine,
    GatewayProcess,
    answer_to,
    enqueue,
    enqueue_many,
    num_finished,
    refreshed,
    status_of,
    value_of,
    wait_for,
    wait_for_finished,
)


def _failure(job: Job) -> str:
    wait_for("failed", job)
    result = job.latest_result()
    assert result is not None
    assert result.type == Result.Type.FAILED
    assert job.id in job.failed_job_registry
    return str(result.exc_string)


def _num_executing(queue: Queue) -> int:
    """As `rq info` counts them."""
    return int(queue.started_job_registry.count)


def _rq_info(redis_url: str, *arguments: str) -> str:
    """What `rq info --raw` prints."""
    script = f"""
import sys, redis
from rq.cli import helpers
import rq.cli.helpers as cli
connection = redis.Redis.from_url({redis_url!r})
from rq import Queue, Worker
cli.show_both([Queue(name, connection=connection) for name in sys.argv[1:]], True, False, Queue, Worker, connection)
"""
    ran = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# --- the ordinary life of a job ------------------------------------------------------------------------------------


@pytest.mark.parametrize("serializer", ["json", JSONSerializer])
def test_a_job_comes_back_as_a_dict(shared_queue: Queue, serializer: Any) -> None:
    queue = Queue(shared_queue.name, connection=shared_queue.connection, serializer=serializer)
    job = enqueue(queue, "3 + 4 =")
    wait_for("finished", job)
    value = value_of(job)
    assert value.pop("timings").keys() == {"queued_s", "prefill_s", "decode_s", "total_s"}
    assert value.pop("attempt") == 1 and value.pop("engine")
    assert value == {
        "text": answer_to("3 + 4 ="),
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0},
    }


def test_every_candidate_comes_back(shared_queue: Queue) -> None:
    job = shared_queue.enqueue("millrace.generate", prompt="hello", n=2)
    wait_for("finished", job)
    value = value_of(job)
    one = {"text": answer_to("hello"), "token_ids": [1, 2], "finish_reason": "stop"}
    assert value["outputs"] == [{"index": index, **one} for index in range(2)]
    assert value["text"] == one["text"]


@pytest.mark.parametrize("wrong", [{"n": 65}, {"n": 2, "temperature": 0}])
def test_candidates_that_cannot_be_fail_with_the_name_of_n(shared_queue: Queue, wrong: dict[str, Any]) -> None:
    job = shared_queue.enqueue("millrace.generate", prompt="hello", **wrong)
    wait_for("failed", job)
    result = job.latest_result()
    assert result is not None
    assert str(result.exc_string).startswith("invalid_request: n: ")


def test_one_positional_argument_is_the_prompt(shared_queue: Queue) -> None:
    job = shared_queue.enqueue("millrace.generate", "hello")
    wait_for("finished", job)
    assert value_of(job)["text"] == answer_to("hello")


def test_rq_tells_the_truth_at_every_moment(
    engine: EchoEngine, rq_queue: Queue, queue_name: str, redis_url: str, tmp_path: Path
) -> None:
    engine.hold()
    job = enqueue(rq_queue)
    assert status_of(job) == "queued"
    with GatewayProcess(tmp_path / "log", redis_url, rq_queue.name, queue_name) as gateway:
        gateway.wait_until_serving()
        wait_until(lambda: job.id in engine.held, what="the claim")
        assert status_of(job) == "started"
        assert (rq_queue.count, _num_executing(rq_queue), num_finished(rq_queue)) == (0, 1, 0)
        info = _rq_info(redis_url, rq_queue.name)
        assert f"queue {rq_queue.name} 0, 1 executing, 0 finished, 0 failed" in info
        assert f"worker {gateway.name} (" in info
        assert "busy" in info
        (worker,) = Worker.all(queue=rq_queue)
        assert worker.get_current_job_id() == job.id
        job = refreshed(job)
        assert job.worker_name == gateway.name
        assert job.started_at is not None

        engine.let_go()
        wait_for("finished", job)
        assert (rq_queue.count, _num_executing(rq_queue), num_finished(rq_queue)) == (0, 0, 1)
        assert job.get_executions() == []
        assert f"idle {rq_queue.name}. jobs: 1 finished, 0 failed" in _rq_info(redis_url, rq_queue.name)
        job = refreshed(job)
        assert job.started_at is not None
        assert job.ended_at is not None
        (result,) = job.results()
        assert result.type == Result.Type.SUCCESSFUL
        assert result.worker_name == gateway.name
        assert gateway.terminate() == 0
    assert Worker.all(queue=rq_queue) == []


@pytest.mark.usefixtures("engine")
def test_a_health_check_asks_for_the_gateway_of_this_host(
    rq_queue: Queue, queue_name: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ["gateway", "rq", "--redis", redis_url, "--queues", rq_queue.name, "--to-queue", queue_name]
    assert main([*place, "--check"]) == 1, "the engine lives, and no gateway"
    with GatewayProcess(tmp_path / "log", redis_url, rq_queue.name, queue_name) as gateway:
        gateway.wait_until_serving()
        assert main([*place, "--check"]) == 0
        assert main([*place, "--queues", f"{rq_queue.name},other", "--check"]) == 1
        for other in ("another-host", f"{socket.gethostname()}-{gateway.process.pid}"):
            with monkeypatch.context() as patch:
                patch.setattr("millrace.producer.rq.gateway.socket.gethostname", partial(str, other))
                assert main([*place, "--check"]) == 1
        gateway.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: main([*place, "--check"]) == 1, what="the end of the heartbeat's time")


def test_a_queue_that_no_engine_has_ever_served_is_reported_once(
    gateway: GatewayProcess, rq_queue: Queue, queue_name: str, redis_url: str
) -> None:
    words = f"no engine has ever served queue '{queue_name}'"
    enqueue(rq_queue)
    gateway.wait_for_log(words)
    more = enqueue_many(rq_queue, 3)
    with EchoEngine(redis_url, queue_name):
        wait_for("finished", *more)
        wait_for("finished", enqueue(rq_queue))
    (line,) = [line for line in gateway.text().splitlines() if words in line]
    assert "WARNING" in line
    assert f"`millrace serve --queue {queue_name}` starts an engine" in line


def test_a_queue_that_was_served_is_not_reported(gateway: GatewayProcess, rq_queue: Queue, engine: EchoEngine) -> None:
    wait_for("finished", enqueue(rq_queue))
    assert "no engine" not in gateway.text()


def test_jobs_wait_in_front_of_a_full_queue_and_are_not_failed(
    gateway: GatewayProcess, engine: EchoEngine, rq_queue: Queue, queue_name: str, redis_url: str
) -> None:
    settings = QueueKeys(queue_name).settings
    rq_queue.connection.hset(settings, "max_queued_jobs", 1)
    with Client(redis_url, queue=queue_name) as client:
        client.pause()
        enqueue_many(rq_queue, 300)
        wait_until(lambda: "queue is full: 299 RQ jobs wait" in gateway.text(), what="the gateway's complaint")
        assert client.stats().queued == 1
        rq_queue.connection.hdel(settings, "max_queued_jobs")
        client.resume()
    wait_for_finished(rq_queue, 300)


def test_a_tenant_at_its_limit_keeps_no_other_out_and_does_not_empty_rqs_queue(
    engine: EchoEngine, rq_queue: Queue, queue_name: str, redis_url: str, tmp_path: Path
) -> None:
    settings = QueueKeys(queue_name).settings
    rq_queue.connection.hset(settings, "tenant_max_queued_jobs", 1)
    place = (redis_url, rq_queue.name, queue_name)
    with (
        Client(redis_url, queue=queue_name) as client,
        GatewayProcess(tmp_path / "log", *place, "--max-in-flight", "6") as gateway,
    ):
        client.pause()
        many = [enqueue(rq_queue, tenant="many") for _ in range(4)]
        wait_until(lambda: "queue is full: 3 RQ jobs wait" in gateway.text(), what="the gateway's complaint")
        few = enqueue(rq_queue, tenant="few")
        more = [enqueue(rq_queue, tenant="many") for _ in range(4)]
        wait_until(lambda: client.stats().queued == 2, what="the job of the other tenant")
        assert client.get(few.id).state == "queued"
        wait_until(lambda: rq_queue.count == 3, what="a full gateway")
        rq_queue.connection.hdel(settings, "tenant_max_queued_jobs")
        client.resume()
        wait_for("finished", few, *many, *more)


def test_rq_info_itself_can_read_it(redis_url: str, shared_queue: Queue) -> None:
    command = [sys.executable, "-m", "rq.cli", "info", "--url", redis_url, shared_queue.name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "COLUMNS": "80"})
    if "unix://" in redis_url and ran.returncode != 0:
        pytest.skip("this rq takes no unix socket")
    assert ran.returncode == 0, ran.stderr
    assert "0 executing" in ran.stdout


def test_thousands_are_in_flight_at_once(
    engine: EchoEngine, rq_queue: Queue, queue_name: str, redis_url: str, tmp_path: Path
) -> None:
    engine.hold()
    jobs = enqueue_many(rq_queue, 2000)
    with GatewayProcess(tmp_path / "log", redis_url, rq_queue.name, queue_name):
        wait_until(lambda: len(engine.held) == 1024, what="a full gateway")
        assert _num_executing(rq_queue) == 1024
        assert rq_queue.count == 2000 - 1024
        engine.let_go()
        wait_for_finished(rq_queue, 2000)
    assert _num_executing(rq_queue) == 0
    assert all(engine.runs[job.id] == 1 for job in jobs)
    assert value_of(jobs[1234])["text"] == answer_to("hello 1234")


def test_the_result_lives_as_long_as_the_producer_said(shared_queue: Queue) -> None:
    short, endless, none = (enqueue(shared_queue, result_ttl=ttl) for ttl in (77, -1, 0))
    wait_for("finished", short, endless)
    connection = shared_queue.connection
    assert 0 < connection.ttl(short.key) <= 77
    assert 0 < connection.ttl(f"rq:results:{short.id}") <= 77
    assert connection.ttl(endless.key) == -1
    wait_until(lambda: not connection.exists(none.key), what="the end of what nobody keeps")
    assert none.id not in shared_queue.started_job_registry


def test_two_queues_are_served_and_the_first_comes_first(
    engine: EchoEngine, rq_connection: redis.Redis, rq_queue: Queue, queue_name: str, redis_url: str, tmp_path: Path
) -> None:
    second = Queue(rq_queue.name + "-2", connection=rq_connection, serializer="json")
    engine.hold()
    last, first = enqueue_many(second, 1030), enqueue_many(rq_queue, 3)
    names = f"{rq_queue.name},{second.name}"
    with GatewayProcess(tmp_path / "log", redis_url, names, queue_name).wait_until_serving():
        wait_until(lambda: len(engine.held) == 1024, what="a full gateway")
        assert all(job.id in engine.held for job in first)
        assert second.count == 1030 - 1021
        engine.let_go()
        wait_for_finished(second, len(last))
        late = enqueue(second)
        wait_for("finished", late)


# --- bad input -----------------------------------------------------------------------------------------------------


def test_bad_input_fails_with_a_reason_and_costs_no_other_job(shared_queue: Queue, shared_engine: EchoEngine) -> None:
    pickled = Queue(shared_queue.name, connection=shared_queue.connection)
    good = enqueue(shared_queue)
    bad = {
        'serializer="json"': pickled.enqueue("millrace.generate", prompt="hello"),
        "max_tokens: must be an integer from 1": shared_queue.enqueue("millrace.generate", "a", max_tokens=0),
        "temperature: must be a": shared_queue.enqueue("millrace.generate", "a", temperature=float("nan")),
        "max_token: is not a field": shared_queue.enqueue("millrace.generate", "a", max_token=1),
        "not 'os.system'": shared_queue.enqueue("os.system", "true"),
        "id: must match": enqueue(shared_queue, job_id="x" * 129),
        "deadline_s: is over before": enqueue(shared_queue, run_at=9e9, deadline_s=5),
        "on_success, on_failure: ": enqueue(
            shared_queue, on_success=Callback("os.getpid"), on_failure=Callback("os.getpid")
        ),
    }
    after = enqueue(shared_queue)
    for message, job in bad.items():
        assert message in _failure(job)
        assert job.id not in shared_engine.runs
    wait_for("finished", good, after)
    assert _num_executing(shared_queue) == 0


def test_what_was_refused_is_still_there_to_look_at(shared_queue: Queue) -> None:
    job = Queue(shared_queue.name, connection=shared_queue.connection).enqueue("millrace.generate", prompt="hello")
    _failure(job)
    assert refreshed(job).kwargs == {"prompt": "hello"}


def test_a_decompression_bomb_is_bounded(shared_queue: Queue) -> None:
    job = shared_queue.create_job("millrace.generate", kwargs={"prompt": "x"})
    job.save()
    bomb = zlib.compress(b" " * (rq_payload.MAX_PAYLOAD_BYTES + 1))
    shared_queue.connection.hset(job.key, mapping={"data": bomb, "exc_info": bomb})
    shared_queue.push_job_id(job.id)
    wait_for("failed", job)
    result = Result.fetch_latest(job)
    assert result is not None
    assert "larger than" in str(result.exc_string)


def test_what_is_no_job_at_all_is_dropped(shared_queue: Queue) -> None:
    connection = shared_queue.connection
    malformed = shared_queue.create_job("millrace.generate", kwargs={"prompt": "x"})
    malformed.save()
    connection.hset(malformed.key, mapping={"status": "no-such-status", "timeout": "soon"})
    connection.set("rq:job:a-string", "not a hash")
    for job_id in (b"gone", b"a-string", b"colon:in:it", b"\xff\xfe", b"a b", malformed.id.encode()):
        connection.rpush(shared_queue.key, job_id)
    choking = shared_queue.create_job("millrace.generate", kwargs={}, retry=Retry(max=1))
    choking.save()
    connection.hset(choking.key, "retry_intervals", "[]")
    connection.rpush(shared_queue.key, choking.id)
    parent = shared_queue.create_job("millrace.generate", kwargs={"prompt": "x"})
    parent.save()
    child = enqueue(shared_queue, depends_on=parent)
    connection.hset(child.key, "status", "no-such-status")
    shared_queue.push_job_id(parent.id)
    after = enqueue(shared_queue)
    wait_for("finished", after, parent)
    _failure(choking)
    wait_until(lambda: connection.hget(malformed.key, "status") == b"failed", what="the failure")
    assert connection.llen(shared_queue.intermediate_queue_key) == 0
    assert _num_executing(shared_queue) == 0


# --- other ends ----------------------------------------------------------------------------------------------------


def test_a_job_that_fails_in_millrace_fails_in_rq(shared_queue: Queue, shared_engine: EchoEngine) -> None:
    shared_engine.errors["too-long"] = JobError(kind="invalid_request", message="prompt: 900 tokens, 512 fit")
    job = enqueue(shared_queue, job_id="too-long")
    assert _failure(job) == "failed: invalid_request: prompt: 900 tokens, 512 fit"
    assert job.return_value() is None
    assert _num_executing(shared_queue) == 0


def test_a_job_that_millrace_cancels_fails_in_rq(engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue) -> None:
    engine.hold()
    job = enqueue(rq_queue)
    wait_until(lambda: job.id in engine.held, what="the claim")
    engine.queue.cancel(job.id)
    assert _failure(job) == "cancelled"


def test_the_stop_command_stops_a_job_and_no_other(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue
) -> None:
    engine.hold()
    stopped, other = enqueue(rq_queue), enqueue(rq_queue)
    wait_until(lambda: len(engine.held) == 2, what="the claims")
    send_stop_job_command(rq_queue.connection, stopped.id, serializer=JSONSerializer)
    wait_for("stopped", stopped)
    assert stopped.id in rq_queue.failed_job_registry
    assert status_of(other) == "started"
    engine.let_go()
    wait_for("finished", other)


def test_the_stop_command_may_come_as_soon_as_a_job_is_started(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue
) -> None:
    """The gateway writes "started" before it submits the jobs."""
    engine.hold()
    jobs = enqueue_many(rq_queue, 200)
    while rq_queue.connection.hget(jobs[-1].key, "status") != b"started":
        pass
    for job in jobs[-20:]:
        send_stop_job_command(rq_queue.connection, job.id, serializer=JSONSerializer)
    wait_for("stopped", *jobs[-20:])


def test_jobs_that_their_producer_gives_up_are_cancelled(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue
) -> None:
    engine.hold()
    cancelled, deleted = enqueue(rq_queue), enqueue(rq_queue)
    wait_until(lambda: len(engine.held) == 2, what="the claims")
    cancelled.cancel()
    deleted.delete()
    wait_until(lambda: not engine.held, what="the end in the engine")
    wait_until(lambda: not rq_queue.connection.keys(f"millrace:gateway:rq:taken:*:{rq_queue.name}"), what="the end")
    assert {engine.queue.get(job.id).state for job in (cancelled, deleted)} == {"cancelled"}
    assert _num_executing(rq_queue) == 0
    assert status_of(cancelled) == "canceled"
    assert cancelled.id in rq_queue.canceled_job_registry
    assert not rq_queue.connection.exists(deleted.key)


def test_a_cancelled_job_is_never_run(engine: EchoEngine, rq_queue: Queue, redis_url: str, tmp_path: Path) -> None:
    cancelled, after = enqueue(rq_queue), enqueue(rq_queue)
    cancelled.cancel()
    rq_queue.connection.lpush(rq_queue.key, cancelled.id)  # as when the cancellation comes just after the pop
    with GatewayProcess(tmp_path / "log", redis_url, rq_queue.name, engine.queue.keys.queue):
        wait_for("finished", after)
    assert status_of(cancelled) == "canceled"
    assert cancelled.id not in engine.runs


# --- more of RQ ----------------------------------------------------------------------------------------------------


def test_dependents_start_when_their_parents_are_done(shared_queue: Queue) -> None:
    parents = [enqueue(shared_queue, f"parent {i}") for i in range(3)]
    child = enqueue(shared_queue, "child", depends_on=parents)
    grandchild = enqueue(shared_queue, "grandchild", depends_on=child)
    wait_for("finished", grandchild)
    assert grandchild.started_at is None or child.ended_at is None or grandchild.started_at >= child.ended_at
    orphan = enqueue(shared_queue, depends_on=enqueue(shared_queue, job_id="y" * 129))
    _failure(Job.fetch("y" * 129, connection=shared_queue.connection, serializer=JSONSerializer))
    assert status_of(orphan) == "deferred"


def test_a_retry_and_a_requeue_run_again_as_a_new_millrace_job(shared_queue: Queue, shared_engine: EchoEngine) -> None:
    error = JobError(kind="internal", message="out of luck")
    names = ["retried", *(f"retried.r{number}" for number in range(1, 6))]
    shared_engine.errors |= dict.fromkeys(names, error)
    job = enqueue(shared_queue, job_id="retried", retry=Retry(max=5))
    assert _failure(job) == "failed: internal: out of luck"
    assert [shared_engine.runs[name] for name in names] == [1] * 6
    job.requeue()
    wait_for("finished", job)
    assert shared_engine.runs["retried.r6"] == 1
    assert job.id not in shared_queue.failed_job_registry


def test_a_retry_can_wait(shared_queue: Queue, shared_engine: EchoEngine) -> None:
    shared_engine.errors["later"] = JobError(kind="internal", message="out of luck")
    job = enqueue(shared_queue, job_id="later", retry=Retry(max=1, interval=60))
    wait_for("scheduled", job)
    assert job.id in shared_queue.scheduled_job_registry
    assert refreshed(job).retries_left == 0


def test_a_repeated_job_runs_again_with_all_that_its_producer_gave_it(
    shared_queue: Queue, shared_engine: EchoEngine
) -> None:
    job = enqueue(shared_queue, job_id="repeated", repeat=Repeat(times=1), meta={"ours": 1}, description="for us")
    wait_until(lambda: len(job.results()) == 2 and job.is_finished, what="the second end")
    assert [shared_engine.runs[name] for name in ("repeated", "repeated.r1")] == [1, 1]
    job = refreshed(job)
    assert (job.meta, job.description, job.kwargs["prompt"]) == ({"ours": 1}, "for us", "hello")


def test_a_new_job_under_an_old_id_is_a_new_job(shared_queue: Queue) -> None:
    first = enqueue(shared_queue, "first", job_id="reused")
    wait_for("finished", first)
    second = enqueue(shared_queue, "second", job_id="reused")
    wait_for("finished", second)
    assert value_of(second)["text"] == answer_to("second")


def test_an_id_that_runs_for_somebody_else_is_a_conflict(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue
) -> None:
    engine.hold()
    first = enqueue(rq_queue, "first", job_id="taken")
    wait_until(lambda: "taken" in engine.held, what="the claim")
    other = Queue(rq_queue.name + "-other", connection=rq_queue.connection, serializer="json")
    del first
    with GatewayProcess(gateway.log.with_name("other.log"), _url(gateway), other.name, engine.queue.keys.queue):
        second = enqueue(other, "second", job_id="taken")
        wait_for("failed", second)
        assert "conflict" in str(second.latest_result().exc_string)  # type: ignore[union-attr]


def test_a_suspended_gateway_takes_nothing(engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue) -> None:
    suspend(rq_queue.connection)
    try:
        wait_until(lambda: Worker.all(queue=rq_queue)[0].get_state() == "suspended", what="the suspension")
        job = enqueue(rq_queue)

        wait_until(_Heartbeats(rq_queue, 2).have_come)
        assert status_of(job) == "queued"
    finally:
        resume(rq_queue.connection)
    wait_for("finished", job)


class _Heartbeats:
    """Counts the heartbeats of the only worker of a queue."""

    def __init__(self, queue: Queue, number: int) -> None:
        self._queue = queue
        self._number = number
        self._seen: set[Any] = set()

    def have_come(self) -> bool:
        self._seen.add(Worker.all(queue=self._queue)[0].last_heartbeat)
        return len(self._seen) >= self._number


# --- the process ---------------------------------------------------------------------------------------------------


def test_an_idle_gateway_uses_next_to_no_cpu(gateway: GatewayProcess, rq_queue: Queue) -> None:
    def cpu_s() -> float:
        fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before_s, started_s = cpu_s(), time.monotonic()
    wait_until(_Heartbeats(rq_queue, 5).have_come)
    assert cpu_s() - before_s <= 0.02 * (time.monotonic() - started_s) + 0.01  # the clock has ticks of 10 ms


def test_sigterm_leaves_the_jobs_to_the_next_gateway(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    engine.hold()
    jobs = enqueue_many(rq_queue, 50)
    wait_until(lambda: len(engine.held) == 50, what="the claims")
    assert gateway.terminate() == 0
    assert Worker.all(queue=rq_queue) == []
    assert _num_executing(rq_queue) == 50
    assert all(status_of(job) == "started" for job in jobs)
    gateways = f"millrace:gateway:rq:alive:{engine.queue.keys.queue}:{rq_queue.name}"
    assert rq_queue.connection.zscore(gateways, gateway.name) == 0, "the next one takes the jobs at once"
    with GatewayProcess(tmp_path / "next.log", redis_url, rq_queue.name, engine.queue.keys.queue) as following:
        following.wait_until_serving()
        wait_until(lambda: refreshed(jobs[0]).worker_name == following.name, what="the takeover")
        engine.let_go()
        wait_for_finished(rq_queue, 50)
    assert all(engine.runs[job.id] == 1 for job in jobs)


def test_rqs_shutdown_command_ends_it(gateway: GatewayProcess, rq_queue: Queue) -> None:
    wait_until(
        lambda: rq_queue.connection.pubsub_numsub(f"rq:pubsub:{gateway.name}")[0][1] == 1, what="the subscription"
    )
    send_shutdown_command(rq_queue.connection, gateway.name)
    assert gateway.process.wait(LIMIT_S) == 0


def test_no_redis_is_one_sentence(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path / "log", "unix:///nowhere/redis.sock", "a", "b") as gateway:
        assert gateway.process.wait(LIMIT_S) == 4
        assert "Cannot connect to Redis" in gateway.text()
        assert "Traceback" not in gateway.text()


def _url(gateway: GatewayProcess) -> str:
    arguments = gateway.process.args
    assert isinstance(arguments, list)
    return str(arguments[arguments.index("--redis") + 1])


assert JobStatus.STARTED.value == "started"
