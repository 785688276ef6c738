"""`millrace run-batch`: every line of the input has one line in the output, whatever happens on the way."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis

from millrace.cli import batch_files
from millrace.cli.exits import INTERRUPTED, INVALID, NO_REDIS, OK, OTHER
from millrace.cli.reconnecting_client import ReconnectingClient
from millrace.executor.launch.devices import lock_free_gpus
from millrace.producer import GenerationRequest
from millrace.producer.wire import to_submission
from millrace.results.errors import RedisUnavailable
from millrace.results.keys import QueueKeys
from millrace.results.messages import ClaimedJob, Submission
from tests.millrace.cli.command import WITH_SMALL_FILES, Command, environment, run_main, started
from tests.millrace.cli.conftest import EngineByHand
from tests.processes import ROOT, wait_until

COMPLETIONS = "/v1/completions"
TINY = ROOT / "examples" / "tiny_model"
DOCUMENT = ROOT / "docs" / "run-batch.md"


class Files:
    """The two files of a run."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.state = folder / "out.jsonl.state"
        self.arguments = ("-i", str(self.input), "-o", str(self.output))

    def write(self, lines: Iterable[bytes | dict[str, Any]]) -> None:
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"\n".join(texts) + b"\n")

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def statuses(self) -> dict[str | None, int]:
        return {each["custom_id"]: each["response"]["status_code"] for each in self.answers()}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def call(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny_model", "prompt": f"{custom_id} = ", **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@contextmanager
def answering(engine: EngineByHand) -> Iterator[None]:
    """Finish all jobs as they come."""
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            jobs = engine.claim()
            for job in jobs:
                engine.finish(job, f"answer {job.job_id}")
            if not jobs:
                time.sleep(0.01)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_an_engine_of_its_own_answers_both_kinds_of_calls(files: Files) -> None:
    chat = [{"role": "user", "content": "3 + 4 ="}]
    files.write(
        [
            call("sum", prompt="3 + 4 =", max_tokens=3, temperature=0),
            call("chat", "/v1/chat/completions", prompt=None, messages=chat, max_tokens=3),
            call("long", prompt="3 + 4 = " * 1000),
            call("url", "/v1/embeddings"),
            call("other", model="another"),
            call("token", prompt=[999999]),
        ]
    )
    ran = run_main(
        *("run-batch", *files.arguments, "--model", str(TINY)), *("--", "--device", "cpu", "--max-num-seqs", "8")
    )
    assert ran.status == OTHER, ran.err
    assert "out.jsonl: 6 lines, 4 of them refused or failed; the first is line 3: prompt: " in ran.err
    assert files.statuses() == {"sum": 200, "chat": 200, "long": 400, "url": 400, "other": 404, "token": 400}
    answers = {answer["custom_id"]: answer["response"]["body"] for answer in files.answers()}
    assert answers["sum"]["choices"][0]["text"].strip() == "7"
    assert answers["sum"]["usage"]["completion_tokens"] <= 3
    assert answers["long"]["error"]["param"] == answers["token"]["error"]["param"] == "prompt"
    assert answers["token"]["error"]["message"].startswith("prompt: ")
    assert not files.state.exists()


def test_an_engine_of_its_own_that_waits_for_a_gpu_is_shown(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a0")
    lock_free_gpus(1, tmp_path / "locks")
    files.write([call("a")])
    options = ("--model", str(TINY), "--", "--device-locks", str(tmp_path / "locks"))
    with started("-P", "-m", "millrace", "run-batch", *files.arguments, *options) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "device" in line)
        assert line.startswith(
            "millrace: the engine: device: waiting for 1 of 1 GPUs; other engines hold the locks in "
        )
        process.send_signal(signal.SIGINT)
        process.communicate()


def test_a_model_that_is_not_there_ends_the_command(files: Files) -> None:
    files.write([call("a")])
    ran = run_main("run-batch", *files.arguments, "--model", "/nowhere")
    assert ran.status == INVALID
    assert "/nowhere" in ran.err
    assert not files.output.exists() and not files.state.exists()


def test_a_run_that_ended_before_any_job_may_begin_with_another_input(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call("a")])
    away = run_main("run-batch", "--redis", "redis://127.0.0.1:9/0", *files.arguments)
    assert away.status == NO_REDIS and "0 of 1 lines are written; the same command continues" in away.err
    assert not files.output.exists() and not files.state.exists()
    files.output.touch()
    files.state.touch()  # as after kill -9
    files.write([call("b")])
    with answering(engine):
        assert millrace("run-batch", *files.arguments).status == OK
    assert files.statuses() == {"b": 200}
    files.output.write_text('{"id": "run-other-1"}\n')
    files.state.touch()  # beside an output that it does not describe
    assert "out.jsonl.state: is damaged" in millrace("run-batch", *files.arguments).err
    assert files.output.read_text() == '{"id": "run-other-1"}\n'


