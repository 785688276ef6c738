"""What a user sees of a wait: why it takes so long, and how to resume after a timeout or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from rich.progress import ProgressColumn

from millrace import Client, WaitTimeout
from millrace.cli import progress
from millrace.cli.output import live_line, remark
from millrace.cli.progress import ProgressReport, progress_bar
from millrace.embedded import EmbeddedServer
from millrace.results.keys import QueueKeys
from millrace.results.messages import ClaimedJob
from tests.millrace.cli.command import Command, environment, run_main, started
from tests.millrace.cli.conftest import EngineByHand
from tests.processes import LIMIT_S, ROOT, wait_until

OBSTACLES: dict[str, tuple[Callable[[Command, EngineByHand], object], str]] = {
    "no_engine": (
        lambda millrace, engine: None,
        "no engine serves queue 'QUEUE' now: `millrace serve --queue QUEUE` starts one",
    ),
    "paused": (
        lambda millrace, engine: (engine.beat(0), millrace("pause")),
        "queue 'QUEUE' is paused: `millrace resume --queue QUEUE` starts its jobs again",
    ),
    "asleep": (
        lambda millrace, engine: engine.beat(1),
        "all engines of queue 'QUEUE' are asleep: `millrace wake --queue QUEUE` wakes them",
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_job_that_cannot_begin_says_why(
    obstacle: str, millrace: Command, engine: EngineByHand, queue_name: str
) -> None:
    prepare, sentence = OBSTACLES[obstacle]
    prepare(millrace, engine)
    why = sentence.replace("QUEUE", queue_name)
    resume = f"resume with: millrace wait a --queue {queue_name} --redis"
    millrace("submit", "x", "--id", "a")
    assert millrace("get", "a").out.startswith(f"a: queued, {why}, submitted ")
    assert millrace("get", "a", "--json").json_lines()[0]["obstacle"] == obstacle
    assert millrace("stats", "--json").json_lines()[0]["obstacle"] == obstacle
    ran = millrace("wait", "a", "--timeout", "0.1")
    assert (ran.status, ran.out) == (5, "")
    assert ran.err.startswith(f"millrace: job 'a' has not ended within 0.1 s: queued, {why}; {resume}")
    ran = millrace("submit", "--file", "-", "--wait", "--timeout", "0.1", stdin='{"id": "b", "prompt": "x"}')
    assert ran.status == 5
    assert f"millrace: only 0 of 1 jobs have ended within 0.1 s: {why}; resume with: millrace wait --batch " in ran.err


def test_a_job_whose_only_engine_has_died_says_so(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    why = f"no engine serves queue {queue_name!r} now: `millrace serve --queue {queue_name}` starts one"
    millrace("submit", "x", "--id", "a")
    (job,) = engine.claim()
    engine.show(job, "abc")
    assert millrace("get", "a", "--json").json_lines()[0]["obstacle"] is None
    redis_client.delete(f"{QueueKeys(queue_name).prefix}engine:by-hand")  # its heartbeat has run out
    facts = f"a: running, 3 tokens so far, attempt 1, {why}, which continues the job, submitted "
    assert millrace("get", "a").out.startswith(facts)
    assert millrace("get", "a", "--json").json_lines()[0]["obstacle"] == "no_engine"
    ran = millrace("wait", "a", "--timeout", "0.1")
    late = f"job 'a' has not ended within 0.1 s: running, {why}, which continues the job"
    assert ran.err.startswith(f"millrace: {late}; resume with: millrace wait a ")
    with Client(redis_client, queue_name) as client, pytest.raises(WaitTimeout) as caught:
        client.wait("a", timeout_s=0)
    assert str(caught.value) == late.replace("0.1 s", "0 s") + ". Then wait again"
    assert caught.value.job_id == "a"
    ran = millrace("cancel", "a")
    assert (ran.status, ran.out) == (0, "a\tcancelling\n")
    assert ran.err == f"millrace: jobs that run are cancelled by the next engine: {why}\n"
    engine.beat(0)
    assert millrace("cancel", "a").err == ""


@pytest.mark.parametrize("verb", [("wait", "a"), ("tail", "a"), ("submit", "x", "--id", "a", "--wait")])
def test_a_wait_reports_that_the_only_engine_has_died(
    verb: tuple[str, ...], millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    millrace("submit", "x", "--id", "a")
    (job,) = engine.claim()
    with started(*millrace.line(*verb)) as waiting:
        assert waiting.stderr
        redis_client.delete(f"{QueueKeys(queue_name).prefix}engine:by-hand")
        assert waiting.stderr.readline().startswith(
            f"millrace: job 'a': running, 0 tokens so far, attempt 1, no engine serves queue {queue_name!r} now: "
        )
        engine.beat(0)
        assert waiting.stderr.readline() == "millrace: job 'a': running, 0 tokens so far, attempt 1, engine by-hand\n"
        engine.finish(job, "text")
        assert waiting.communicate(timeout=LIMIT_S) == ("text\n", "")


def test_a_queue_that_no_engine_has_ever_served_is_reported_at_submit(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    redis_client.delete(QueueKeys(queue_name).prefix + "counts")
    ran = millrace("submit", "x", "--id", "a")
    assert (ran.status, ran.out) == (0, "a\n")
    assert ran.err.startswith(f"millrace: no engine has ever served queue {queue_name!r}: `millrace queues` lists")
    assert millrace("submit", "--file", "-", stdin='{"prompt": "x"}').err.endswith(ran.err)
    engine.claim()
    assert millrace("submit", "x").err == ""


def test_a_wait_reports_its_reason_once_and_again_when_it_changes(millrace: Command, engine: EngineByHand) -> None:
    engine.beat(0)
    millrace("pause")
    with started(*millrace.line("submit", "x", "--id", "a", "--wait")) as waiting:
        assert waiting.stderr
        assert "is paused: `millrace resume" in waiting.stderr.readline()
        millrace("resume")
        assert waiting.stderr.readline() == "millrace: job 'a': queued, 0 jobs ahead\n"
        (job,) = engine.claim()
        assert waiting.stderr.readline() == "millrace: job 'a': running, 0 tokens so far, attempt 1, engine by-hand\n"
        engine.finish(job, "text")
        assert waiting.communicate(timeout=LIMIT_S) == ("text\n", "")


def test_a_terminal_gets_one_line_that_is_rewritten_and_cleared(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    controller, terminal = os.openpty()
    with os.fdopen(controller, "rb", buffering=0) as shown:
        command = [sys.executable, *millrace.line("wait", "a")]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=terminal)
        with process:
            os.close(terminal)
            seen = b""
            while b"no engine serves" not in seen:
                seen += shown.read(4096)
            engine.finish(engine.claim()[0], "text")
            out, _ = process.communicate(timeout=LIMIT_S)
        assert out == b"text\n"
        with contextlib.suppress(OSError):  # the end of a terminal
            while True:
                seen += shown.read(4096)
        assert seen.startswith(b"\r\x1b[Kjob 'a': queued, ") and seen.endswith(b"\r\x1b[K")
        assert b"\n" not in seen


def test_a_remark_clears_the_line_that_is_rewritten(capsys: pytest.CaptureFixture[str]) -> None:
    live_line.show("job 'a': queued")
    remark("the server is away")
    remark("it is back")
    assert (
        capsys.readouterr().err == "\r\x1b[Kjob 'a': queued\r\x1b[Kmillrace: the server is away\nmillrace: it is back\n"
    )


def test_a_wait_in_python_logs_why_it_takes_long(
    redis_url: str, queue_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.results.waiting.BLOCK_LIMIT_S", 0.1)  # instead of 5 s
    with Client(redis_url, queue_name) as client, pytest.raises(WaitTimeout, match="no engine has ever served"):
        client.wait(client.submit("x", job_id="a"), timeout_s=0.5)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"jobs wait: no engine has ever served queue {queue_name!r}: ")


@pytest.mark.parametrize(
    ("how", "resumed_by"),
    [
        (("submit", "x", "--id", "a", "--wait"), "wait a"),
        (("submit", "x", "--id", "a", "--stream"), "tail a"),
        (("wait", "a"), "wait a"),
    ],
)
def test_an_interrupt_is_status_130_and_names_the_command_that_resumes(
    how: tuple[str, ...], resumed_by: str, millrace: Command, redis_client: redis.Redis, queue_name: str
) -> None:
    if how[0] == "wait":
        millrace("submit", "x", "--id", "a")
    with started(*millrace.line(*how)) as waiting:
        wait_until(lambda: redis_client.info("clients")["blocked_clients"])
        waiting.send_signal(signal.SIGINT)
        _, words = waiting.communicate(timeout=LIMIT_S)
    line = words.splitlines()[-1]
    assert waiting.returncode == 130
    assert line.startswith(f"millrace: interrupted: job 'a' continues; resume with: millrace {resumed_by} --queue ")


@pytest.mark.parametrize("how", ["--wait", "--stream"])
def test_who_may_submit_and_not_read_is_told_the_job(how: str) -> None:
    with EmbeddedServer() as server, contextlib.closing(redis.Redis.from_url(server.url)) as admin:
        admin.acl_setuser(
            "writer", True, passwords="+pw", keys=["millrace:*"], commands=["+@all", "-xrevrange", "-xread"]
        )
        url = server.url.replace("unix://", "unix://writer:pw@", 1)
        ran = run_main("submit", "x", "--id", "a", how, "--redis", url)
    assert ran.status == 4
    assert "does not permit this to the URL's user" in ran.err
    assert "job 'a' continues; resume with: millrace " in ran.err


def test_an_interrupted_tail_resumes_after_its_last_event(
    millrace: Command, engine: EngineByHand, redis_url: str, queue_name: str
) -> None:
    millrace("submit", "x", "--id", "a")
    (job,) = engine.claim()
    engine.show(job, "one")
    with started(*millrace.line("tail", "a")) as following:
        assert following.stdout and following.stdout.read(3) == "one"
        following.send_signal(signal.SIGINT)
        _, words = following.communicate(timeout=LIMIT_S)
    with Client(redis_url, queue_name) as client:
        event = next(client.stream("a"))
    assert f"resume with: millrace tail a --after {event.id} --queue" in words


@pytest.mark.parametrize(
    ("lines", "options", "resumed_by"),
    [
        ('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "x"}\n', (), "resume with: {wait} submit-"),
        ('{"id": "known", "prompt": "x"}\n{"id": "b", "prompt": "x"}\n', (), "the same command resumes"),
        ('{"prompt": "x"}\n{"prompt": "x"}\n', (), "resume with: {wait} submit-"),
        (
            '{"prompt": "x"}\n{"id": "known", "prompt": "x"}\n',
            (),
            "some lines have no id, so the same command {twice} submit-",
        ),
        ('{"prompt": "x"}\n{"prompt": "x"}\n', ("--batch", "b"), "resume with: {wait} b --queue "),
    ],
)
def test_an_interrupted_file_names_the_counts_and_the_way_to_resume(
    lines: str, options: tuple[str, ...], resumed_by: str, millrace: Command, engine: EngineByHand, tmp_path: Path
) -> None:
    (file := tmp_path / "jobs").write_text(lines)
    if "known" in lines:
        millrace("submit", "x", "--id", "known", "--batch", "another")
    with started(*millrace.line("submit", "--file", str(file), "--wait", *options)) as waiting:
        jobs: list[ClaimedJob] = []
        while len(jobs) < 2:
            jobs += engine.claim()
        engine.finish(jobs[-1], "text")
        assert waiting.stdout and waiting.stdout.readline()
        waiting.send_signal(signal.SIGINT)
        _, words = waiting.communicate(timeout=LIMIT_S)
    wait = "millrace wait --batch"
    how = resumed_by.format(wait=wait, twice=f"would submit them twice; resume with: {wait}")
    assert f"interrupted: 1 of 2 results are written, the other jobs continue; {how}" in words
    for batch in re.findall(r"millrace wait --batch (\S+)", words):
        assert run_main("batch", "status", *millrace.place, batch).status == 0


def test_waiting_for_several_jobs_or_a_batch_prints_each(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id, "--batch", "both")
    for job in engine.claim():
        engine.finish(job, "text")
    for which in (("a", "b"), ("--batch", "both")):
        ran = millrace("wait", *which)
        assert (ran.status, sorted(job["id"] for job in ran.json_lines())) == (0, ["a", "b"])
    assert millrace("wait", "a") == (0, "text\n", "")
    assert millrace("wait", "--batch", "none").status == 3


def test_an_unknown_job_hides_no_other(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b", "c"):
        millrace("submit", "x", "--id", job_id)
    for job in engine.claim():
        engine.finish(job, "text")
    millrace("delete", "b")
    ran = millrace("wait", "a", "b", "c", "a", "not/an/id")
    assert (ran.status, sorted(job["id"] for job in ran.json_lines())) == (3, ["a", "c"])
    assert [line.partition(" in ")[0] for line in ran.err.splitlines()] == [
        "millrace: no job 'not/an/id'",
        "millrace: no job 'b'",
    ]
    ran = millrace("wait", *(f"x{number}" for number in range(30)))
    assert (ran.status, ran.err.count("\n")) == (3, 21)
    assert ran.err.endswith("millrace: and 10 more jobs have no result\n")


def test_a_job_that_is_deleted_while_others_are_waited_for_hides_none(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id, "--batch", "both")
    first, second = engine.claim()
    engine.finish(first, "text")
    with started(*millrace.line("wait", "a", "b")) as waiting:
        assert waiting.stdout and waiting.stdout.readline()
        millrace("delete", str(first.job_id))
        engine.finish(second, "text")
        assert waiting.stdout.readline()
        assert waiting.wait() == 0


def test_jobs_of_a_batch_whose_records_have_expired_are_counted(millrace: Command, engine: EngineByHand) -> None:
    for job_id in ("a", "b", "c", "d"):
        millrace("submit", "x", "--id", job_id, "--batch", "all")
    for job in engine.claim():
        engine.finish(job, "text")
    millrace("delete", "a", "b")
    millrace("submit", "x", "--id", "a", "--batch", "all")
    engine.finish(engine.claim()[0], "text")
    lost = "millrace: 1 of 4 jobs of the batch have expired or were deleted\n"
    for ran in (millrace("wait", "--batch", "all"), run_main("batch", "results", *millrace.place, "all")):
        assert (ran.status, sorted(job["id"] for job in ran.json_lines()), ran.err) == (1, ["a", "c", "d"], lost)
    millrace("delete", "a", "c", "d")
    lost = "millrace: 4 of 4 jobs of the batch have expired or were deleted\n"
    assert millrace("wait", "--batch", "all") == (1, "", lost)
    assert run_main("batch", "results", *millrace.place, "all") == (1, "", lost)


def test_of_many_failed_jobs_only_the_first_are_named(millrace: Command, engine: EngineByHand) -> None:
    lines = '{"prompt": "x"}\n' * 25
    millrace("submit", "--file", "-", "--batch", "all", stdin=lines)
    for job in engine.claim():
        engine.fail(job, "no luck")
    ran = millrace("wait", "--batch", "all")
    assert (ran.status, len(ran.json_lines())) == (1, 25)
    assert ran.err.count(": failed: no luck\n") == 20
    assert ran.err.endswith("millrace: and 5 more jobs have no result\n")


def test_a_result_that_has_expired_is_no_empty_text(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    redis_client.hset(QueueKeys(queue_name).settings, mapping={"result_ttl_ms": 60_000, "record_ttl_ms": 600_000})
    millrace("submit", "x", "--id", "a")
    engine.finish(engine.claim()[0], "text")
    redis_client.delete(QueueKeys(queue_name).result("a"))  # as if its time had passed
    expired = "millrace: a: finished: its result has expired\n"
    assert millrace("wait", "a") == (1, "", expired)
    assert millrace("submit", "x", "--id", "a", "--wait") == (1, "", expired)


def test_an_output_that_a_limit_of_tokens_has_cut_is_reported_once_for_each_wait(
    millrace: Command, engine: EngineByHand
) -> None:
    for job_id in ("a", "b", "c"):
        millrace("submit", "x", "--id", job_id, "--batch", "all")
    for job in engine.claim():
        engine.finish(job, "text", reason="stop" if job.job_id == "c" else "length")
    cut = "cut at the limit of tokens: max_tokens, or the context of the model\n"
    assert millrace("wait", "a") == (0, "text\n", f"millrace: a: {cut}")
    assert millrace("tail", "a") == (0, "text\n", f"millrace: a: {cut}")
    assert millrace("submit", "x", "--id", "a", "--wait") == (0, "text\n", f"millrace: a: {cut}")
    assert millrace("wait", "c").err == ""
    lines = "".join(f'{{"id": "{job_id}", "prompt": "x"}}\n' for job_id in "abc")
    for ran in (millrace("wait", "--batch", "all"), millrace("submit", "--file", "-", "--wait", stdin=lines)):
        assert (ran.status, ran.err.splitlines()[-1] + "\n") == (0, f"millrace: 2 of 3 jobs: {cut}")


def test_the_queues_of_a_server_are_listed(millrace: Command, engine: EngineByHand, queue_name: str) -> None:
    millrace("submit", "x")
    (row,) = [line for line in millrace("queues").out.splitlines() if line.startswith(queue_name + "\t")]
    assert row == f"{queue_name}\t0\t0\t1\t0\t0\t0\t0\tno engine\t"
    listed = run_main("queues", "--redis", millrace.place[1], "--json").json_lines()
    (queue,) = [one for one in listed if one["queue"] == queue_name]
    assert (queue["queued"], queue["obstacle"]) == (1, "no_engine")
    assert [one["queue"] for one in millrace("queues", "--json").json_lines()] == [queue_name]
    other = Command(millrace.place[1], f"{queue_name}-other")
    other("submit", "x")
    assert other("queues", "--json").json_lines()[0]["queue"] == f"{queue_name}-other"
    assert Command(millrace.place[1], "nobody")("queues") == (
        3, "", "millrace: queue nobody: is not there; `millrace queues` lists those that are\n"
    )  # fmt: skip
    listed = run_main("queues", "--redis", millrace.place[1], "--json").json_lines()
    assert {queue_name, f"{queue_name}-other"} <= {one["queue"] for one in listed}


def test_without_a_terminal_a_wait_reports_its_progress_now_and_then(
    millrace: Command, engine: EngineByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id)
    for job in engine.claim():
        engine.finish(job, "y")
    assert millrace("wait", "a", "b").err == ""
    monkeypatch.setattr(progress, "REPORT_INTERVAL_S", 0.0)
    lines = millrace("wait", "a", "b").err.splitlines()
    assert lines == ["millrace: 1 of 2 jobs ended", "millrace: 2 of 2 jobs ended"]
    lines = millrace("wait", "a", "unknown", "b").err.splitlines()
    assert [line.removeprefix("millrace: ") for line in lines if "ended" in line][-1] == "2 of 3 jobs ended"
    assert any(line.endswith("or the Redis has lost its data") for line in lines)


def test_the_time_left_comes_from_the_recent_past_and_from_enough_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr("millrace.cli.progress.time.monotonic", lambda: now_s)
    report = ProgressReport(2000, "jobs", "ended", is_shown=False)

    def shown(after_s: float, num_done: int) -> str:
        nonlocal now_s
        now_s += after_s
        report.show(num_done)
        return capsys.readouterr().err.removeprefix("millrace: ").rstrip()

    assert shown(9, 500) == ""  # they had ended before
    assert shown(31, 501) == "501 of 2,000 jobs ended"
    assert shown(10, 520) == "520 of 2,000 jobs ended"
    assert shown(10, 541) == "541 of 2,000 jobs ended, 2.00 jobs/s, time left: 12 min"
    assert shown(60, 1141) == "1,141 of 2,000 jobs ended, 10.00 jobs/s, time left: 86 s"
    assert shown(600, 1142) == "1,142 of 2,000 jobs ended, 0.91 jobs/s, time left: 16 min"
    report.total = None
    assert shown(60, 2000) == "2,000 jobs ended, 14.30 jobs/s"


def test_a_progress_bar_counts_what_came_since_it_is_shown() -> None:
    now_s = 0.0
    bar = progress_bar(is_shown=True)
    bar.get_time = lambda: now_s

    def shown() -> list[str]:
        return [str(column.render(task)) for column in bar.columns[-3:] if isinstance(column, ProgressColumn)]

    bar.add_task("ended", total=100, completed=20)
    (task,) = bar.tasks
    assert shown() == ["0.0/s", "0:00:00", "left: -:--:--"]
    now_s = 10.0
    for _ in range(40):  # together, as the jobs of one batch
        bar.advance(task.id)
    assert shown() == ["4.0/s", "0:00:10", "left: 0:00:10"]
    now_s = 80.0
    bar.advance(task.id, 40)
    assert shown() == ["1.0/s", "0:01:20", "left: 0:00:00"]
