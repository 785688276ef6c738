"""Batches, retries, pauses and places in the queue, through the command."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis

from millrace.results.keys import QueueKeys
from millrace.results.messages import JobError
from millrace.results.queue import JobQueue
from millrace.results.scripts import Command as SentCommand
from millrace.results.transport import Reply, Transport
from tests.millrace.cli.command import Command, Ran, python, run_main
from tests.millrace.cli.conftest import EngineByHand


def batch_status(millrace: Command, *arguments: str) -> Ran:
    return python("-P", "-m", "millrace", "batch", "status", *millrace.place, *arguments)


def batch_results(millrace: Command, *arguments: str) -> Ran:
    return run_main("batch", "results", *millrace.place, "nightly", *arguments)


def test_a_batch_is_submitted_looked_at_and_cancelled(millrace: Command, engine: EngineByHand) -> None:
    lines = "".join(json.dumps({"id": f"j{n}", "prompt": "x"}) + "\n" for n in range(3))
    assert millrace("submit", "--file", "-", "--batch", "nightly", stdin=lines).status == 0
    assert millrace("submit", "x", "--id", "late", "--batch", "nightly", "--delay-s", "3600").status == 0
    waiting = batch_status(millrace, "nightly")
    assert waiting.err.startswith("millrace: no engine serves queue ") and "time left" not in waiting.out
    engine.finish(engine.claim()[0], "done")
    rows = dict(line.split("\t") for line in batch_status(millrace, "nightly").out.splitlines())
    assert (rows["running"], rows["delayed"], rows["finished"], rows["total"]) == ("2", "1", "1", "4")
    assert "time left" in rows
    (status,) = batch_status(millrace, "nightly", "--json").json_lines()
    assert (status["batch"], status["running"]) == ("nightly", 2)
    cancelled = millrace("cancel", "--batch", "nightly")
    assert set(cancelled.out.splitlines()) == {"j0\tfinished", "j1\tcancelling", "j2\tcancelling", "late\tcancelled"}
    assert millrace("cancel", "--batch", "unheard-of").status == 3
    assert batch_status(millrace, "unheard-of").status == 3


def test_the_results_of_a_batch_go_into_a_file_and_through_what_is_none(
    millrace: Command, engine: EngineByHand, tmp_path: Path
) -> None:
    millrace("submit", "x", "--id", "a", "--batch", "nightly")
    engine.finish(engine.claim()[0], "done")
    (shown,) = batch_results(millrace, "--json").json_lines()
    (target := tmp_path / "target").write_text("old")
    (link := tmp_path / "link").symlink_to(target)
    (mine := tmp_path / "target.part").write_text("mine")
    assert batch_results(millrace, "-o", str(link)) == (0, "", "")
    assert link.is_symlink() and json.loads(target.read_text()) == shown
    assert mine.read_text() == "mine" and len(list(tmp_path.iterdir())) == 3

    os.mkfifo(pipe := tmp_path / "pipe")
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        assert batch_results(millrace, "-o", str(pipe)).status == 0
        assert json.loads(reader.read()) == shown
    assert pipe.is_fifo()


def test_failed_jobs_are_run_again(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id)
    for job in engine.claim():
        engine.fail(job, "no luck")
    assert millrace("retry", "a").out == "a\ta.r1\n"
    facts = "a: failed (error), 3 prompt + 0 output tokens, no luck, run again as a.r1, "
    assert millrace("get", "a").out.startswith(facts)
    assert millrace("retry", "--all", "--json").json_lines() == [{"id": "b", "redriven_as": "b.r1"}]
    refused = millrace("retry", "a.r1")
    assert refused.status == 2
    assert refused.err.startswith("millrace: job 'a.r1' is queued: only a job that has failed")
    assert millrace("retry", "nobody").status == 3


def test_a_job_that_cannot_be_run_again_keeps_no_other_from_it(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id)
    for job in engine.claim():
        engine.fail(job, "no luck")
    millrace("submit", "x", "--id", "live")
    ran = millrace("retry", "live", "a", "nobody", "b")
    assert (ran.status, ran.out) == (3, "a\ta.r1\nb\tb.r1\n")
    assert [line[:24] for line in ran.err.splitlines()] == ["millrace: job 'live' is ", "millrace: no job 'nobody"]


def test_retrying_all_leaves_out_what_would_fail_again(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id)
    first, second = engine.claim()
    engine.fail(first, "no luck")
    engine.fail(second, "the prompt is too long", kind="invalid_request")
    ran = millrace("retry", "--all")
    assert (ran.status, ran.out) == (0, f"{first.job_id}\t{first.job_id}.r1\n")
    assert ran.err == (f"millrace: left out, since their requests are invalid and would fail again: {second.job_id}\n")
    known = millrace("submit", "x", "--id", second.job_id).err.splitlines()
    assert known[1:] == [
        f"millrace: not run again, since their requests are invalid and would fail again: {second.job_id}"
    ]
    assert millrace("retry", second.job_id).out == f"{second.job_id}\t{second.job_id}.r1\n"


def test_a_batch_is_run_again(millrace: Command, tmp_path: Path) -> None:
    (file := tmp_path / "jobs").write_text("".join(f'{{"id": "j{i}", "prompt": "x"}}\n' for i in range(6)))
    millrace("submit", "--file", str(file), "--batch", "b")
    millrace("cancel", "--batch", "b")
    ran = millrace("submit", "--file", str(file), "--batch", "b")
    assert "j4 and 1 more; to run them: millrace retry --batch b " in ran.err
    ran = millrace("retry", "--batch", "b")
    assert (ran.status, ran.out) == (0, "".join(f"j{i}\tj{i}.r1\n" for i in range(6)))
    ran = millrace("submit", "--file", str(file), "--batch", "b")
    assert "already run again: j0 (as j0.r1), j1 (as j1.r1)," in ran.err
    assert "to run them" not in ran.err
    assert millrace("retry", "--batch", "none").status == 3
    assert millrace("retry", "--batch", "b", "--all").status == 2


@pytest.mark.parametrize(
    "how", [("cancel", "--waiting"), ("cancel", "--batch", "b"), ("delete", "--batch", "b"), ("retry", "--batch", "b")]
)
def test_an_interrupt_says_how_many_jobs_were_changed_and_the_same_command_continues(
    how: tuple[str, ...], millrace: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (file := tmp_path / "jobs").write_text("".join(f'{{"id": "j{i}", "prompt": "x"}}\n' for i in range(200)))
    millrace("submit", "--file", str(file), "--batch", "b")
    if how[0] != "cancel":
        millrace("cancel", "--batch", "b")
    send_many, sizes = Transport.send_many, list[int]()

    def send_or_interrupt(transport: Transport, sent: Sequence[SentCommand]) -> list[Reply]:
        sizes.append(len(sent))
        if sizes.count(64) == 3:
            raise KeyboardInterrupt
        return send_many(transport, sent)

    with monkeypatch.context() as patched:
        patched.setattr(Transport, "send_many", send_or_interrupt)
        ran = millrace(*how)
    what = {"cancel": "cancelled", "delete": "deleted", "retry": "run again"}[how[0]]
    assert (ran.status, len(ran.out.splitlines())) == (130, 128)
    assert ran.err == f"millrace: interrupted: 128 jobs {what} so far; the same command continues\n"
    again = millrace(*how)
    changed = "\n".join((ran.out + again.out).splitlines())
    assert again.status == 0 and all(f"j{i}\t" in changed for i in range(200))


def test_of_a_batch_that_was_run_again_the_new_jobs_count(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id, "--batch", "nightly")
    millrace("cancel", "a")
    millrace("retry", "--batch", "nightly")
    for job in engine.claim():
        engine.finish(job, "y")
    rows = batch_status(millrace, "nightly").out.splitlines()
    assert {"finished\t2", "cancelled\t1", "total\t3", "of these run again\t1"} <= set(rows)
    remark = "millrace: left out: 1 jobs that were run again, since their new jobs belong to the batch too\n"
    for ran in (batch_results(millrace), millrace("wait", "--batch", "nightly")):
        assert sorted(line["id"] for line in ran.json_lines()) == ["a.r1", "b"]
        assert (ran.status, ran.err) == (0, remark)


def test_results_of_a_batch_that_have_expired_are_told(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id, "--batch", "nightly")
    for job in engine.claim():
        engine.finish(job, "y")
    redis_client.delete(QueueKeys(queue_name).result("a"))
    ran = batch_results(millrace)
    assert (ran.status, len(ran.json_lines())) == (1, 2)
    assert ran.err == "millrace: 1 of 2 results have expired: has_result is false, and the text is empty\n"


def test_rejected_entries_of_the_inbox_are_seen(millrace: Command, redis_client: redis.Redis, queue_name: str) -> None:
    queue = JobQueue(redis_client, queue_name)
    assert "rejected\t0\n" in millrace("stats").out
    assert millrace("ls", "--rejected") == (0, "", "")
    for raw in (b'{"prompt":1}', b"\xff" * 9000):
        redis_client.xadd(queue.keys.inbox, {"job": raw})
        assert "inbox\t1\n" in millrace("stats").out
        (entry,) = queue.read_inbox("0", 1)
        error = JobError(kind="invalid_request", message="no " * 2000 if len(raw) > 99 else "a string", field="prompt")
        assert queue.reject(entry.entry_id, None, raw, error) == "rejected"
    assert "rejected\t2\n" in millrace("stats").out
    last, first = millrace("ls", "--rejected").out.splitlines()
    assert first.split("\t")[1:] == ["-", 'a string: {"prompt":1}']
    assert "no no" in last and last.isprintable() is False  # the tabs between its columns
    shown = millrace("ls", "--rejected", "--json").json_lines()[1]
    assert (shown["id"], shown["error"]["field"], shown["raw"]) == (None, "prompt", '{"prompt":1}')
    assert millrace("ls", "--rejected", "--state", "failed").status == 2


def test_a_paused_queue_gives_nothing_out(millrace: Command, engine: EngineByHand) -> None:
    assert millrace("pause").status == 0
    millrace("submit", "x", "--id", "a")
    assert engine.claim() == []
    assert "paused\tyes" in millrace("stats").out
    assert millrace("resume").status == 0
    assert [job.job_id for job in engine.claim()] == ["a"]


def test_what_waits_of_each_tenant(millrace: Command, engine: EngineByHand) -> None:
    for tenant, count in (("a", 2), ("b", 1)):
        for _ in range(count):
            millrace("submit", "x", "--tenant", tenant, "--max-tokens", "10" if tenant == "a" else "100")
    assert millrace("stats", "--tenants").out == "b\t1\t101\na\t2\t22\n"
    assert millrace("stats", "--tenants", "--json").json_lines()[1] == {
        "tenant": "a", "waiting_jobs": 2, "waiting_tokens": 22
    }  # fmt: skip
    assert len(engine.claim()) == 3
    assert millrace("stats", "--tenants").out == ""


def test_settings_are_shown_and_changed(millrace: Command, redis_client: redis.Redis, queue_name: str) -> None:
    assert millrace("settings", "max_queued_jobs=2", "weight:gold=2.5", "--json").json_lines() == [
        {"max_queued_jobs": "2", "weight:gold": "2.5"}
    ]
    for _ in range(2):
        assert millrace("submit", "x").status == 0
    assert millrace("submit", "x").status != 0
    redis_client.hset(QueueKeys(queue_name).settings, mapping={"max_queued_job": 10, "paused": 1})
    shown = millrace("settings").out.splitlines()
    assert "max_queued_jobs\t2\tnone" in shown and "weight:gold\t2.5\t1" in shown and "max_events\t\t8192" in shown
    assert "max_queued_job\t10\tunknown: has no effect" in shown and not any(
        line.startswith("paused") for line in shown
    )
    one = "tenant_max_queued_jobs:gold"
    assert f"{one}\t7\ttenant_max_queued_jobs" in millrace("settings", f"{one}=7").out.splitlines()
    assert millrace("settings", "max_queued_jobs=", "weight:gold=").status == 0
    assert millrace("submit", "x").status == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "max_queued_job=3",
            "settings: 'max_queued_job' is not a setting of a queue; there are result_ttl_ms, ",
        ),
        ("max_queued_jobs=ten", "settings: max_queued_jobs: must be a number, got 'ten'"),
        ("max_queued_jobs=1.5", "settings: max_queued_jobs must be a whole number from 0 to 9007199254740991, got 1.5"),
        ("weight:gold=0", "settings: weight:gold must be a number from 1e-06 to 1000000, got 0"),
        ("weight:a b=2", "settings: 'weight:a b' is not a setting of a queue; "),
        ("max_queued_jobs:gold=2", "settings: 'max_queued_jobs:gold' is not a setting of a queue; "),
        ("tenant_max_queued_jobs:gold=-1", "settings: tenant_max_queued_jobs:gold must be a whole number from 0 to "),
        ("paused=1", "settings: paused is set by pause and resume; leave it out"),
        ("max_queued_jobs", "settings: write NAME=VALUE, such as max_queued_jobs=1000, got 'max_queued_jobs'"),
    ],
)
def test_a_wrong_setting_changes_nothing(millrace: Command, change: str, message: str) -> None:
    ran = millrace("settings", "max_events=100", change)
    assert ran.status == 2 and ran.err.startswith(f"millrace: {message}")
    assert millrace("settings", "--json").json_lines() == [{}]


def test_a_queue_without_engines_is_reported(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    assert millrace("stats").err.startswith(f"millrace: no engine serves queue {queue_name!r} now: `millrace serve ")
    assert millrace("stats", "--json").err == millrace("resume").err == ""
    redis_client.delete(QueueKeys(queue_name).prefix + "counts")
    for verb in ("pause", "resume", "stats"):
        assert millrace(verb).err.startswith(f"millrace: no engine has ever served queue {queue_name!r}: ")
    engine.beat(0)
    for verb in ("resume", "stats"):
        assert millrace(verb).err == ""


def test_get_tells_a_jobs_place(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b", "c"):
        millrace("submit", "x", "--id", job_id)
    (job,) = [job for job in engine.claim() if job.job_id == "a"]
    millrace("submit", "x", "--id", "d", "--priority", "1")
    engine.finish(job, "x")
    place = millrace("get", "d", "--json").json_lines()[0]
    assert place["num_ahead"] == 0
    assert place["eta_s"] is not None
    assert millrace("get", "d").out.startswith("d: queued, 0 jobs ahead, starts in about ")


def test_get_says_that_a_job_waits_for_the_model_that_began_it(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    millrace("submit", "x", "--id", "a", "--delay-s", "100")
    engine.beat(0)
    redis_client.hset(QueueKeys(queue_name).job("a"), "mismatch", 1)
    assert millrace("get", "a").out.startswith("a: delayed, waits for an engine with the model that began it, ")
    assert millrace("get", "a", "--json").json_lines()[0]["needs_model"]


def test_what_a_full_queue_did_not_take_is_named(
    millrace: Command, redis_client: redis.Redis, queue_name: str, tmp_path: Path
) -> None:
    redis_client.hset(QueueKeys(queue_name).settings, "max_queued_jobs", 2)
    file = tmp_path / "jobs"
    file.write_text("".join(json.dumps({"id": f"j{n}", "prompt": "x"}) + "\n" for n in range(4)))
    ran = millrace("submit", "--file", str(file))
    assert (ran.status, ran.out.split()) == (1, ["j0", "j1"])
    assert "\nmillrace: not submitted: all from line 3 on: the queue has as many jobs waiting" in ran.err
    assert millrace("submit", "x").status == 1


def test_a_server_that_cannot_make_it_durable_is_told(millrace: Command) -> None:
    ran = millrace("submit", "x", "--id", "a", "--durability", "disk")
    assert ran.status == 4
    assert "appendonly" in ran.err
    assert millrace("get", "a").status == 0


def test_engines_are_told_to_sleep_and_to_wake(millrace: Command, engine: EngineByHand) -> None:
    engine.claim()
    assert millrace("sleep", "--level", "2", "--timeout", "0").out == "by-hand\n"
    assert millrace("sleep", "--level", "2", "--timeout", "0", "--json").out == '{"engine":"by-hand"}\n'
    assert engine.hear() == "beat"
    assert engine.beat(sleep_level=0).sleep_level == 2
    assert "engine by-hand\tawake, serves tiny\n" in millrace("stats").out
    assert "\ttiny\n" in millrace("queues").out
    late = millrace("sleep", "--level", "2", "--timeout", "0.1")
    assert (late.status, late.out) == (5, "")
    assert late.err.startswith("millrace: not asleep yet: by-hand")
    engine.beat(sleep_level=2)
    assert millrace("sleep", "--engine", "by-hand").out == "by-hand\n", "it sleeps deep enough"
    assert "engine by-hand\tasleep, weights dropped, serves tiny" in millrace("stats").out
    assert millrace("stats", "--json").json_lines()[0]["sleep_levels"] == {"by-hand": 2}
    assert millrace("wake", "--engine", "by-hand", "--timeout", "0").status == 0
    assert engine.beat(sleep_level=2).sleep_level == 0


def test_a_heartbeat_that_had_lapsed_wakes_nobody(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    engine.beat(sleep_level=1)
    redis_client.delete(QueueKeys(queue_name).prefix + "engine:" + "by-hand")
    assert millrace("sleep").status == 3
    assert engine.beat(sleep_level=1).sleep_level == 1


def test_engines_are_told_to_reset_their_caches(millrace: Command, engine: EngineByHand) -> None:
    assert engine.beat(sleep_level=0).reset_number == 0
    assert millrace("reset-cache").out == "by-hand\n"
    assert engine.hear() == "beat"
    first = engine.beat(sleep_level=0).reset_number
    assert engine.beat(sleep_level=0).reset_number == first > 0
    assert millrace("reset-cache", "--engine", "by-hand", "--json").out == '{"engine":"by-hand"}\n'
    assert engine.beat(sleep_level=0).reset_number > first
    assert millrace("reset-cache", "--engine", "nobody").status == 3


def test_engines_that_are_not_there_cannot_be_told(millrace: Command, engine: EngineByHand, queue_name: str) -> None:
    ran = millrace("wake")
    assert (ran.status, ran.out) == (3, "")
    assert ran.err == f"millrace: no engine runs on queue '{queue_name}'; `millrace stats` names those that do\n"
    engine.beat(sleep_level=0)
    ran = millrace("sleep", "--engine", "nobody")
    assert ran.status == 3
    assert ran.err.startswith("millrace: no engine 'nobody' runs on queue ")
