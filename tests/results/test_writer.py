from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.logprobs import LazyJson, join_tokens
from millrace.results.messages import Append, ClaimedJob, Event, Finish, JobId, Lease, NewOutput, Write
from millrace.results.queue import JobQueue
from millrace.results.writer import Writer
from tests.processes import wait_until
from tests.results.engines import Engine, append_of, finish_of, submission, submit
from tests.results.invariants import check_all_ended


class Stale:
    """Collects the jobs that a writer reports as stale."""

    def __init__(self) -> None:
        self.job_ids: list[JobId] = []
        self.came = threading.Event()

    def __call__(self, job_id: JobId, lease: Lease) -> None:
        self.job_ids.append(job_id)
        self.came.set()


@pytest.fixture
def stale() -> Stale:
    return Stale()


@pytest.fixture
def writer(redis_url: str, queue_name: str, stale: Stale) -> Iterator[Writer]:
    queue = JobQueue(connect(redis_url), queue_name)
    writer = Writer(queue, stale)
    yield writer
    writer.close()
    queue.close()


def token_of(job: ClaimedJob, offset: int, text: str = "x") -> Append:
    event = Event(offset=offset, token_ids=[offset], text=text)
    return append_of(job, offset, [offset], event)


class SlowPrompt:
    """Log-probabilities of a prompt whose build waits until `can_end` is set."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.can_end = threading.Event()

    def finish_of(self, job: ClaimedJob) -> Finish:
        return msgspec.structs.replace(finish_of(job), prompt_logprobs=LazyJson(self._build, 60))

    def _build(self) -> bytes:
        self.has_begun.set()
        assert self.can_end.wait(60)
        return join_tokens([b"null"])


def test_writes_arrive_in_order(queue: JobQueue, engine: Engine, writer: Writer) -> None:
    queue.submit([submission(f"j{i}") for i in range(20)])
    jobs = engine.claim()
    for offset in range(50):
        for job in jobs:
            writer.put(token_of(job, offset, f"{offset} "))
    for job in jobs:
        writer.put(finish_of(job))
    assert writer.flush(10)
    text = "".join(f"{offset} " for offset in range(50))
    assert {queue.get(job.job_id).text for job in jobs} == {text}
    assert (writer.pending(), writer._pending_bytes) == ({}, 0)


def test_what_breaks_the_writer_does_not_end_it(
    queue: JobQueue, engine: Engine, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    submit(queue, "a")
    job = engine.claim_one()

    def fail(writes: list[Write]) -> list[str]:
        monkeypatch.undo()
        raise RuntimeError("a bug in the writer")

    monkeypatch.setattr(writer._queue, "write", fail)
    writer.put(finish_of(job))
    assert writer.flush(10)
    assert queue.get("a").state == "finished"
    assert "a bug in the writer" in caplog.text


def test_a_stale_write_is_reported_and_later_ones_of_its_lease_are_dropped(
    queue: JobQueue, engine: Engine, writer: Writer, stale: Stale
) -> None:
    submit(queue, "a", "b")
    a, b = engine.claim()
    engine.release(a)
    for offset in range(300):
        writer.put(token_of(a, offset))
    writer.put(finish_of(b))
    assert writer.flush(10)
    assert stale.came.wait(60)
    writer.put(finish_of(a))
    assert writer.flush(10)
    assert set(stale.job_ids) == {"a"}
    assert queue.get("b").state == "finished"
    assert queue.get("a").state == "queued"
    assert not writer.pending()


def test_a_new_lease_of_a_job_that_was_stale_is_written(
    queue: JobQueue, engine: Engine, writer: Writer, stale: Stale
) -> None:
    submit(queue, "a")
    old = engine.claim_one()
    engine.release(old)
    writer.put(token_of(old, 0))
    assert stale.came.wait(60)
    writer.put(finish_of(engine.claim_one()))
    assert writer.flush(10)
    assert queue.get("a").state == "finished"


def test_a_write_at_fault_is_reported_like_a_stale_one(
    queue: JobQueue, engine: Engine, writer: Writer, stale: Stale
) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    writer.put(append_of(job, 0, [-5]))
    assert stale.came.wait(60)
    assert stale.job_ids == ["a"]


def test_an_engine_that_cannot_be_told_does_not_stop_the_writer(queue: JobQueue, engine: Engine) -> None:
    def fail(job_id: JobId, lease: Lease) -> None:
        raise RuntimeError("the engine has a bug")

    submit(queue, "a", "b")
    a, b = engine.claim()
    engine.release(a)
    writer = Writer(queue, fail)
    writer.put(finish_of(a))
    assert writer.flush(10)
    writer.put(finish_of(b))
    assert writer.close()
    assert queue.get("b").state == "finished"


def test_what_is_on_its_way_is_still_held(queue: JobQueue, engine: Engine, stale: Stale) -> None:
    with EmbeddedServer() as server:
        own = JobQueue(connect(server.url), "q")
        submit(own, "a")
        job = Engine(own).claim_one()
        writer = Writer(own, stale, max_pending_bytes=1000)
        server.stop()
        assert not writer.is_full
        for offset in range(3):
            writer.put(token_of(job, offset, "x" * 500))
        assert writer.pending() == {job.job_id: job.lease}
        assert writer.is_full
        assert not writer.flush(0.05)
        assert not writer.close(0.05)
        own.close()


def test_nothing_is_lost_while_the_server_is_away(stale: Stale) -> None:
    with EmbeddedServer(appendonly=True, options={"appendfsync": "always"}) as server:
        client = connect(server.url)
        queue = JobQueue(client, "q")
        ids = [f"j{i}" for i in range(50)]
        submit(queue, *ids)
        jobs = Engine(queue).claim()
        writer = Writer(queue, stale)
        for job in jobs[:25]:
            writer.put(token_of(job, 0))
        assert writer.flush(10)
        server.kill()
        for job in jobs:
            writer.put(token_of(job, 0) if job in jobs[25:] else token_of(job, 1))
            writer.put(finish_of(job))
        server.start()
        assert writer.flush(30)
        assert writer.close()
        assert stale.job_ids == []
        check_all_ended(client, "q", ids)
        assert [queue.get(job_id).text for job_id in ids] == ["xx"] * 25 + ["x"] * 25
        client.close()


def test_a_closed_writer_takes_nothing(queue: JobQueue, engine: Engine, stale: Stale) -> None:
    submit(queue, "a")
    job = engine.claim_one()
    writer = Writer(queue, stale)
    writer.put(finish_of(job))
    assert writer.close()
    assert queue.get("a").state == "finished"
    with pytest.raises(RuntimeError, match="closed"):
        writer.put(finish_of(job))


def test_no_other_job_waits_for_the_log_probabilities_of_a_prompt(
    queue: JobQueue, engine: Engine, writer: Writer
) -> None:
    submit(queue, "a", "b")
    a, b = engine.claim()
    prompt = SlowPrompt()
    writer.put(token_of(a, 0))
    writer.put(prompt.finish_of(a))
    assert prompt.has_begun.wait(60)
    writer.put(token_of(b, 0))
    writer.put(finish_of(b))
    try:
        wait_until(lambda: queue.get("b").state == "finished")
        wait_until(lambda: writer.pending() == {"a": a.lease})
        assert not writer.flush(0)
        assert queue.get("a").state == "running"
    finally:
        prompt.can_end.set()
    assert writer.flush(10)
    assert (queue.get("a").text, queue.get("a").prompt_logprobs) == ("x", [None])
    assert (writer.pending(), writer._pending_bytes) == ({}, 0)


def test_closing_waits_for_the_log_probabilities_of_a_prompt(queue: JobQueue, engine: Engine, stale: Stale) -> None:
    submit(queue, "a", "b")
    a, b = engine.claim()
    writer, prompt = Writer(queue, stale), SlowPrompt()
    writer.put(prompt.finish_of(a))
    writer.put(prompt.finish_of(b))
    assert prompt.has_begun.wait(60)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(writer.close(10, build_timeout_s=60)))
    closing.start()
    wait_until(lambda: writer._is_closing)
    prompt.can_end.set()
    closing.join(60)
    assert closed == [True]
    assert [queue.get(job_id).prompt_logprobs for job_id in "ab"] == [[None], [None]]
    assert not any(thread.is_alive() for thread in writer.threads)


def test_a_writer_that_closes_too_early_drops_what_is_not_built(queue: JobQueue, engine: Engine, stale: Stale) -> None:
    submit(queue, "a")
    writer, prompt = Writer(queue, stale), SlowPrompt()
    writer.put(prompt.finish_of(engine.claim_one()))
    assert prompt.has_begun.wait(60)
    assert not writer.close(0.05)
    prompt.can_end.set()
    wait_until(lambda: not any(thread.is_alive() for thread in writer.threads))
    assert queue.get("a").state == "running"


def test_a_job_fails_if_the_log_probabilities_of_its_prompt_cannot_be_built(
    queue: JobQueue, engine: Engine, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bytes:
        raise MemoryError

    submit(queue, "a", "b", max_retries=0)
    a, b = engine.claim()
    writer.put(msgspec.structs.replace(finish_of(a), prompt_logprobs=LazyJson(fail, 60)))
    writer.put(finish_of(b))
    assert writer.flush(10)
    error = queue.get("a").error
    assert error is not None and error.kind == "internal" and "MemoryError" in error.message
    assert queue.get("b").state == "finished"
    assert "job a" in caplog.text
    assert writer._pending_bytes == 0


@pytest.mark.parametrize("write", ["append", "event", "finish"])
def test_a_job_fails_if_the_log_probabilities_of_its_output_cannot_be_built(
    queue: JobQueue, engine: Engine, writer: Writer, stale: Stale, write: str
) -> None:
    def fail() -> bytes:
        raise MemoryError

    submit(queue, "a", "b", max_retries=0)
    a, b = engine.claim()
    bad = LazyJson(fail, 60)
    event = Event(offset=0, token_ids=[1], text="x", logprobs=bad)
    if write == "finish":
        writer.put(finish_of(a, event))
    else:
        shown: dict[str, Any] = {"event": event} if write == "event" else {"logprobs": bad}
        output = NewOutput(offset=0, token_ids=[1], **shown)
        writer.put(Append(job_id=a.job_id, lease=a.lease, fingerprint="model-a", outputs=[output]))
    writer.put(token_of(b, 0))
    writer.put(finish_of(b))
    assert writer.flush(10)
    error = queue.get("a").error
    assert error is not None and error.kind == "internal" and "MemoryError" in error.message
    assert queue.get("b").state == "finished"
    writer.put(token_of(a, 1))  # the engine does not know it yet
    assert writer.flush(10)
    assert stale.job_ids == ["a"]
    assert writer._pending_bytes == 0
