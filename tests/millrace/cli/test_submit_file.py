"""`millrace submit --file`: a job on each line, bad ones by their number, results as they come."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from millrace import QueueFull
from millrace.cli.exits import CommandError
from millrace.cli.reconnecting_client import ReconnectingClient
from millrace.cli.submit_file import _Submission, submit_file
from millrace.results.messages import ClaimedJob, Submission
from tests.millrace.cli.command import WITH_SMALL_FILES, Command, python, run_main, started
from tests.millrace.cli.conftest import EngineByHand
from tests.processes import LIMIT_S

TO_FULL_DISK = (
    "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]], stdout=open('/dev/full', 'w')))"
)

BATCH = re.compile(r"^millrace: new jobs are in batch (submit-[0-9a-f]{12})\n", re.MULTILINE)


def write_lines(path: Path, *lines: bytes | dict[str, Any]) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def remarks(err: str) -> list[str]:
    """Return the lines of stderr without the one that names the batch."""
    names = BATCH.findall(err)
    assert len(names) == 1
    return BATCH.sub("", err).splitlines()


def test_every_line_becomes_a_job(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "jobs", *({"id": f"j{n}", "prompt": "x"} for n in range(600)))
    ran = millrace("submit", "--file", str(file))
    assert (ran.status, remarks(ran.err)) == (0, [])
    assert ran.out.split() == [f"j{n}" for n in range(600)]
    assert millrace("stats", "--json").json_lines()[0]["queued"] == 600
    assert millrace("submit", "--file", str(file), "--json").json_lines()[599] == {"id": "j599"}


def test_an_option_fills_a_field_that_is_null_and_a_byte_order_mark_is_no_part_of_the_first_line(
    millrace: Command, tmp_path: Path, engine: EngineByHand
) -> None:
    nulls = b'{"id": "a", "prompt": "x", "seed": null, "meta": null, "tenant": null, "max_tokens": null}'
    file = write_lines(tmp_path / "jobs", b"\xef\xbb\xbf" + nulls)
    options = ("--seed", "7", "--meta", '{"a": 1}', "--tenant", "t", "--max-tokens", "5")
    assert millrace("submit", "--file", str(file), *options).out == "a\n"
    (job,) = engine.claim()
    expected = {"prompt": "x", "seed": 7, "max_tokens": None, "tenant": "t", "meta": {"a": 1}}
    assert json.loads(job.body) == expected


def test_what_was_submitted_is_counted_also_where_it_could_not_be_printed(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "jobs", *({"prompt": "x" * 99} for _ in range(400)))
    ran = python("-c", TO_FULL_DISK, *millrace.line("submit", "--file", str(file)))
    assert "400 jobs submitted, up to line 400" in ran.err
    assert millrace("stats", "--json").json_lines()[0]["queued"] == 400


def test_a_line_in_openais_batch_format_names_run_batch(millrace: Command, tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "x"}
    file = write_lines(tmp_path / "jobs", {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    assert "use id, or run-batch for a file in OpenAI's batch format" in millrace("submit", "--file", str(file)).err


def test_a_bad_line_is_named_and_stops_nothing(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "jobs",
        {"id": "a", "prompt": "x"},
        b"not json",
        b"",
        {"id": "b", "prompt": "x", "max_tokens": 0},
        {"id": "c", "prompt": "x", "colour": "red"},
        b"[1, 2]",
        b'{"id": "d", "prompt": "\xff"}',
        {"id": "e", "prompt": "x" * (1 << 20)},
        {"id": "a", "prompt": "another"},
        {"id": "a", "prompt": "x"},
        b"[" * 20_000,
        {"id": "f", "prompt": "x"},
    )
    ran = millrace("submit", "--file", str(file))
    assert ran.status == 2
    assert ran.out.split() == ["a", "a", "f"]
    *complaints, repeated, last = remarks(ran.err)
    numbers = [int(line.removeprefix("millrace: line ").partition(":")[0]) for line in complaints]
    assert sorted(numbers) == [2, 4, 5, 6, 7, 8, 9, 11]
    assert complaints[0].endswith(
        'body: must be a JSON object on one line, such as {"prompt": "3 + 4 ="}, got \'not json\''
    )
    assert repeated == "millrace: lines that repeat an id, and so are no jobs of their own: 1"
    assert last == "millrace: jobs submitted: 2, lines refused: 8"


def test_of_many_bad_lines_only_the_first_are_named(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.csv", *(b"%d,text" % number for number in range(1500)))
    ran = millrace("submit", "--file", str(file))
    assert (ran.status, ran.out) == (2, "")
    *shown, more, last = ran.err.splitlines()
    assert [line.partition(": body: must be a JSON object")[0] for line in shown] == [
        f"millrace: line {number}" for number in range(1, 21)
    ]
    assert more == "millrace: and 1,480 more lines are refused"
    assert last == "millrace: jobs submitted: 0, lines refused: 1500"


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b'{"prompt": "x"}\n' * 99), '{"prompt": "x"}\n'.encode("utf-16")],
    ids=["gzip", "utf-16"],
)
def test_a_file_that_is_no_text_is_refused_with_one_message(millrace: Command, content: bytes) -> None:
    ran = millrace("submit", "--file", "-", stdin=content)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "--file: is compressed, or no text in UTF-8; unpack or convert it first" in ran.err


def test_a_first_line_of_other_bytes_costs_no_other_line(millrace: Command) -> None:
    ran = millrace("submit", "--file", "-", stdin=b'\0\0\n{"id": "a", "prompt": "x"}\n')
    assert (ran.status, ran.out) == (2, "a\n")


def test_lines_that_repeat_an_id_are_one_job(millrace: Command, engine: EngineByHand, tmp_path: Path) -> None:
    lines = [{"id": job_id, "prompt": "x"} for job_id in ("a", "b", "a", *(f"c{n}" for n in range(600)), "a")]
    file = write_lines(tmp_path / "jobs", *lines)
    repeated = "millrace: lines that repeat an id, and so are no jobs of their own: 2"
    assert remarks(millrace("submit", "--file", str(file)).err) == [repeated]
    counts = "millrace: jobs: 0 new, 602 in the queue already (602 queued)"
    assert millrace("submit", "--file", str(file)).err.splitlines() == [counts, repeated]


def test_a_line_that_the_server_refuses_stops_nothing_either(millrace: Command, tmp_path: Path) -> None:
    late = {"prompt": "x", "run_at": 9e9, "deadline_s": 5}
    lines = [{"id": f"j{n}", "prompt": "x"} for n in range(600)]
    file = write_lines(tmp_path / "jobs", *lines[:3], {"id": "late", **late}, *lines[3:], {"id": "later", **late})
    ran = millrace("submit", "--file", str(file))
    assert ran.status == 2
    assert ran.out.split() == [line["id"] for line in lines]
    first, second, last = remarks(ran.err)
    assert first.startswith("millrace: line 4: deadline_s: is over before job 'late'")
    assert second.startswith("millrace: line 602: deadline_s: is over before job 'later'")
    assert last == "millrace: jobs submitted: 600, lines refused: 2"


def test_lines_with_one_id_are_judged_each_by_itself(millrace: Command, tmp_path: Path) -> None:
    late = {"prompt": "x", "run_at": 9e9, "deadline_s": 5}
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "x"},
        {"id": "a", "prompt": "y"},
        {"id": "b", **late},
        {"id": "b", "prompt": "x"},
    ]
    ran = millrace("submit", "--file", str(write_lines(tmp_path / "jobs", *lines)))
    assert (ran.status, ran.out.split()) == (2, ["a", "b"])
    conflict, other, last = remarks(ran.err)
    assert conflict.startswith("millrace: line 2: id: already taken")
    assert other.startswith("millrace: line 3: deadline_s: is over before job")
    assert last == "millrace: jobs submitted: 2, lines refused: 2"


def test_at_a_limit_every_line_that_is_not_in_the_queue_is_named(
    millrace: Command, tmp_path: Path, redis_client: redis.Redis, queue_name: str
) -> None:
    redis_client.hset(f"millrace:{{{queue_name}}}:settings", "tenant_max_queued_jobs", 1)
    lines: list[dict[str, Any]] = [
        {"id": "late", "prompt": "x", "run_at": 9e9, "deadline_s": 5},
        {"id": "a", "prompt": "x"},
        {"id": "a", "prompt": "y"},
        {"id": "b", "prompt": "x"},
        {"id": "c", "prompt": "x", "tenant": "other"},
        *({"id": f"d{n}", "prompt": "x"} for n in range(600)),
    ]
    ran = millrace("submit", "--file", str(write_lines(tmp_path / "jobs", *lines)))
    assert ran.out.split() == ["a", "c"]
    late, conflict, full = remarks(ran.err)
    assert late.startswith("millrace: line 1: deadline_s")
    assert conflict.startswith("millrace: line 3: id: already taken")
    assert full.startswith("millrace: not submitted: line 4, all from line 6 on: the tenant has as many jobs waiting")
    assert ran.status not in (0, 2)


class DrainedClient(ReconnectingClient):
    """There is room again as soon as it has been told that there is none."""

    num_calls = 0

    def limit(self, **limits: int) -> None:
        for name, value in limits.items():
            self._transport.send(("HSET", self._keys.settings, name, str(value)))

    def submit_each(self, *arguments: Any, **options: Any) -> list[Any]:
        self.num_calls += 1
        ends = super().submit_each(*arguments, **options)
        if any(isinstance(end, QueueFull) for end in ends):
            self._transport.send(("DEL", self._keys.settings))
        return ends


@pytest.fixture
def client(redis_url: str, queue_name: str) -> Iterator[DrainedClient]:
    client = DrainedClient(redis_url, queue_name)
    yield client
    client.close()


def arguments(file: Path | str = "-") -> Namespace:
    place = {"queue": "default", "redis": None, "batch": None, "durability": "memory"}
    return Namespace(file=str(file), wait=False, timeout=None, json=False, **place)


@pytest.mark.parametrize(("num_lines", "num_bytes"), [(1000, 1), (200, 100_000)])
def test_at_a_limit_nothing_more_is_sent_even_if_there_is_room_again(
    num_lines: int, num_bytes: int, client: DrainedClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round trip takes 256 jobs, or 4 MiB."""
    lines = [{"id": f"j{n}", "prompt": "x" * num_bytes} for n in range(num_lines)]
    lines[-1] = lines[5]  # so the id says of the last line neither that it was sent nor that it was not
    file = write_lines(tmp_path / "jobs", *lines[:10], {"prompt": ""}, *lines[10:])
    client.limit(max_queued_jobs=20)
    with pytest.raises(CommandError) as error:
        submit_file(client, arguments(file), {})
    assert client.stats().queued == 20
    assert capsys.readouterr().out.split() == [line["id"] for line in lines[:20]]
    assert str(error.value).startswith(
        "not submitted: all from line 22 on: the queue has as many jobs waiting as max_queued_jobs allows, 20. "
    )
    assert str(error.value).endswith("; 20 jobs of the file are in the queue: the same command resumes")
    assert client.num_calls == 1


