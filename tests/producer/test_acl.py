"""The users that docs/deployment.md gives least rights: each can do its part, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from rq import Queue, Retry
from rq.command import send_stop_job_command

from millrace import Client, GenerationRequest, RedisUnavailable
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.messages import EngineId, JobError
from millrace.results.queue import JobQueue
from millrace.results.transport import Transport
from tests.processes import wait_until
from tests.producer.rq.parts import EchoEngine, GatewayProcess, enqueue, wait_for
from tests.results.engines import Engine

DEPLOYMENT = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text()
pytestmark = pytest.mark.new_redis  # the rules name its commands

RULES = dict(re.findall(r"^(ACL SETUSER (?:producer|engine|reader|gateway)) (.*)$", DEPLOYMENT, re.MULTILINE))


@pytest.fixture(scope="module")
def url_of() -> Iterator[dict[str, str]]:
    """By user, the URL; and `admin`, who may do everything."""
    with EmbeddedServer(appendonly=True) as server:
        admin = Transport(connect(server.url))
        for command, rules in RULES.items():
            admin.send((*command.split(), *rules.split()))
        path = server.url.removeprefix("unix://").split("?")[0]
        users = [command.split()[-1] for command in RULES]
        yield {user: f"unix://{user}:secret@{path}" for user in users} | {"admin": server.url}
        admin.close()


def test_the_readme_has_the_rules_of_all_four() -> None:
    assert [command.split()[-1] for command in RULES] == ["producer", "engine", "reader", "gateway"]


def test_each_user_can_do_its_part(url_of: dict[str, str]) -> None:
    with Client(url_of["producer"]) as producer, Client(url_of["reader"]) as reader:
        meta = {"a": 1}
        producer.submit("x", job_id="late", delay_s=100, deadline_s=1000, meta=meta, batch="b", durability="disk")
        producer.submit_many([GenerationRequest(id=f"j{n}", prompt="x") for n in range(6)], batch="b")
        jobs = JobQueue(connect(url_of["engine"]))
        jobs.check_server()
        assert jobs.read_inbox("0", 10) == []
        engine = Engine(jobs)
        first, second, third, fourth = engine.claim(4)
        assert producer.cancel(fourth.job_id) == "cancelling"
        assert jobs.wait_for_signal(engine.id, 1, include_wake=True) is not None
        events = reader.stream(first.job_id)
        assert engine.show(first, 0, [1], "x") == "ok"
        assert next(events).text == "x"
        assert engine.finish(first) == "ok"
        assert [event.state for event in events] == ["finished"]
        assert engine.finish(second, state="failed", is_retryable=True) == "retrying"
        assert engine.finish(third, state="failed") == "ok"
        engine.beat()
        jobs.recover()
        assert reader.wait(first.job_id, 60).text == "x"
        assert [job.id for job in reader.as_completed([first.job_id], 5)] == [first.job_id]
        assert (reader.get("late").meta, reader.position("j5").state) == (meta, "queued")
        assert reader.batch_status("b").total == 7
        assert reader.stats().queued == 2
        assert producer.retry(third.job_id) == "j2.r1"
        producer.retry_all()
        producer.retry_batch("b")
        producer.pause()
        producer.resume()
        assert producer.sleep(1) == [engine.id]
        assert producer.wake() == [engine.id]
        assert producer.reset_prefix_cache() == [engine.id]
        assert producer.stats().sleep_levels == {engine.id: 0}
        producer.cancel_batch("b")
        producer.cancel_waiting()
        producer.delete(first.job_id)
        assert "deleted" in producer.delete_batch("b").values()
        for state in ("queued", "delayed", "running", "failed"):
            reader.list_jobs(state)
        jobs.deregister(engine.id)


def test_a_gateway_can_do_its_part_and_warns_of_nothing_it_may_not(url_of: dict[str, str], tmp_path: Path) -> None:
    place = (url_of["gateway"], "from-rq", "default")
    with (
        redis.Redis.from_url(url_of["admin"]) as connection,
        EchoEngine(url_of["engine"], "default") as engine,
        GatewayProcess(tmp_path / "first", *place) as first,
    ):
        queue = Queue("from-rq", connection=connection, serializer="json")
        first.wait_until_serving()
        engine.errors["fails"] = JobError(kind="internal", message="as the test wants it")
        parent = enqueue(queue)
        wait_for("finished", enqueue(queue, depends_on=parent), parent, enqueue(queue, prompt="n", n=2))
        wait_for("failed", enqueue(queue, job_id="fails"), queue.enqueue("os.getpid"))
        wait_for("finished", enqueue(queue, job_id="again", retry=Retry(max=1)))
        engine.hold()
        stopped, cancelled, kept = (enqueue(queue) for _ in range(3))
        wait_until(lambda: {stopped.id, cancelled.id, kept.id} <= engine.held.keys(), what="the claims")
        send_stop_job_command(connection, stopped.id)
        cancelled.cancel()
        wait_for("stopped", stopped)
        first.kill()
        with GatewayProcess(tmp_path / "second", *place) as second:
            engine.let_go()
            wait_for("finished", kept)
            assert second.wait_until_serving().terminate() == 0
        logs = first.text() + second.text()
        assert "taking over" in logs
        assert not re.search("permi|CLIENT|INFO: check", logs)


@pytest.mark.parametrize("user", ["producer", "engine", "reader", "gateway"])
def test_nobody_can_do_more(url_of: dict[str, str], user: str) -> None:
    transport = Transport(connect(url_of[user]))
    for command in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("SET", "mine", "1"), ("ACL", "LIST")):
        with pytest.raises(RedisUnavailable, match="does not permit this"):
            transport.send(command)
    with Client(url_of[user], queue="other") as other, pytest.raises(RedisUnavailable, match="permit"):
        other.stats()


def test_a_reader_changes_no_job_and_a_producer_cannot_claim(url_of: dict[str, str]) -> None:
    engine = Engine(JobQueue(connect(url_of["engine"])))
    with Client(url_of["producer"]) as producer:
        producer.submit("x", job_id="runs")
        engine.claim_one()
        producer.submit("x", job_id="waits")
    with Client(url_of["reader"]) as reader:
        with pytest.raises(RedisUnavailable, match="permit"):
            reader.submit("x", job_id="not-mine")
        for job_id in ("runs", "waits"):
            with pytest.raises(RedisUnavailable, match="permit"):
                reader.cancel(job_id)
            assert reader.get(job_id).state == ("running" if job_id == "runs" else "queued")
        for change in (reader.pause, reader.resume, reader.sleep, reader.reset_prefix_cache):
            with pytest.raises(RedisUnavailable, match="permit"):
                change()
    by_hand = Transport(connect(url_of["reader"]))
    for key in (engine.queue.keys.job("runs"), engine.queue.keys.body("waits"), engine.queue.keys.wake):
        with pytest.raises(RedisUnavailable, match="permit"):
            by_hand.send(("DEL", key))
    with pytest.raises(RedisUnavailable, match="permit"):
        JobQueue(connect(url_of["producer"])).heartbeat(EngineId("thief"), 1000, {})
