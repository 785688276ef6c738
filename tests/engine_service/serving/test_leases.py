"""What an engine hears of its jobs through its heartbeats."""

from __future__ import annotations

import queue as queues
import time
from collections.abc import Iterator

import pytest
import redis

from millrace.embedded import EmbeddedServer
from millrace.engine_service.serving.leases import Leases, new_engine_id
from millrace.results.connection import connect
from millrace.results.errors import RedisUnavailable
from millrace.results.messages import EngineId, Reconciliation
from millrace.results.outage import Outage
from millrace.results.queue import JobQueue
from tests.processes import wait_until
from tests.results.engines import FINGERPRINT, Engine, submit

News = queues.SimpleQueue[Reconciliation]


@pytest.fixture
def queue(redis_url: str, queue_name: str) -> Iterator[JobQueue]:
    queue = JobQueue(connect(redis_url), queue_name)
    yield queue
    queue.close()


@pytest.fixture
def news() -> News:
    return queues.SimpleQueue()


@pytest.fixture
def leases(queue: JobQueue, news: News) -> Iterator[Leases]:
    leases = Leases(queue, new_engine_id(), 0.4, pending=dict, on_news=news.put, sleep_level=lambda: 0)
    leases.start()
    yield leases
    leases.stop()


def hear(news: News, kind: str) -> list[str]:
    """The jobs of the first heartbeat that has something of this kind to say."""
    while not (found := getattr(news.get(timeout=60), kind)):
        pass
    return list(found)


def test_engines_of_other_models_on_the_queue_are_reported_once(
    queue: JobQueue, news: News, caplog: pytest.LogCaptureFixture
) -> None:
    queue.heartbeat(EngineId("other"), 60_000, {}, model="theirs")
    queue.heartbeat(EngineId("same"), 60_000, {}, model="ours")
    leases = Leases(queue, new_engine_id(), 0.4, pending=dict, on_news=news.put, sleep_level=lambda: 0, model="ours")
    leases.start()
    for _ in range(4):
        news.get(timeout=60)
    leases.stop()
    (record,) = [each for each in caplog.records if "serves" in each.getMessage()]
    assert record.getMessage().startswith("engine other of this queue serves theirs and not ours: a job that names no ")
    assert record.levelname == "WARNING"


def test_a_deadline_that_passes_is_told_by_the_heartbeat_alone(
    queue: JobQueue, leases: Leases, news: News, redis_client: redis.Redis
) -> None:
    """Nobody listens to the signals here: the word may be lost, the heartbeat's news come again."""
    submit(queue, "late", deadline_ms=3_600_000)
    assert [job.job_id for job in leases.claim("c1", 1, 1000, FINGERPRINT).jobs] == ["late"]
    redis_client.zadd(f"{queue.keys.prefix}deadlines", {"late": 1})
    assert hear(news, "expired") == hear(news, "expired") == ["late"]


def test_a_server_that_evicts_after_an_outage_has_one_line_for_each_outage(
    caplog: pytest.LogCaptureFixture, news: News
) -> None:
    with EmbeddedServer() as server, connect(server.url) as client:
        queue, outage = JobQueue(connect(server.url)), Outage()
        leases = Leases(
            queue, new_engine_id(), 0.4, pending=dict, on_news=news.put, sleep_level=lambda: 0, outage=outage
        )
        leases.start()
        for num_outages in (1, 2):
            client.config_set("maxmemory-policy", "allkeys-lru")
            outage.note_failure(RedisUnavailable("refused"))
            outage.note_success()
            wait_until(lambda: leases._num_checked == num_outages)  # noqa: B023
            hear_beats(news, 3)
            errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert len(errors) == num_outages
            assert "has maxmemory-policy allkeys-lru" in errors[-1]
        leases.stop()
        queue.close()


def hear_beats(news: News, count: int) -> None:
    while not news.empty():
        news.get()
    for _ in range(count):
        news.get(timeout=60)