def test_a_state_that_its_process_is_about_to_remove_is_not_taken(
    millrace: Command, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write([call("a")])
    monkeypatch.setattr("fcntl.flock", lambda *_: files.state.unlink())  # by the process that had the lock
    ran = millrace("run-batch", *files.arguments)
    assert ran.status == INVALID and "another run-batch writes it now" in ran.err
    assert not files.output.exists()


def test_the_reason_of_the_first_failed_line_is_shown(millrace: Command, engine: EngineByHand, files: Files) -> None:
    files.write([call("a"), call("b"), call("c", max_tokens=0), call("d", max_tokens=0)])
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        first, second = claim(engine, 2)
        engine.fail(second, "no luck\n" * 100)
        engine.finish(first, "text")
        _, err = process.communicate()
    last = err.splitlines()[-1]
    assert last.startswith(
        f"millrace: {files.output}: 4 lines, 3 of them refused or failed; the first is line 2: no luck"
    )
    assert len(last) < 300 + len(str(files.output))


def test_the_documented_programs_convert_a_table(
    millrace: Command, engine: EngineByHand, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    to_lines, to_table = re.findall(r"^```py\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    Path("rows.csv").write_text('id,text\n7,"3 + 4, ="\nb,"a ""quoted""\ntext"\nc,é\n', encoding="utf-8")
    exec(to_lines, {})
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        first, second, third = claim(engine, 3)
        engine.finish(third, "three")
        engine.fail(second, "no luck")
        engine.finish(first, "one, two")
        assert process.wait() == OTHER
    exec(to_table, {})
    assert list(csv.reader(StringIO(Path("answers.csv").read_text(encoding="utf-8")))) == [
        ["id", "text", "answer"],
        ["7", "3 + 4, =", "one, two"],
        ["b", 'a "quoted"\ntext', ""],
        ["c", "é", "three"],
    ]


def test_each_line_of_the_input_has_one_line_in_the_output(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call(f"c{i}") for i in range(600)])
    with answering(engine):
        ran = millrace("run-batch", *files.arguments)
    assert (ran.status, ran.out) == (OK, ""), ran.err
    assert [each["custom_id"] for each in files.answers()] == [f"c{i}" for i in range(600)]
    assert set(files.statuses().values()) == {200}


def test_a_complete_output_is_known_by_the_same_command_only(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call("a"), call("b")])
    with answering(engine):
        assert millrace("run-batch", *files.arguments).status == OK
    before = files.output.read_bytes()
    again = millrace("run-batch", *files.arguments)
    assert (again.status, again.err) == (OK, f"millrace: {files.output}: 2 lines\n")
    hot = millrace("run-batch", *files.arguments, "--temperature", "0.5")
    files.write([call("a"), call("b", max_tokens=3)])
    for other in (hot, millrace("run-batch", *files.arguments)):
        assert other.status == INVALID and "is not the output of this input with these options" in other.err
    assert files.output.read_bytes() == before and not files.state.exists()


def test_the_failed_lines_of_a_complete_output_are_answered_again(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call("a"), call("refused", max_tokens=0), call("b"), call("c")])
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        for job in claim(engine, 3):
            if job.job_id.endswith("-1"):
                engine.finish(job, "first")
            else:
                engine.fail(job, "no luck")
        process.communicate()
    assert process.returncode == OTHER
    assert list(files.statuses().items()) == [("a", 200), ("refused", 400), ("b", 500), ("c", 500)]
    kept = files.answers()[0]
    with answering(engine):
        ran = millrace("run-batch", *files.arguments, "--retry-failed")
    assert ran.status == OTHER and "1 of them refused or failed; the first is line 2" in ran.err
    assert list(files.statuses().items()) == [("a", 200), ("refused", 400), ("b", 200), ("c", 200)]
    assert files.answers()[0] == kept and not files.state.exists()
    assert millrace("run-batch", *files.arguments).status == OTHER  # it is still the output of this input


