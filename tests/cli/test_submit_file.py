"""`millrace submit --file`: a job on each line, bad ones by their number, results as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import redis

from results.messages import ClaimedJob
from tests.cli.command import Command, started
from tests.cli.conftest import EngineByHand


def write_lines(path: Path, *lines: bytes | dict[str, Any]) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_every_line_becomes_a_job(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "jobs", *({"id": f"j{n}", "prompt": "x"} for n in range(600)))
    ran = millrace("submit", "--file", str(file))
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.split() == [f"j{n}" for n in range(600)]
    assert millrace("stats", "--json").json_lines()[0]["queued"] == 600


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
    *complaints, last = ran.err.splitlines()
    numbers = [int(line.removeprefix("millrace: line ").partition(":")[0]) for line in complaints]
    assert sorted(numbers) == [2, 4, 5, 6, 7, 8, 9, 11]
    assert last == "millrace: jobs submitted: 3, lines refused: 8"


def test_a_line_that_the_server_refuses_stops_nothing_either(millrace: Command, tmp_path: Path) -> None:
    late = {"prompt": "x", "run_at": 9e9, "deadline_s": 5}
    lines = [{"id": f"j{n}", "prompt": "x"} for n in range(600)]
    file = write_lines(tmp_path / "jobs", *lines[:3], {"id": "late", **late}, *lines[3:], {"id": "later", **late})
    ran = millrace("submit", "--file", str(file))
    assert ran.status == 2
    assert ran.out.split() == [line["id"] for line in lines]
    first, second, last = ran.err.splitlines()
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
    conflict, other, last = ran.err.splitlines()
    assert conflict.startswith("millrace: line 2: id: already taken")
    assert other.startswith("millrace: line 3: id: already taken")  # by line 4, which came in with it
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
    late, conflict, full = ran.err.splitlines()
    assert late.startswith("millrace: line 1: deadline_s")
    assert conflict.startswith("millrace: line 3: id: already taken")
    assert full.startswith("millrace: not submitted: line 4, all from line 6 on: the tenant has as many jobs waiting")
    assert ran.status not in (0, 2)


def test_the_same_file_twice_is_the_same_jobs(millrace: Command, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "jobs", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"})
    for _ in range(2):
        assert millrace("submit", "--file", str(file)).out.split() == ["a", "b"]
    assert millrace("stats", "--json").json_lines()[0]["queued"] == 2


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
        rest, words = waiting.communicate(timeout=20)
    assert {json.loads(line)["state"] for line in rest.splitlines()} == {"failed", "finished"}
    assert words == f"millrace: {jobs[0].job_id}: failed: no luck\n"
    assert waiting.returncode == 1


def test_waiting_too_long_is_status_5(millrace: Command) -> None:
    ran = millrace("submit", "--file", "-", "--wait", "--timeout", "0.2", stdin='{"prompt": "x"}')
    assert (ran.status, ran.out) == (5, "")