def test_an_engine_that_was_cut_off_takes_no_jobs_of_others_that_were_too(
    queue: JobQueue, news: News, redis_client: redis.Redis
) -> None:
    """Both heartbeats have lapsed. The other engine comes back a little later, and still has its job."""
    leases = Leases(queue, new_engine_id(), 600, pending=dict, on_news=news.put, sleep_level=lambda: 0)
    leases.start()
    other = Engine(queue)
    submit(queue, "a")
    (job,) = other.claim()
    with leases._calls:  # no heartbeat comes through
        leases._beat_at_s -= 601
        redis_client.delete(queue.keys.prefix + "engine:" + leases.engine_id, queue.keys.prefix + "engine:" + other.id)
        while not news.empty():
            news.get()
    for _ in range(2):  # what follows the first heartbeat is over when the second one comes
        leases.beat_soon()
        news.get(timeout=60)
    assert other.beat().lost == []
    assert other.finish(job) == "ok"
    leases.stop()


def test_the_jobs_of_an_engine_that_falls_silent_are_taken_when_its_time_is_over(queue: JobQueue) -> None:
    """And not only when this engine, whose own limit is longer, sends its next heartbeat: after 150 s."""
    other = Engine(queue)
    submit(queue, "a")
    other.claim()
    other.beat(300)
    leases = Leases(queue, new_engine_id(), 600, pending=dict, on_news=lambda _: None, sleep_level=lambda: 0)
    leases.start()
    limit_s = time.monotonic() + 100
    while queue.get("a").state == "running":
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    leases.stop()


def test_the_engine_loop_waits_for_no_call(queue: JobQueue, leases: Leases) -> None:
    submit(queue, "a")
    (job,) = leases.claim("c1", 1, 1000, FINGERPRINT).jobs
    with leases._calls:  # as while Redis does not answer
        leases.drop(job.job_id, job.lease)
    assert leases._held == {}


def test_a_cancellation_and_a_reader_are_told_too(queue: JobQueue, leases: Leases, news: News) -> None:
    submit(queue, "a")
    submit(queue, "b", is_streamed=True)
    leases.claim("c1", 2, 1000, FINGERPRINT)
    queue.cancel("a")
    assert hear(news, "cancelled") == ["a"]
    assert hear(news, "watched") == ["b"]


def test_a_server_that_was_emptied_is_named(
    queue: JobQueue, leases: Leases, news: News, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that is back without its last writes, where jobs wait again. One lost job of several is no such case."""
    for name in ("one", "two"):
        submit(queue, name)
    assert len(leases.claim("c1", 2, 1000, FINGERPRINT).jobs) == 2
    redis_client.delete(f"{queue.keys.prefix}job:one")
    assert hear(news, "lost") == ["one"]
    assert "emptied" not in caplog.text
    redis_client.delete(*redis_client.scan_iter(f"{queue.keys.prefix}*"))
    assert hear(news, "lost") == ["two"]
    assert "Redis has none of the leases of this engine any more (1 jobs): was it emptied, or restarted" in caplog.text


def test_a_job_that_was_lost_is_held_no_longer(queue: JobQueue, leases: Leases, news: News) -> None:
    submit(queue, "a")
    (job,) = leases.claim("c1", 1, 1000, FINGERPRINT).jobs
    queue.deregister(leases.engine_id)
    assert hear(news, "lost") == [job.job_id]
    assert leases._held == {}


def test_an_engine_that_starts_while_the_server_is_away_registers_when_it_is_back() -> None:
    """The server may be restarted between the first check of its URL and the end of the start, which takes long."""
    with EmbeddedServer() as server:
        queue = JobQueue(connect(server.url), "q")
        news = News()
        server.stop()
        leases = Leases(queue, new_engine_id(), 0.4, pending=dict, on_news=news.put, sleep_level=lambda: 0)
        leases.start()
        server.start()
        news.get(timeout=60)
        leases.stop()
        queue.close()