def test_options_and_the_models_configuration_fill_the_gaps_of_lines(
    millrace: Command, engine: EngineByHand, files: Files, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 30}')
    files.input.write_bytes(
        gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in (call("a"), call("b", temperature=0))))
    )
    options = ("--generation-config", str(tmp_path), "--top-k", "5")
    with started(*millrace.line("run-batch", *files.arguments, *options)) as process:
        jobs = claim(engine, 2)
        for job in jobs:
            engine.finish(job, "text")
        process.communicate()
    sampling = [json.loads(job.body) for job in sorted(jobs, key=lambda job: job.job_id)]
    found = [(each["temperature"], each["top_k"], each["max_tokens"]) for each in sampling]
    assert found == [(0.6, 5, 30), (0, 5, 30)]
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    files.write([call("other")])
    files.output.unlink()
    refused = millrace("run-batch", *files.arguments, *options)
    assert refused.status == INVALID and "generation_config.json is not valid: temperature: must be" in refused.err


def test_texts_that_a_limit_has_cut_are_counted(millrace: Command, engine: EngineByHand, files: Files) -> None:
    files.write([call("cut"), call("whole"), call("refused", max_tokens=0)])
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        for job in claim(engine, 2):
            engine.finish(job, "text", reason="length" if job.job_id.endswith("-1") else "stop")
        _, err = process.communicate()
    assert "millrace: 1 of 3 lines: cut at the limit of tokens" in err


def claim(engine: EngineByHand, num_jobs: int) -> list[ClaimedJob]:
    jobs: list[ClaimedJob] = []

    def has_all() -> bool:
        jobs.extend(engine.claim())
        return len(jobs) == num_jobs

    wait_until(has_all)
    return jobs


def interrupt(millrace: Command, files: Files, num_queued: int) -> str:
    """Interrupt the command when it has submitted its jobs. Return the batch."""
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        wait_until(lambda: millrace("stats", "--json").json_lines()[0]["queued"] == num_queued)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    return str(err.split("millrace cancel --batch ")[1].strip())


def test_jobs_that_were_cancelled_before_a_run_continues_run_again(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call("a"), call("b"), call("c")])
    batch = interrupt(millrace, files, num_queued=3)
    millrace("cancel", "--batch", batch)
    assert millrace("retry", f"{batch}-2").out
    assert millrace("cancel", f"{batch}-2.r1").out
    assert not engine.claim()
    with answering(engine):
        ran = millrace("run-batch", *files.arguments)
    assert ran.status == OK, ran.err
    assert files.statuses() == {"a": 200, "b": 200, "c": 200}
    assert sorted(answer["id"] for answer in files.answers()) == [f"{batch}-{number}" for number in (1, 2, 3)]


def test_a_run_waits_for_jobs_that_were_run_again(millrace: Command, engine: EngineByHand, files: Files) -> None:
    files.write([call("failed"), call("cancelled")])
    batch = interrupt(millrace, files, num_queued=2)
    millrace("cancel", f"{batch}-2")
    engine.fail(engine.claim()[0], "no luck")
    assert millrace("retry", "--batch", batch).out.split() == [f"{batch}-{x}" for x in ("1", "1.r1", "2", "2.r1")]
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        for job in claim(engine, 2):
            engine.finish(job, "at last")
        assert process.wait() == OK
    assert files.statuses() == {"failed": 200, "cancelled": 200}


def test_a_job_that_is_cancelled_during_a_run_stands_in_the_output(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call("a")])
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        wait_until(lambda: len(millrace("ls", "--json").json_lines()) == 1)
        millrace("cancel", millrace("ls", "--json").json_lines()[0]["id"])
        assert process.wait() == OTHER
    assert files.answers()[0]["error"]["code"] == "batch_cancelled"


