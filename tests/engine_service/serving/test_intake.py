"""The threads that bring work in: what breaks one of them, and what it costs."""

from __future__ import annotations

import queue as queues
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import redis

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine
from millrace.engine_service.generation import Generation
from millrace.engine_service.observe.health import Health
from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.serving.capacity import Capacity
from millrace.engine_service.serving.inbox import Inbox
from millrace.engine_service.serving.intake import Intake
from millrace.engine_service.serving.jobs import Arrived, EngineEvent, Prepared, Refused
from millrace.engine_service.serving.leases import Leases, new_engine_id
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig
from millrace.producer.request import GenerationRequest
from millrace.producer.wire import parse_body
from millrace.results.connection import connect
from millrace.results.messages import Reconciliation
from millrace.results.scripts import Command, script_command
from millrace.results.transport import Reply
from tests.processes import wait_until
from tests.results.engines import FINGERPRINT, submission, submit
from tests.results.engines import Engine as EngineOfQueue
from tests.results.full_queue import FullQueue
from tests.results.test_fingerprint import half_done

BODY = b'{"prompt_token_ids":[1,2,3],"max_tokens":2}'

Connect = Callable[[], FullQueue]


@pytest.fixture
def connect_queue(redis_url: str, queue_name: str) -> Iterator[Connect]:
    with ExitStack() as stack:

        def make() -> FullQueue:
            queue = FullQueue(connect(redis_url), queue_name)
            stack.callback(queue.close)
            return queue

        yield make


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    executor = UniprocExecutor(WorkerConfig(model="", num_blocks=64, block_size=4), worker_module="tests.executor.stub")
    engine = Engine(executor, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    engine.start()
    yield engine
    engine.shutdown()


class Parts:
    """What an engine has for its work to come in, on queues of its own."""

    def __init__(self, connect_queue: Connect, engine: Engine) -> None:
        self.events: queues.SimpleQueue[EngineEvent] = queues.SimpleQueue()
        self.news: queues.SimpleQueue[Reconciliation] = queues.SimpleQueue()
        self.lease_queue, self.inbox_queue = connect_queue(), connect_queue()
        self.leases = Leases(
            self.lease_queue, new_engine_id(), 0.4, pending=dict, on_news=self.news.put, sleep_level=lambda: 0
        )
        self.capacity = Capacity(8, 1000)
        self.intake = Intake(
            connect_queue,
            self.leases,
            self.capacity,
            Admission(engine.facts, None, []),
            model_names=("stub",),
            fingerprint=FINGERPRINT,
            post=self.events.put,
        )
        self.inbox = Inbox(self.inbox_queue)
        self.leases.start()

    def stop(self) -> None:
        self.inbox.stop()
        if self.intake.threads[0].ident is not None:
            self.intake.stop()
        self.leases.stop()
        for thread in (*self.intake.threads, self.inbox.thread):
            if thread.ident is not None:
                thread.join()


@pytest.fixture
def parts(connect_queue: Connect, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    monkeypatch.setattr("millrace.engine_service.serving.intake._BLOCK_S", 0.05)
    monkeypatch.setattr("millrace.engine_service.serving.inbox._BLOCK_MS", 50)
    for module in ("results.outage", "engine_service.serving.inbox"):
        monkeypatch.setattr(f"millrace.{module}.RETRY_S", 0.05)
    parts = Parts(connect_queue, engine)
    yield parts
    parts.stop()


@pytest.mark.parametrize(("gather_s", "num_posted"), [(60.0, [0, 0, 0]), (0.0, [0, 1, 2])])
def test_the_jobs_of_a_claim_are_posted_together_unless_they_take_long(
    gather_s: float, num_posted: list[int], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first step of an idle engine does not have the first job alone."""
    found, admit = [], Admission.admit

    def count(*arguments: Any, **options: Any) -> list[Generation]:
        found.append(parts.events.qsize())
        return admit(*arguments, **options)

    monkeypatch.setattr("millrace.engine_service.serving.intake._GATHER_S", gather_s)
    monkeypatch.setattr(Admission, "admit", count)
    submit(parts.lease_queue, "a", "b", "c", body=BODY)
    parts.intake.start()
    assert [parts.events.get(timeout=60).job.job_id for _ in range(3)] == ["a", "b", "c"]  # type: ignore[union-attr]
    assert found == num_posted


def test_the_part_of_another_engine_is_left_to_it_also_when_more_fits(
    parts: Parts, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.serving.intake._FAIR_WAIT_S", 60.0)
    keys, other = parts.lease_queue.keys, EngineOfQueue(parts.lease_queue, "other")
    assert other.claim() == []
    redis_client.hset(keys.prefix + "engine:other", "takes_until", 10**15)
    submit(parts.lease_queue, "a", "b", body=BODY)
    parts.intake.start()
    assert parts.events.get(timeout=10).job.job_id == "a"  # type: ignore[union-attr]
    heartbeat = keys.prefix + "engine:" + parts.leases.engine_id

    def has_claimed(num_times: int) -> bool:
        return redis_client.hget(heartbeat, "claim") == f"c{num_times}".encode()

    for num_claims in range(2, 6):
        wait_until(partial(has_claimed, num_claims))
        assert parts.lease_queue.stats().queued == 1
        parts.capacity.update(100 + num_claims)
    monkeypatch.setattr("millrace.engine_service.serving.intake._FAIR_WAIT_S", 0.0)
    parts.capacity.update(200)  # the thread ends its wait, and the test its thread


def test_the_redrive_of_a_delayed_job_is_due_at_once(parts: Parts) -> None:
    submit(parts.lease_queue, "a", body=BODY[:-1] + b',"delay_s":3600}', delay_ms=3_600_000)
    parts.lease_queue.cancel("a")
    parts.lease_queue.redrive("a")
    parts.intake.start()
    event = parts.events.get(timeout=60)
    assert isinstance(event, Arrived)
    assert 0 < event.job.due_s <= time.time()


def test_a_job_of_another_model_is_logged_when_it_begins_to_wait_and_when_it_fails(
    parts: Parts, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    half_done(parts.lease_queue, is_published=True, fingerprint="of another model")
    parts.intake.start()
    wait_until(lambda: "it waits for an engine with the same ones" in caplog.text)
    assert "job a was begun by engines with another model, tokenizer or dtype; it waits" in caplog.text
    redis_client.hset(parts.lease_queue.keys.settings, "mismatch_wait_ms", 0)
    wait_until(lambda: "job a failed: fingerprint_mismatch: was begun by engines with another model" in caplog.text)
    assert caplog.text.count("it waits") == 1


CLAIM, HEARTBEAT, READ = (script_command(name, "")[:2] for name in ("claim", "heartbeat", "inbox"))


def break_reply(queue: FullQueue, start: Command, error: BaseException) -> None:
    """The answer to the next command that starts so breaks the code that reads it."""
    transport, send = queue._transport, queue._transport.send

    def fail(command: Command, meanwhile: Callable[[], None] | None = None) -> Reply:
        reply = send(command, meanwhile)
        if command[: len(start)] != start:
            return reply
        transport.send = send  # type: ignore[method-assign]
        raise error

    transport.send = fail  # type: ignore[method-assign]


def test_a_claim_that_breaks_our_code_is_logged_and_repeated(
    parts: Parts, connect_queue: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    submit(connect_queue(), "a", body=BODY)
    break_reply(parts.lease_queue, CLAIM, RuntimeError("a bug in the claim"))
    parts.intake.start()
    event = parts.events.get(timeout=60)
    assert isinstance(event, Arrived)
    assert event.job.job_id == "a"
    assert "a bug in the claim" in caplog.text


def test_an_idle_engine_goes_on_claiming_behind_overdue_jobs(
    parts: Parts, connect_queue: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(parts.intake._capacity, "wait_for_change", waits.append)
    queue = connect_queue()
    queue.submit([submission(f"late{i}", deadline_ms=1) for i in range(2000)])
    submit(queue, "a", body=BODY)
    time.sleep(0.01)
    parts.intake.start()
    assert isinstance(parts.events.get(timeout=60), Arrived)
    assert waits == [], "as if the engine were full"


def test_a_damaged_record_is_refused_by_name_and_its_batch_mates_run(
    parts: Parts, connect_queue: Connect, redis_client: redis.Redis
) -> None:
    queue = connect_queue()
    queue.pause(True)
    submit(queue, "seed", "created", "tokens", "well", body=BODY)
    redis_client.hset(queue.keys.job("seed"), "seed", "abc")
    redis_client.hdel(queue.keys.job("created"), "created")
    redis_client.hset(queue.keys.job("tokens"), mapping={"fingerprint": FINGERPRINT, "attempt": 1})
    redis_client.set(f"{queue.keys.prefix}tokens:tokens", b"12345")
    queue.pause(False)
    parts.intake.start()
    events = [parts.events.get(timeout=60) for _ in range(4)]
    refused = {str(event.claimed.job_id): event.error.message for event in events if isinstance(event, Refused)}
    assert [event.job.job_id for event in events if isinstance(event, Arrived)] == ["well"]
    assert list(refused) == ["seed", "created", "tokens"]
    assert "seed is b'abc'" in refused["seed"]
    assert "created is None" in refused["created"]
    assert "the checkpoint has 5 bytes" in refused["tokens"]


def test_sequences_have_the_tenant_and_the_priority_of_their_job(parts: Parts) -> None:
    """A job with a lower number comes first, and a sequence with a higher one."""
    submit(parts.lease_queue, "a", body=BODY, tenant="x", priority=-3)
    submit(parts.lease_queue, "b", body=BODY, tenant="y", priority=2)
    parts.intake.start()
    events = [parts.events.get(timeout=60) for _ in range(2)]
    sequences = {str(one.job.job_id): one.job.generations[0].sequence for one in events if isinstance(one, Arrived)}
    rights = {job_id: (sequence.tenant, sequence.priority) for job_id, sequence in sequences.items()}
    assert rights == {"a": ("x", 3), "b": ("y", -2)}


@pytest.mark.parametrize("isolates_tenants", [False, True])
def test_isolated_tenants_share_no_cached_prompts(parts: Parts, isolates_tenants: bool) -> None:
    parts.intake._isolates_tenants = isolates_tenants
    salted = BODY.replace(b"{", b'{"cache_salt":"s",', 1)
    for job_id, body, tenant in (("a", BODY, "x"), ("b", BODY, "x"), ("c", BODY, "y"), ("d", salted, "x")):
        submit(parts.lease_queue, job_id, body=body, tenant=tenant)
    parts.intake.start()
    arrived = [one for one in (parts.events.get(timeout=60) for _ in range(4)) if isinstance(one, Arrived)]
    roots = {str(one.job.job_id): one.job.generations[0].sequence.hash_root for one in arrived}
    assert roots["a"] == roots["b"] != roots["d"]
    assert (roots["a"] == roots["c"]) is not isolates_tenants


def test_the_name_of_another_model_is_shown_short_and_on_one_line(parts: Parts) -> None:
    submit(parts.lease_queue, "a", body=b'{"prompt":"x","model":"large\\n%s"}' % (b"x" * 900_000))
    parts.intake.start()
    _, prepared = parts.events.get(timeout=60), parts.events.get(timeout=60)  # its body is large
    assert isinstance(prepared, Prepared)
    assert isinstance(refused := prepared.outcome, Refused)
    assert (refused.error.kind, refused.error.field) == ("model_mismatch", "model")
    assert refused.error.message.startswith("model: this queue serves 'stub', not 'large\\nxxx")
    assert refused.error.message.endswith(
        "xxx'; set model to 'stub' or leave it out, or use the queue of the other model"
    )
    assert len(refused.error.message) < 200


def test_the_inbox_goes_on_after_what_breaks_our_code(
    parts: Parts, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    keys = parts.inbox_queue.keys
    redis_client.xadd(keys.inbox, {"job": b'{"id":"a","prompt":"x"}'})
    break_reply(parts.inbox_queue, READ, RuntimeError("a bug in the inbox"))
    parts.inbox.start()
    wait_until(lambda: redis_client.hget(keys.job("a"), "state") == b"queued")
    assert "a bug in the inbox" in caplog.text


def test_an_entry_that_breaks_our_code_again_and_again_keeps_no_other_out(
    parts: Parts, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_on(raw: bytes) -> GenerationRequest:
        if b"cursed" in raw:
            raise RuntimeError("a bug in the parser")
        return parse_body(raw)

    monkeypatch.setattr("millrace.engine_service.serving.inbox.parse_body", break_on)
    keys = parts.inbox_queue.keys
    redis_client.xadd(keys.inbox, {"job": b'{"id":"cursed","prompt":"x"}'})
    parts.inbox.start()
    for job_id in "ab":
        redis_client.xadd(keys.inbox, {"job": f'{{"id":"{job_id}","prompt":"x"}}'})
        wait_until(partial(redis_client.exists, keys.job(job_id)))
    assert redis_client.xlen(keys.inbox) == 1
    assert "a bug in the parser" in caplog.text
    assert caplog.text.count("stays in the inbox") == 1


def test_the_heart_beats_on_after_what_breaks_our_code(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    break_reply(parts.lease_queue, HEARTBEAT, RuntimeError("a bug in the heartbeat"))
    wait_until(lambda: "a bug in the heartbeat" in caplog.text)
    while not parts.news.empty():
        parts.news.get()
    parts.news.get(timeout=60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_with_a_dead_thread_is_not_healthy(parts: Parts, engine: Engine) -> None:
    health = Health(engine)
    parts.intake.start()
    parts.inbox.start()
    health.watch(parts.leases, [*parts.intake.threads, parts.inbox.thread, parts.leases.thread])
    assert health.unhealthy_reason() is None
    break_reply(parts.inbox_queue, READ, SystemExit())  # ends the thread, and says nothing
    wait_until(lambda: not parts.inbox.thread.is_alive())
    assert health.unhealthy_reason() == "the thread 'inbox' has died; restart the engine"
    health.let_threads_end()
    assert health.unhealthy_reason() is None