def test_at_a_limit_the_jobs_of_the_whole_file_are_counted(client: DrainedClient, tmp_path: Path) -> None:
    client.limit(max_queued_jobs=700)
    file = write_lines(tmp_path / "jobs", *({"prompt": "x"} for _ in range(1000)))
    with pytest.raises(CommandError, match=r"^not submitted: all from line 701 on: .*; 700 jobs of the file") as error:
        submit_file(client, arguments(file), {})
    assert str(error.value).endswith("have no id, so submit a file of only the lines that are named here")


def test_with_wait_a_file_waits_for_space_in_the_queue(
    millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    redis_client.hset(f"millrace:{{{queue_name}}}:settings", "max_queued_jobs", 2)
    lines = '{"prompt": "x"}\n' * 5
    late = millrace("submit", "--file", "-", "--wait", "--timeout", "0.2", stdin=lines)
    assert remarks(late.err)[-1].startswith("millrace: not submitted: all from line 3 on: ")
    with started(*millrace.line("submit", "--file", "-", "--wait"), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(lines)
        process.stdin.close()
        num_finished = 0
        while num_finished < 7:
            for job in engine.claim():
                engine.finish(job, "text")
                num_finished += 1
        assert process.stdout is not None and process.stderr is not None
        assert len(process.stdout.readlines()) == 5
        waits = "millrace: no space in the queue (max_queued_jobs 2): waiting until jobs have ended"
        assert remarks(process.stderr.read()) == [waits]
        assert process.wait() == 0


def test_at_a_limit_a_pipe_need_not_end_first(client: DrainedClient) -> None:
    def open_pipe() -> Iterator[bytes]:
        for n in range(500):
            yield b'{"id":"j%d","prompt":"x"}\n' % n
        raise AssertionError("it has waited for another line")

    client.limit(max_queued_jobs=20)
    with pytest.raises(CommandError, match=r"^not submitted: all from line 21 on: "):
        list(_Submission(client, arguments(), {}).submit(open_pipe()))


def test_what_a_pipe_has_given_is_submitted_while_it_is_open(millrace: Command) -> None:
    with started(*millrace.line("submit", "--file", "-"), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in range(2):
            process.stdin.write('{"prompt":"x"}\n')
            process.stdin.flush()
            assert process.stdout.readline().strip()
            assert millrace("stats", "--json").json_lines()[0]["queued"] == number + 1
        process.stdin.write('{"id":"last","prompt":"x"}')
        process.stdin.close()
        assert process.stdout.readline().strip() == "last"


def test_the_same_command_resumes_unless_a_line_without_an_id_was_sent(client: DrainedClient) -> None:
    def interrupted(*lines: bytes) -> Iterator[bytes | None]:
        yield from lines
        yield None
        yield b'{"prompt":"not sent"}'
        raise KeyboardInterrupt

    for first, remedy in ((b'{"id":"a","prompt":"x"}', "the same command resumes"), (b'{"prompt":"x"}', "some lines")):
        submission = _Submission(client, arguments(), {})
        with pytest.raises(KeyboardInterrupt):
            list(submission.submit(interrupted(first)))
        assert submission.hint()[0] == "1 job submitted, up to line 1"
        assert submission.hint()[1].startswith(remedy)


@pytest.mark.parametrize(("tenants", "named"), [("xxy", "line 2"), ("xxyz", "line 2, all from line 4 on")])
def test_at_a_limit_no_line_is_named_that_is_not_there(
    tenants: str, named: str, client: DrainedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.cli.submit_file._BATCH_LINES", 3)
    client.limit(tenant_max_queued_jobs=1)
    file = write_lines(tmp_path / "jobs", *({"prompt": "x", "tenant": tenant} for tenant in tenants))
    with pytest.raises(CommandError, match=f"^not submitted: {named}: the tenant has"):
        submit_file(client, arguments(file), {})


def test_a_job_larger_than_a_limit_is_refused_and_the_others_go_in(
    millrace: Command, tmp_path: Path, redis_client: redis.Redis, queue_name: str
) -> None:
    settings = f"millrace:{{{queue_name}}}:settings"
    redis_client.hset(settings, "max_queued_tokens", 50)
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "x", "max_tokens": 9},
        {"id": "large", "prompt": "x", "max_tokens": 99},
        {"id": "b", "prompt": "x", "max_tokens": 9},
    ]
    ran = millrace("submit", "--file", str(write_lines(tmp_path / "jobs", *lines)))
    assert (ran.status, ran.out.split()) == (2, ["a", "b"])
    large, last = remarks(ran.err)
    assert large.startswith(
        "millrace: line 2: max_tokens: the prompt and n x max_tokens of job 'large' are more tokens than"
    )
    assert last == "millrace: jobs submitted: 2, lines refused: 1"
    redis_client.hset(settings, "tenant_max_queued_jobs", 3)
    lines += [{"id": name, "prompt": "x", "max_tokens": 9} for name in "cd"]
    ran = millrace("submit", "--file", str(write_lines(tmp_path / "jobs", *lines)))
    assert ran.out.split() == ["a", "b", "c"]
    large, full = remarks(ran.err)
    assert large.startswith(
        "millrace: line 2: max_tokens: the prompt and n x max_tokens of job 'large' are more tokens than"
    )
    assert full.startswith("millrace: not submitted: all from line 5 on: the tenant has as many jobs waiting")


def test_the_same_file_twice_is_the_same_jobs(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "jobs", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"})
    for _ in range(2):
        assert millrace("submit", "--file", str(file)).out.split() == ["a", "b"]
    assert millrace("stats", "--json").json_lines()[0]["queued"] == 2


def test_submitting_again_says_what_is_new_and_what_became_of_the_others(
    millrace: Command, engine: EngineByHand, tmp_path: Path
) -> None:
    lines = [{"id": job_id, "prompt": "x"} for job_id in "abcd"]
    assert millrace("submit", "--file", str(write_lines(tmp_path / "jobs", *lines[:3])), "--batch", "one").err == ""
    jobs = {str(job.job_id): job for job in engine.claim()}
    engine.finish(jobs["a"], "text")
    engine.fail(jobs["b"], "no luck")
    all_lines = write_lines(tmp_path / "jobs", *lines, {"id": "a", "prompt": "other"}, {"prompt": "no id"})
    ran = millrace("submit", "--file", str(all_lines), "--batch", "two")
    assert ran.status == 2
    refused, counts, lost, other_batch, _ = ran.err.splitlines()
    assert refused.startswith("millrace: line 5: id: already taken")
    assert counts == "millrace: jobs: 2 new, 3 in the queue already (1 finished, 1 failed, 1 running)"
    again = f"millrace retry b {' '.join(millrace.place[2:])}"
    assert lost.startswith(f"millrace: not run again, since they have ended without a result: b; to run them: {again}")
    assert other_batch == "millrace: not in batch 'two', since a job stays in its first batch (one): a, b, c"
    ran = millrace("submit", "x", "--id", "b")
    assert (ran.status, ran.out) == (0, "b\n")
    assert "jobs: 0 new, 1 in the queue already (1 failed)" in ran.err


def test_the_results_of_a_batch_are_printed_or_written(millrace: Command, engine: EngineByHand, tmp_path: Path) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id, "--batch", "both")
    for job in engine.claim():
        if job.job_id == "a":
            engine.finish(job, "text")
    output = tmp_path / "out.jsonl"
    printed = run_main("batch", "results", *millrace.place, "both")
    ran = run_main("batch", "results", *millrace.place, "both", "-o", str(output))
    assert (printed.status, ran.status, ran.out) == (0, 0, "")
    assert output.read_text() == printed.out
    assert [(job["id"], job["text"]) for job in printed.json_lines()] == [("a", "text")]
    assert printed.err.startswith("millrace: 1 of 2 jobs have not ended; to wait for them: millrace wait --batch both")
    assert run_main("batch", "results", *millrace.place, "none").status == 3


@pytest.mark.parametrize("lines", ["", "\n \r\n"])
def test_a_file_without_lines_is_refused(lines: str, millrace: Command, tmp_path: Path) -> None:
    (file := tmp_path / "jobs").write_text(lines)
    assert millrace("submit", "--file", str(file)) == (2, "", f"millrace: {file}: the file has no lines\n")
    assert millrace("submit", "--file", "-", "--wait", stdin=lines).err == "millrace: stdin: the file has no lines\n"


def test_a_full_disk_below_the_ids_says_what_is_submitted(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "jobs", *({"id": f"j{n}", "prompt": "x"} for n in range(3)))
    ran = python("-c", TO_FULL_DISK, *millrace.line("submit", "--file", str(file)))
    assert (ran.status, ran.out) == (1, "")
    assert "millrace: the output cannot be written: No space left on device; " in ran.err
    assert ran.err.endswith("the same command resumes\n")
    assert millrace("stats", "--json").json_lines()[0]["queued"] == 3


def test_results_that_the_disk_has_no_room_for_leave_the_file_as_it_was(
    millrace: Command, engine: EngineByHand, tmp_path: Path
) -> None:
    millrace("submit", "x", "--id", "a", "--batch", "one")
    engine.finish(engine.claim()[0], "text" * 2000)
    (output := tmp_path / "out").write_text("before")
    options = ("results", *millrace.place, "one", "-o", str(output))
    ran = python("-c", WITH_SMALL_FILES, "batch", *options)
    assert (ran.status, ran.err) == (1, f"millrace: {output}: File too large\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "before")]


def test_options_fill_what_a_line_leaves_out(millrace: Command, engine: EngineByHand) -> None:
    lines = '{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "x", "max_tokens": 5}\n'
    assert millrace("submit", "--file", "-", "--max-tokens", "9", stdin=lines).status == 0
    limits = {job.job_id: json.loads(job.body)["max_tokens"] for job in engine.claim()}
    assert limits == {"a": 9, "b": 5}


def test_a_lines_own_fields_and_the_options_are_judged_together(millrace: Command, engine: EngineByHand) -> None:
    lines = (
        '{"id": "a", "prompt": "x", "min_tokens": 20}\n {"id":"b","prompt":"x"}\n{}\n{"id": "c", "min_tokens": 60}\n'
    )
    ran = millrace("submit", "--file", "-", "--max-tokens", "50", "--meta", '{"from": "é"}', stdin=lines)
    assert (ran.status, ran.out) == (2, "a\nb\n")
    assert [line.split(": ")[1:3] for line in ran.err.splitlines()[:2]] == [
        ["line 3", "prompt"],
        ["line 4", "min_tokens"],
    ]
    assert [json.loads(job.body).get("min_tokens") for job in engine.claim()] == [20, None]
    assert millrace("get", "b", "--json").json_lines()[0]["meta"] == {"from": "é"}


def test_odd_fields_of_lines_are_refused_by_name(millrace: Command, tmp_path: Path) -> None:
    odd: list[tuple[str, Any]] = [
        ("delay_s", -1),
        ("deadline_s", 0),
        ("deadline_s", -5),
        ("priority", 1.5),
        ("priority", "high"),
        ("tenant", "a b"),
        ("tenant", ""),
        ("batch", "nightly"),
    ]
    file = write_lines(
        tmp_path / "jobs", b'{"prompt": "x", "deadline_s": NaN}', *({"prompt": "x", k: v} for k, v in odd)
    )
    ran = millrace("submit", "--file", str(file))
    assert (ran.status, ran.out) == (2, "")
    fields = [line.split(": ")[2] for line in ran.err.splitlines()[:-1]]
    assert fields == ["deadline_s", *(name for name, _ in odd)]


def test_waiting_prints_each_result_when_it_is_there(millrace: Command, engine: EngineByHand, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "jobs", {"id": "a", "prompt": "x"}, {"prompt": "no id"}, {"id": "c", "prompt": "x"})
    with started(*millrace.line("submit", "--file", str(file), "--wait")) as waiting:
        assert waiting.stdout
        jobs: list[ClaimedJob] = []
        while len(jobs) < 3:
            jobs += engine.claim()
        engine.finish(jobs[2], "three")
        assert json.loads(waiting.stdout.readline())["id"] == jobs[2].job_id
        engine.fail(jobs[0], "no luck")
        engine.finish(jobs[1], "two")
        rest, words = waiting.communicate(timeout=LIMIT_S)
    assert {json.loads(line)["state"] for line in rest.splitlines()} == {"failed", "finished"}
    assert remarks(words) == [f"millrace: {jobs[0].job_id}: failed: no luck"]
    assert waiting.returncode == 1


def test_results_come_while_a_pipe_is_open(millrace: Command, engine: EngineByHand) -> None:
    with started(*millrace.line("submit", "--file", "-", "--wait"), stdin=subprocess.PIPE) as waiting:
        assert waiting.stdin and waiting.stdout and waiting.stderr
        for job_id in ("a", "b"):
            waiting.stdin.write(f'{{"id": "{job_id}", "prompt": "x"}}\n')
            waiting.stdin.flush()
            while not (jobs := engine.claim()):
                pass
            engine.finish(jobs[0], "text")
            assert json.loads(waiting.stdout.readline())["id"] == job_id
        waiting.stdin.close()
        assert (remarks(waiting.stderr.read()), waiting.wait()) == ([], 0)


def test_results_come_while_a_file_is_submitted(
    client: DrainedClient, engine: EngineByHand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part of the file ends before the next one is sent."""
    submit_each, num_printed = client.submit_each, list[int]()

    def submit_and_end(jobs: Sequence[Submission], *options: Any) -> list[Any]:
        num_printed.append(capsys.readouterr().out.count('"text":"y"'))
        ends = submit_each(jobs, *options)
        while claimed := engine.claim():
            for job in claimed:
                engine.finish(job, "y")
        return ends

    client.submit_each = submit_and_end  # type: ignore[method-assign]
    lines = [{"id": f"j{n}", "prompt": "x"} for n in range(1500)]
    lines[1200] = lines[700]
    file = write_lines(tmp_path / "jobs", *lines)
    args = arguments(file)
    args.wait = True
    assert submit_file(client, args, {}) == 0
    assert num_printed == [0, 500, 500]
    assert capsys.readouterr().out.count('"text":"y"') == 499


def test_a_file_without_a_batch_gets_one_for_its_new_jobs(
    millrace: Command, engine: EngineByHand, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "jobs", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"})
    (batch,) = BATCH.findall(millrace("submit", "--file", str(file)).err)
    for job in engine.claim():
        engine.finish(job, "text")
    assert sorted(job["id"] for job in millrace("wait", "--batch", batch).json_lines()) == ["a", "b"]
    for more in ((), ("--batch", "two")):
        ran = millrace("submit", "--file", str(file), *more)
        assert (ran.status, ran.out) == (0, "a\nb\n")
        assert "millrace: jobs: 0 new, 2 in the queue already (2 finished)\n" in ran.err
        assert not BATCH.findall(ran.err)
        assert run_main("batch", "status", *millrace.place, "two").status == 3


def test_waiting_too_long_is_status_5(millrace: Command) -> None:
    ran = millrace("submit", "--file", "-", "--wait", "--timeout", "0.2", stdin='{"prompt": "x"}')
    assert (ran.status, ran.out) == (5, "")