def test_a_run_that_loses_its_server_or_jobs_names_the_way_to_continue(
    millrace: Command, engine: EngineByHand, files: Files, redis_client: redis.Redis, queue_name: str
) -> None:
    files.write([call("a")])
    submit_each = ReconnectingClient.submit_each

    def lose(client: ReconnectingClient, jobs: Sequence[Submission]) -> list[Any]:
        ends = submit_each(client, jobs)
        redis_client.delete(QueueKeys(queue_name).job(jobs[0].job_id))
        return ends

    redis_client.config_set("maxmemory", 1)
    try:
        full = millrace("run-batch", *files.arguments)
    finally:
        redis_client.config_set("maxmemory", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReconnectingClient, "submit_each", lose)
        lost = millrace("run-batch", *files.arguments)
    assert full.status == lost.status == NO_REDIS
    hint = "millrace: not complete (0 of 1 lines are written; the same command continues): "
    assert full.err.startswith(f"{hint}Redis at ") and "is out of memory" in full.err
    assert lost.err.startswith(f"{hint}the server has lost jobs of this run (run-")
    assert full.err.count("\n") == lost.err.count("\n") == 1
    assert engine.claim() == []  # takes the id of the lost job off the queue, or the next one would be claimed twice
    with answering(engine):
        assert millrace("run-batch", *files.arguments).status == OK


def test_a_server_without_memory_refuses_jobs_but_their_answers_still_come(
    engine: EngineByHand, redis_client: redis.Redis, redis_url: str, queue_name: str
) -> None:
    jobs = [to_submission(GenerationRequest(id=job_id, prompt="x")) for job_id in "abc"]
    claimed: list[ClaimedJob] = []

    def finish_first() -> None:
        if not claimed:
            claimed.extend(engine.claim())
            engine.finish(claimed[0], "one")

    with ReconnectingClient(redis_url, queue_name) as client:
        ends = client.run_all(jobs, max_open=2, check=finish_first)
        assert next(ends)[0] == "a"
        redis_client.config_set("maxmemory", 1)
        try:
            engine.finish(claimed[1], "two")
            assert next(ends)[0] == "b"
            with pytest.raises(RedisUnavailable, match="out of memory"):
                next(ends)
        finally:
            redis_client.config_set("maxmemory", 0)


@pytest.mark.parametrize("second", [["a"], ["a", "b", "c"], ["a", "x"]], ids=["shrunk", "grown", "edited"])
def test_an_input_that_changes_between_its_two_readings_is_refused(
    millrace: Command, engine: EngineByHand, files: Files, second: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write([call("a"), call("b")])
    read_input = batch_files.read_input

    def read_and_change(path: Path) -> batch_files.Input:
        found = read_input(path)
        files.write([call(custom_id) for custom_id in second])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(batch_files, "read_input", read_and_change)
        ran = millrace("run-batch", *files.arguments)
    assert (ran.status, ran.err.count("\n")) == (INVALID, 1)
    assert f"{files.input}: has changed since this command began to read it; put the earlier content back" in ran.err
    assert files.state.exists()
    files.write([call("a"), call("b")])
    with answering(engine):
        assert millrace("run-batch", *files.arguments).status == OK
    assert files.statuses() == {"a": 200, "b": 200}


def test_broken_lines_stand_in_the_output_and_the_others_run(
    millrace: Command, engine: EngineByHand, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 2000)
    huge = json.dumps(call("huge", prompt="x" * 5000)).encode()
    good = json.dumps(call("good")).encode()
    crlf = json.dumps(call("crlf")).encode() + b"\r"
    files.write([b"\xef\xbb\xbf" + good, b"", b"  ", huge, b"\x00\xff\x01", crlf, b'{"custom_id": "half", "met'])
    with answering(engine):
        ran = millrace("run-batch", *files.arguments)
    assert ran.status == OTHER
    assert files.statuses() == {"good": 200, "crlf": 200, None: 400}
    messages = [each["response"]["body"].get("error", {}).get("message", "") for each in files.answers()]
    assert sum("is longer than 2,000 bytes" in message for message in messages) == 1
    assert sum("is not valid JSON" in message for message in messages) == 2
    assert [int(each["id"].rpartition("-")[2]) for each in files.answers() if not each["custom_id"]] == [4, 5, 7]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "latin-1"])
