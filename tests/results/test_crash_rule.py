"""The crash rule: a job that kills engines ends, alone; one whose engines something else has killed never does."""

from __future__ import annotations

from millrace.results.messages import ClaimedJob
from millrace.results.queue import JobQueue
from millrace.results.transport import Transport
from tests.results.engines import Engine, submit

MAX_FALSE_STARTS = 20


def crash(queue: JobQueue, *, after_tokens: int = 0, has_begun: bool = True, calls_begin: bool = True) -> ClaimedJob:
    """An engine claims the job in front, perhaps begins, perhaps makes progress, and dies; its jobs are recovered."""
    engine = Engine(queue, "doomed", calls_begin=calls_begin)
    job = engine.claim_one()
    if has_begun:
        assert engine.begin(job) == "ok"
    if after_tokens:
        engine.append(job, len(job.checkpoints[0].token_ids), list(range(after_tokens)))
    engine.die()
    assert [(one.engine_id, one.num_jobs) for one in queue.recover()] == [(engine.id, 1)]
    return job


def test_a_job_runs_alone_after_two_deaths_without_progress(queue: JobQueue, engine: Engine) -> None:
    submit(queue, "poison", "b", "c")
    crash(queue)
    crash(queue)
    assert queue.recover() == []
    assert engine.claim_ids(num_held=1) == [], "not beside others, and nothing passes it"
    alone = engine.claim(256)
    assert [(job.job_id, job.crash_count) for job in alone] == [("poison", 2)]
    assert engine.claim_ids(num_held=1) == [], "and nothing joins it"
    assert engine.claim_ids(num_held=0) == [], "whatever the engine says of itself"
    engine.finish(alone[0])
    assert engine.claim_ids() == ["b", "c"]


def test_three_deaths_alone_quarantine_a_job(queue: JobQueue) -> None:
    submit(queue, "poison")
    for _ in range(5):
        assert queue.get("poison").state == "queued"
        crash(queue)
    job = queue.get("poison")
    assert (job.state, job.finish_reason) == ("failed", "error")
    assert job.error is not None
    assert job.error.kind == "crashed"


def test_progress_forgives_the_deaths_before_it(queue: JobQueue, engine: Engine) -> None:
    submit(queue, "long")
    for _ in range(20):
        crash(queue, after_tokens=3)
    job = engine.claim_one()
    assert (job.crash_count, len(job.checkpoints[0].token_ids), job.attempt) == (0, 60, 21)


def test_a_published_text_of_a_quarantined_job_is_kept(queue: JobQueue) -> None:
    submit(queue, "a")
    engine = Engine(queue)
    engine.show(engine.claim_one(), 0, [1], "so far")
    engine.die()
    queue.recover()
    for _ in range(5):
        crash(queue)
    job = queue.get("a")
    assert (job.state, job.text) == ("failed", "so far")


def test_an_engine_that_dies_before_it_has_begun_is_not_held_against_the_job(queue: JobQueue, engine: Engine) -> None:
    submit(queue, "innocent")
    crash(queue)
    crash(queue)
    for _ in range(6):
        assert crash(queue, has_begun=False).crash_count == 2
    job = engine.claim_one()
    assert (job.crash_count, job.attempt) == (2, 9)
    assert engine.begin(job) == "ok"
    assert engine.finish(job) == "ok"


def test_those_that_had_begun_quarantine_it_whoever_died_between_them(queue: JobQueue) -> None:
    submit(queue, "poison")
    for has_begun in (True, True, False, True, False, True, False):
        crash(queue, has_begun=has_begun)
        assert queue.get("poison").state == "queued"
    crash(queue)
    assert queue.get("poison").state == "failed"


def test_before_it_runs_alone_every_death_counts(queue: JobQueue) -> None:
    """Nobody says `begin` then: it would cost each job a write."""
    submit(queue, "a")
    crash(queue, has_begun=False)
    assert crash(queue, has_begun=False).crash_count == 1
    assert crash(queue).crash_count == 2


def test_a_job_that_kills_whatever_reads_it_does_not_come_back_for_ever(queue: JobQueue) -> None:
    """A tokenizer that dies of a prompt does so before anything is computed."""
    submit(queue, "unreadable")
    for _ in range(2 + MAX_FALSE_STARTS):
        assert queue.get("unreadable").state == "queued"
        crash(queue, has_begun=False)
    job = queue.get("unreadable")
    assert job.state == "failed" and job.error is not None
    assert job.error.kind == "crashed"
    assert "between the claim" in job.error.message


def test_progress_forgives_false_starts_too(queue: JobQueue) -> None:
    submit(queue, "a")
    for _ in range(2):
        crash(queue)
        crash(queue)
        for _ in range(MAX_FALSE_STARTS - 1):
            crash(queue, has_begun=False)
        crash(queue, after_tokens=1)
    assert queue.get("a").state == "queued"


def test_an_engine_that_never_calls_begin_is_always_blamed(queue: JobQueue) -> None:
    """An older one, beside newer ones that have died of the same job."""
    submit(queue, "poison")
    crash(queue)
    crash(queue, calls_begin=False)
    crash(queue, has_begun=False)
    for _ in range(3):
        assert queue.get("poison").state == "queued"
        crash(queue, has_begun=False, calls_begin=False)
    assert queue.get("poison").state == "failed"


def test_a_note_of_an_earlier_lease_says_nothing_of_this_one(queue: JobQueue, transport: Transport) -> None:
    """The scripts of an older engine leave it where it is."""
    submit(queue, "poison")
    crash(queue)
    crash(queue)
    job = crash(queue, has_begun=False)
    for _ in range(3):
        assert queue.get("poison").state == "queued"
        transport.send(("HSET", queue.keys.job("poison"), "unbegun", str(job.lease)))
        crash(queue, has_begun=False, calls_begin=False)
    assert queue.get("poison").state == "failed"


def test_begin_may_be_said_again_and_only_by_the_owner(queue: JobQueue) -> None:
    submit(queue, "a")
    crash(queue)
    crash(queue)
    zombie, heir = Engine(queue), Engine(queue)
    lost = zombie.claim_one()
    zombie.die()
    queue.recover()
    job = heir.claim_one()
    assert zombie.begin(lost) == "stale"
    assert [heir.begin(job), heir.begin(job)] == ["ok", "ok"]
    assert heir.claim(claim_id="c1", num_held=0) == [job], "a repeated claim takes nothing back"
    heir.die()
    queue.recover()
    assert heir.begin(job) == "stale"
    assert crash(queue).crash_count == 3