def test_an_input_in_another_encoding_is_told_so(millrace: Command, files: Files, encoding: str) -> None:
    text = json.dumps(call("é"), ensure_ascii=False) + "\n"
    files.input.write_bytes(("\n" + text * 2).encode(encoding))
    ran = millrace("run-batch", *files.arguments)
    assert (ran.status, ran.out) == (INVALID, "")
    assert "in.jsonl: is no text in UTF-8; convert it first, such as with: iconv" in ran.err


def test_a_job_larger_than_the_queue_takes_is_refused_alone(
    millrace: Command, engine: EngineByHand, files: Files, redis_client: redis.Redis, queue_name: str
) -> None:
    redis_client.hset(QueueKeys(queue_name).settings, "max_queued_tokens", 1000)
    files.write([call("a"), call("b", max_tokens=5000), call("c"), call("d", max_tokens=5000)])
    with answering(engine):
        assert millrace("run-batch", *files.arguments).status == OTHER
    assert files.statuses() == {"a": 200, "b": 400, "c": 200, "d": 400}


def test_a_full_queue_delays_a_run_but_does_not_end_it(
    millrace: Command, engine: EngineByHand, files: Files, redis_client: redis.Redis, queue_name: str
) -> None:
    redis_client.hset(QueueKeys(queue_name).settings, "max_queued_jobs", 7)
    files.write([call(f"c{i}") for i in range(30)])
    with answering(engine):
        assert millrace("run-batch", *files.arguments).status == OK
    assert len(files.answers()) == 30


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([call("a"), call("b"), call("a")], "custom_id 'a' is in line 1 and in line 3"),
        ([b"", b" "], "the file has no lines"),
    ],
)
def test_an_input_that_cannot_be_answered_is_refused_before_anything_runs(
    millrace: Command, files: Files, lines: list[Any], message: str
) -> None:
    files.write(lines)
    ran = millrace("run-batch", *files.arguments)
    assert (ran.status, ran.out) == (INVALID, "")
    assert message in ran.err
    assert not files.output.exists() and not files.state.exists()


def test_files_that_cannot_be_used_are_named(millrace: Command, files: Files, tmp_path: Path) -> None:
    files.write([call("a")])
    same = tmp_path / "same.jsonl"
    same.symlink_to(files.input)
    before = tmp_path / "before.jsonl"
    before.write_text("precious\n")
    for output, message in (
        (same, "is the input"),
        (files.input, "is the input"),
        (before, "exists already, and is not the output of this input with these options; name another file"),
        (tmp_path, "has to be a regular file"),
        (tmp_path / "no" / "out.jsonl", f"out.jsonl: there is no directory {tmp_path / 'no'}"),
    ):
        ran = millrace("run-batch", "-i", str(files.input), "-o", str(output))
        assert ran.status == INVALID
        assert message in ran.err and output.name in ran.err and ran.err.count("\n") == 1
    assert before.read_text() == "precious\n"
    assert millrace("run-batch", "-i", "/nowhere", "-o", str(files.output)).status == INVALID
    assert "the input is read twice" in millrace("run-batch", "-i", "-", "-o", str(files.output)).err
    os.mkfifo(pipe := tmp_path / "pipe")
    end = os.open(pipe, os.O_RDWR)  # so that the command need not wait for a writer
    ran = millrace("run-batch", "-i", str(pipe), "-o", str(files.output))
    os.close(end)
    assert ran == (INVALID, "", f"millrace: {pipe}: is a pipe, and the input is read twice; save it to a file\n")
    assert not files.state.exists()


@pytest.mark.parametrize("output", ["-", "/dev/stdout", "/dev/null", "/proc/self/fd/1", "/dev/fd/1"])
def test_an_output_that_cannot_be_continued_is_refused(
    files: Files, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write([call("a")])
    monkeypatch.chdir(tmp_path)
    command = ("-P", "-m", "millrace", "run-batch", "-i", str(files.input), "-o", output)
    with (tmp_path / "stdout").open("wb") as stdout:  # a redirection turns /dev/stdout into a regular file
        for target in (stdout, subprocess.PIPE):
            ran = subprocess.run(
                [sys.executable, *command], stdout=target, stderr=subprocess.PIPE, cwd=tmp_path, env=environment()
            )
            assert (ran.returncode, ran.stdout or b"") == (INVALID, b"")
            reason = "the output has to be a regular file, since a run continues from it; name one, such as out.jsonl"
            assert ran.stderr.decode() == f"millrace: {output}: {reason}\n"
    assert not Path("-").exists() and not Path("-.state").exists()


@pytest.mark.parametrize("option", [("--max-num-seqs", "4"), ("--max-num-seqs=4",), ("--enforce-eager",)])
def test_an_option_of_the_engine_has_to_stand_behind_two_dashes(
    millrace: Command, files: Files, option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = millrace("run-batch", *files.arguments, "--model", str(TINY), *option)
    name = option[0].partition("=")[0]
    assert (ran.status, ran.err.count("\n")) == (INVALID, 1)
    rule = f"{name}: is an option of `millrace serve`; write it behind --, as in --model DIR_OR_ID -- {name}"
    assert f"millrace run-batch: {rule}" in ran.err
    monkeypatch.setitem(sys.modules, "millrace.engine_service.config", None)  # as where only the client is installed
    assert "unrecognized arguments: " in millrace("run-batch", *files.arguments, *option).err
    unknown = millrace("run-batch", *files.arguments, "--colour", "red")
    assert "unrecognized arguments: --colour (leave it out)" in unknown.err
    assert "did you mean --output" in millrace("run-batch", "-i", "a", "-o", "b", "--outptu", "c").err


def test_options_that_do_not_go_together_are_refused(millrace: Command, files: Files) -> None:
    files.write([call("a")])
    assert "leave out --redis" in millrace("run-batch", *files.arguments, "--model", str(TINY)).err
    assert "it needs --model" in millrace("run-batch", *files.arguments, "--", "--max-num-seqs", "8").err


def test_options_for_all_lines_are_checked_first_and_a_run_keeps_them(
    millrace: Command, engine: EngineByHand, files: Files, redis_client: redis.Redis, queue_name: str
) -> None:
    files.write([call("a"), call("b", priority=7), call("c", priority=None)])
    wrong = millrace("run-batch", *files.arguments, "--tenant", "a b")
    assert (wrong.status, wrong.err.count("\n"), files.output.exists()) == (INVALID, 1, False)
    assert "tenant" in wrong.err
    arguments = (*files.arguments, "--tenant", "team", "--priority", "3")
    with started(*millrace.line("run-batch", *arguments)) as process:
        wait_until(lambda: len(millrace("ls", "--json").json_lines()) == 3)
        process.kill()
    records = [QueueKeys(queue_name).job(job["id"]) for job in millrace("ls", "--json").json_lines()]
    ranks = sorted(redis_client.hmget(record, "tenant", "priority") for record in records)
    assert ranks == [[b"team", b"3"], [b"team", b"3"], [b"team", b"7"]]
    other = millrace("run-batch", *files.arguments, "--tenant", "team")
    assert other.status == INVALID
    assert "was begun with --tenant team --priority 3; continue it with the same" in other.err
    with answering(engine):
        assert millrace("run-batch", *arguments).status == OK
    assert files.statuses() == {"a": 200, "b": 200, "c": 200}


def test_a_disk_that_takes_a_part_of_the_last_line_is_full(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call("c" * 5000)])
    with answering(engine):
        with started("-c", WITH_SMALL_FILES, "run-batch", *millrace.place, *files.arguments) as process:
            _, err = process.communicate()
        assert process.returncode == NO_REDIS
        assert "out.jsonl: File too large" in err
        assert millrace("run-batch", *files.arguments).status == OK
    assert len(files.answers()) == 1


def test_a_full_disk_is_named_and_the_same_command_continues(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    files.write([call(f"c{i}") for i in range(50)])
    with answering(engine):
        with started("-c", WITH_SMALL_FILES, "run-batch", *millrace.place, *files.arguments) as process:
            _, err = process.communicate()
        assert process.returncode == NO_REDIS
        assert "out.jsonl: File too large" in err and "of 50 lines are written; the same command continues" in err
        assert millrace("run-batch", *files.arguments).status == OK
    assert files.statuses() == {f"c{i}": 200 for i in range(50)}
    assert len(files.answers()) == 50


def test_a_disk_without_room_for_the_state_is_named(millrace: Command, files: Files) -> None:
    files.write([call("a")])
    script = WITH_SMALL_FILES.replace("5000", "0")
    with started("-c", script, "run-batch", *millrace.place, *files.arguments) as process:
        _, err = process.communicate()
    hint = "not complete (0 of 1 lines are written; the same command continues)"
    assert (process.returncode, err) == (NO_REDIS, f"millrace: {hint}: {files.state}: File too large\n")
    assert not files.output.exists() and not files.state.exists()


def test_a_second_process_cannot_write_the_same_output(millrace: Command, engine: EngineByHand, files: Files) -> None:
    files.write([call("a")])
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        wait_until(files.output.exists)
        ran = millrace("run-batch", *files.arguments)
        assert ran.status == INVALID
        assert "another run-batch writes it now" in ran.err
        with answering(engine):
            assert process.wait() == OK


def test_a_run_continues_only_with_its_own_input(millrace: Command, engine: EngineByHand, files: Files) -> None:
    files.write([call("a")])
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        wait_until(engine.claim)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == INTERRUPTED
    assert "0 of 1 lines are written; the same command continues" in err
    files.write([call("b")])
    ran = millrace("run-batch", *files.arguments)
    assert ran.status == INVALID
    assert "was begun with another input" in ran.err


def test_sigterm_ends_a_run_as_ctrl_c_does(millrace: Command, engine: EngineByHand, files: Files) -> None:
    files.write([call("a")])
    with started(*millrace.line("run-batch", *files.arguments)) as process:
        wait_until(engine.claim)
        process.terminate()
        _, err = process.communicate()
    assert process.returncode == INTERRUPTED
    assert err.startswith("millrace: 0 of 1 lines are written; the same command continues; to cancel its jobs: ")


def kill_at_random_moments(
    millrace: Command, engine: EngineByHand, files: Files, num_kills: int, num_lines: int
) -> None:
    files.write([call(f"c{i}") for i in range(num_lines)])
    moments = random.Random(num_kills)
    num_killed = 0
    with answering(engine):
        for _ in range(num_kills):
            with started(*millrace.line("run-batch", *files.arguments)) as process:
                wait_until(lambda: files.state.exists() or process.poll() is not None)
                time.sleep(moments.uniform(0.0, 0.6))
                process.kill()
                num_killed += process.wait() == -signal.SIGKILL
        ran = millrace("run-batch", *files.arguments)
    assert ran.status == OK, ran.err
    assert num_killed > num_kills // 2
    assert files.statuses() == {f"c{i}": 200 for i in range(num_lines)}
    assert len(files.answers()) == num_lines


def test_a_run_that_is_killed_continues_with_no_line_missing_or_doubled(
    millrace: Command, engine: EngineByHand, files: Files
) -> None:
    kill_at_random_moments(millrace, engine, files, num_kills=3, num_lines=3000)


@pytest.mark.faults
def test_twenty_kills_leave_no_line_missing_or_doubled(millrace: Command, engine: EngineByHand, files: Files) -> None:
    kill_at_random_moments(millrace, engine, files, num_kills=20, num_lines=20_000)


@pytest.mark.slow
def test_fifty_thousand_lines_take_less_than_300_mb(millrace: Command, engine: EngineByHand, files: Files) -> None:
    files.write([call(f"c{i}", prompt="word " * 100) for i in range(50_000)])
    script = (  # not `getrusage`, which also counts the process of the tests, up to the exec
        "import sys; from millrace.cli import main; status = main(sys.argv[1:]);"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]); sys.exit(status)"
    )
    with answering(engine), started("-c", script, "run-batch", *millrace.place, *files.arguments) as process:
        out, err = process.communicate()
    assert process.returncode == OK, err
    assert int(out) < 300_000  # KiB
    assert len(files.answers()) == 50_000
