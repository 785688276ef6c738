"""One job through the command, on a real server: submit, look, stream, cancel, and every error with its exit status."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from millrace import Client, Job
from millrace.cli import main
from millrace.cli.output import print_table
from millrace.embedded import EmbeddedServer
from millrace.producer.prompt_start import prompt_start
from millrace.results.messages import Append, ChatOutput, ClaimedJob, NewOutput
from millrace.results.queue import JobQueue
from tests.millrace.cli.command import Command, environment, python, run_main, started
from tests.millrace.cli.conftest import EngineByHand
from tests.processes import LIMIT_S, ROOT
from tests.results.chats import show_chat
from tests.results.engines import Engine


def test_a_submitted_job_can_be_looked_up(millrace: Command) -> None:
    assert millrace("submit", "3 + 4 =", "--id", "a", "--max-tokens", "4") == (0, "a\n", "")
    (job,) = millrace("get", "a", "--json").json_lines()
    assert (job["id"], job["state"], job["text"]) == ("a", "queued", "")


def test_the_options_reach_the_request(millrace: Command, engine: EngineByHand) -> None:
    options = ("--temperature", "0.5", "--top-k", "3", "--seed", "7", "--stop", "a", "--stop", "b", "--ignore-eos")
    assert millrace("submit", "-", *options, "--stop-token-ids", "5", stdin="from stdin\n").status == 0
    (job,) = engine.claim()
    assert job.seed == 7
    for part in ('"prompt":"from stdin"', '"temperature":0.5', '"top_k":3', '"stop":["a","b"]', '"ignore_eos":true'):
        assert part in job.body.decode()


def test_the_parameters_of_logits_and_text_reach_the_request(millrace: Command, engine: EngineByHand) -> None:
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"42": -100.0},
        "thinking_token_budget": 9,
        "truncate_prompt_tokens": -1,
    }
    options = [part for name, value in fields.items() for part in (f"--{name.replace('_', '-')}", json.dumps(value))]
    options += ["--bad-words", "a", "--bad-words", "b", "--allowed-token-ids", "5", "--include-stop-str-in-output"]
    options += ["--no-skip-special-tokens", "--no-spaces-between-special-tokens"]
    assert millrace("submit", "x", *options).status == 0
    (job,) = engine.claim()
    flags = {"include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
    lists = {"bad_words": ["a", "b"], "allowed_token_ids": [5]}
    assert json.loads(job.body) == {"prompt": "x", **fields, **lists, **flags}
    assert millrace("submit", "x", "--max-tokens", "none").status == 0
    (job,) = engine.claim()
    assert json.loads(job.body) == {"prompt": "x", "max_tokens": None}
    assert "logit_bias: of token id 5 must be a number" in millrace("submit", "x", "--logit-bias", '{"5":"1"}').err


TAGS = '{"structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<a>"]}'


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (("--schema", "SCHEMA"), {"json": '{"type":"object","properties":{"b":{},"a":{}}}'}),
        (("--regex", "[0-9]+"), {"regex": "[0-9]+"}),
        (("--choice", "yes", "--choice", "no"), {"choice": ["yes", "no"]}),
        (("--grammar", "GRAMMAR"), {"grammar": 'start: "a"\n'}),
        (("--json-object",), {"json_object": True}),
        (("--structural-tag", "TAGS"), {"structural_tag": TAGS}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_form_of_the_output_reaches_the_request(
    options: tuple[str, ...], form: dict[str, Any], millrace: Command, engine: EngineByHand, tmp_path: Path
) -> None:
    (tmp_path / "SCHEMA").write_text('{"type": "object", "properties": {"b": {}, "a": {}}}')
    (tmp_path / "GRAMMAR").write_text('start: "a"\n')
    (tmp_path / "TAGS").write_text(TAGS)
    words = [str(tmp_path / word) if word in ("SCHEMA", "GRAMMAR", "TAGS") else word for word in options]
    assert millrace("submit", "x", *words).status == 0
    line = '{"prompt": "x"}\n{"prompt": "x", "structured_outputs": {"regex": "b"}}\n'
    assert millrace("submit", "--file", "-", *words, stdin=line).status == 0
    found = [json.loads(job.body)["structured_outputs"] for job in engine.claim()]
    assert found == [form, form, {"regex": "b"}]


def test_a_form_that_cannot_be_is_refused(millrace: Command, tmp_path: Path) -> None:
    (tmp_path / "schema").write_text("{")
    broken = f"{tmp_path}/schema"
    assert f"--schema: '{broken}' is not valid JSON" in millrace("submit", "x", "--schema", broken).err
    assert "--schema: cannot read" in millrace("submit", "x", "--schema", f"{tmp_path}/none").err
    assert "give exactly one of json, regex, " in millrace("submit", "x", "--regex", "a", "--json-object").err


def test_a_chat_is_submitted_with_its_tools_and_variables(millrace: Command, engine: EngineByHand) -> None:
    messages = '[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hel"}]'
    tools = '[{"type":"function","function":{"name":"f"}}]'
    options = ("--tools", tools, "--tool-choice", "auto", "--chat-template-kwargs", '{"a":1}')
    assert millrace("submit", "--messages", messages, *options, "--continue-final-message").status == 0
    (job,) = engine.claim()
    assert json.loads(job.body) == {
        "messages": json.loads(messages),
        "tools": json.loads(tools),
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert "tools: needs messages" in millrace("submit", "x", "--tools", tools).err
    assert "must be a JSON list" in millrace("submit", "--messages", "{}").err


def test_a_tool_is_chosen_by_name_and_called_once(millrace: Command, engine: EngineByHand) -> None:
    tools = '[{"type":"function","function":{"name":"f"}}]'
    chat = ("--messages", '[{"role":"user","content":"Hi"}]', "--tools", tools)
    named = '{"type": "function", "function": {"name": "f"}}'
    ran = millrace("submit", *chat, "--tool-choice", named, "--no-parallel-tool-calls", "--no-add-generation-prompt")
    assert ran.status == 0
    body = json.loads(engine.claim()[0].body)
    assert body["tool_choice"] == json.loads(named)
    assert (body["parallel_tool_calls"], body["add_generation_prompt"]) == (False, False)
    assert "--tool-choice: must be a JSON object" in millrace("submit", *chat, "--tool-choice", "{").err
    assert "tool_choice: must be auto, none, required or" in millrace("submit", *chat, "--tool-choice", "some").err


def test_tokens_are_submitted_and_no_text_is_made(millrace: Command, engine: EngineByHand) -> None:
    options = ("--no-detokenize", "--cache-salt", "acme")
    assert millrace("submit", "--prompt-token-ids", "[1, 2]", *options).status == 0
    body = json.loads(engine.claim()[0].body)
    assert (body["prompt_token_ids"], body["detokenize"], body["cache_salt"]) == ([1, 2], False, "acme")
    assert "prompt_token_ids: must be a list of integers" in millrace("submit", "--prompt-token-ids", "[1, -2]").err
    assert "not allowed with" in millrace("submit", "x", "--prompt-token-ids", "[1]").err
    assert millrace("submit", "--prompt-token-ids", "-", stdin="[3,\n4]\n").status == 0
    assert json.loads(engine.claim()[0].body)["prompt_token_ids"] == [3, 4]
    ran = millrace("submit", "--prompt-token-ids", "-", stdin="3 4")
    assert ran.status == 2
    assert ran.err.startswith("millrace: stdin: must be a JSON list") and len(ran.err.splitlines()) == 1


def test_what_an_engine_wrote_is_shown(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    engine.finish(engine.claim()[0], "täglich\n")
    facts, text = millrace("get", "a").out.split("\n", 1)
    run = r"queued [0-9]+\.[0-9]{2} s, total [0-9]+\.[0-9]{2} s, attempt 1, engine by-hand"
    assert re.fullmatch(r"a: finished \(stop\), 3 prompt \+ 9 output tokens, " + run, facts)
    assert text == "täglich\n\n"
    times = json.loads(millrace("get", "a", "--json").out)["timings"]
    assert times["total_s"] == (times["ended_ms"] - times["created_ms"]) / 1000
    assert (times["prefill_s"], times["decode_s"]) == (None, None)  # this engine does not say when the first token came
    assert millrace("submit", "x", "--id", "a", "--wait").out == "täglich\n\n"
    assert millrace("tail", "a").out == "täglich\n\n"
    first, last = millrace("tail", "a", "--json").json_lines()
    assert (first["text"], last["text"], last["state"]) == ("täglich\n", "", "finished")
    assert [event["id"] for event in millrace("tail", "a", "--json", "--after", first["id"]).json_lines()] == [
        last["id"]
    ]


def test_a_terminal_without_the_characters_gets_escapes(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    engine.finish(engine.claim()[0], "weiß")
    ran = python(*millrace.line("tail", "a"), PYTHONIOENCODING="ascii")
    assert (ran.status, ran.out) == (0, "wei\\xdf\n")
    ran = python(*millrace.line("ls"), PYTHONIOENCODING="ascii")
    assert (ran.status, ran.out.split("\t")[-1]) == (0, "x -> wei\\xdf\n")
    ran = python(*millrace.line("get", "a", "--json"), PYTHONIOENCODING="ascii")
    assert (ran.status, ran.json_lines()[0]["text"]) == (0, "weiß")  # JSON is UTF-8 on any terminal


def test_a_terminal_gets_the_text_as_it_is(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    engine.finish(engine.claim()[0], "[red]:fire:")
    controller, terminal = os.openpty()
    with os.fdopen(controller, "rb", buffering=0) as shown:
        command = [sys.executable, *millrace.line("ls")]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=terminal, timeout=LIMIT_S, check=True)
        os.close(terminal)
        assert b"[red]:fire:" in shown.read(4096)


HOSTILE = "\x1b]0;title\x07\x1b[2J\r\x7f\x9b31m\u202eab\u2066\tß\n."
HARMLESS = r"\x1b]0;title\x07\x1b[2J\r\x7f\x9b31m\u202eab\u2066" + "\tß\n."


def on_terminal(line: Sequence[str]) -> str:
    """Run a command with a terminal as stdout and stderr, and return what it writes."""
    controller, terminal = os.openpty()
    with os.fdopen(controller, "rb", buffering=0) as shown:
        subprocess.run(
            [sys.executable, *line], cwd=ROOT, env=environment(), stdout=terminal, stderr=terminal, timeout=LIMIT_S
        )
        os.close(terminal)
        seen = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while True:
                seen += shown.read(4096)
    return seen.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("verb", ["get", "tail", "wait"])
def test_a_model_cannot_control_the_terminal(
    verb: str, millrace: Command, redis_client: redis.Redis, queue_name: str
) -> None:
    engine = Engine(JobQueue(redis_client, queue_name))
    millrace("submit", "--messages", '[{"role": "user", "content": "x"}]', "--id", "a")
    job = engine.claim_one()
    assert engine.show(job, 0, [5], HOSTILE, chat=ChatOutput(reasoning=HOSTILE)) == "ok"
    assert engine.show(job, 1, [6], HOSTILE, chat=ChatOutput(content=HOSTILE)) == "ok"
    engine.finish(job)
    shown = on_terminal(millrace.line(verb, "a"))
    assert shown.endswith(f"--- reasoning\n{HARMLESS}\n--- answer\n{HARMLESS}\n")
    ran = python(*millrace.line(verb, "a"))
    assert ran.out.endswith(f"{HOSTILE}\n"), "a pipe gets the text as it is"
    assert ran.err == f"--- reasoning\n{HOSTILE}\n--- answer\n"


def test_json_on_a_terminal_is_the_same_json(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    engine.finish(engine.claim()[0], HOSTILE)
    shown = on_terminal(millrace.line("get", "a", "--json"))
    assert [c for c in shown if not c.isprintable()] == ["\n"]
    assert json.loads(shown)["text"] == HOSTILE
    assert "\u202e" in python(*millrace.line("get", "a", "--json")).out


def test_a_stream_is_printed_as_it_comes(millrace: Command, engine: EngineByHand) -> None:
    with started(*millrace.line("submit", "x", "--stream")) as streaming:
        while not (jobs := engine.claim()):
            assert streaming.poll() is None
        engine.finish(jobs[0], "seven")
        assert streaming.communicate(timeout=LIMIT_S)[0] == "seven\n"
    assert streaming.returncode == 0


def test_a_failed_job_gives_status_1_and_its_reason(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    engine.fail(engine.claim()[0], "the model is tired")
    for verb in (("tail", "a"), ("submit", "x", "--id", "a", "--wait")):
        assert millrace(*verb) == (1, "", "millrace: a: failed: the model is tired\n")
    assert millrace("get", "a").out.startswith("a: failed (error), 3 prompt + 0 output tokens, the model is tired, ")


def test_cancelling_says_what_became_of_each(millrace: Command) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id)
    assert millrace("cancel", "a", "b") == (0, "a\tcancelled\nb\tcancelled\n", "")
    assert millrace("cancel", "a", "--json").json_lines() == [{"id": "a", "outcome": "cancelled"}]
    assert millrace("get", "a").out.startswith("a: cancelled")


def test_all_waiting_jobs_are_cancelled_at_once(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "first")
    engine.claim()
    for number in range(3):
        millrace("submit", "x", "--id", f"a{number}", "--tenant", f"t{number}")
    millrace("submit", "x", "--id", "late", "--delay-s", "3600")
    ran = millrace("cancel", "--waiting")
    assert sorted(ran.out.splitlines()) == [f"{job_id}\tcancelled" for job_id in ("a0", "a1", "a2", "late")]
    assert millrace("get", "first").out.startswith("first: running")
    assert millrace("cancel", "--waiting", "a0").err == "millrace: cancel: give either job ids, --batch or --waiting\n"


def test_deleting_leaves_nothing_of_a_job_that_has_ended(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a", "--batch", "night")
    engine.finish(engine.claim()[0], "the text")
    for job_id in ("b", "c"):
        millrace("submit", "x", "--id", job_id, "--batch", "night")
    assert millrace("delete", "a") == (0, "a\tdeleted\n", "")
    assert millrace("get", "a").status == 3
    millrace("cancel", "b")
    ran = millrace("delete", "--batch", "night")
    assert (ran.status, ran.out) == (1, "a\tunknown\nb\tdeleted\nc\tqueued\n")
    assert ran.err == "millrace: not deleted, since they have not ended; cancel them first: c\n"
    assert millrace("delete", "a", "c", "--json").json_lines() == [{"id": "c", "outcome": "queued"}]
    assert millrace("delete").status == 2


def test_an_unknown_job_keeps_no_other_from_being_cancelled(millrace: Command) -> None:
    millrace("submit", "x", "--id", "live")
    ran = python(*millrace.line("cancel", "nobody"), "\udcff", "live")  # \xff as a terminal sends it
    assert (ran.status, ran.out) == (3, "live\tcancelled\n")
    assert [line.partition(" in queue")[0] for line in ran.err.splitlines()] == [
        "millrace: no job 'nobody'",
        "millrace: no job '\\udcff'",
    ]


def test_a_name_that_is_no_text_is_not_found(millrace: Command) -> None:
    for verb in ("get", "tail", "cancel", "delete", "retry"):
        ran = millrace(verb, "\udcff")
        assert (ran.status, ran.out) == (3, "")
        assert ran.err.startswith("millrace: no job '\\udcff' in queue ")
    assert millrace("cancel", "--batch", "\udcff").err.startswith("millrace: no batch '\\udcff' in queue ")
    assert millrace("wake", "--engine", "\udcff").err.startswith("millrace: no engine '\\udcff' runs on queue ")
    assert millrace("submit", "\udcff").err.startswith("millrace: prompt: ")


def test_what_is_no_event_cannot_be_gone_on_from(millrace: Command) -> None:
    millrace("submit", "x", "--id", "a")
    ran = millrace("tail", "a", "--after", "yesterday")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("millrace: after: must be the id of an event")


def test_a_text_that_begins_anew_says_so(millrace: Command, redis_client: redis.Redis, queue_name: str) -> None:
    queue = JobQueue(redis_client, queue_name)
    redis_client.hset(queue.keys.settings, "max_events", 4)
    millrace("submit", "x", "--id", "a")
    engine = Engine(queue)
    job = engine.claim_one()
    for number in range(2):
        engine.show(job, number, [number], str(number))
    place = next(Client(redis_client, queue_name).stream("a")).id
    for number in range(2, 9):
        engine.show(job, number, [number], str(number))
    engine.finish(job)
    ran = millrace("tail", "a", "--after", place)
    assert ran.out == "012345678\n"
    assert f"job 'a' has lost events after {place}; its text follows from the beginning" in ran.err


def test_reasoning_is_printed_apart_from_content_and_calls(
    millrace: Command, redis_client: redis.Redis, queue_name: str
) -> None:
    engine = Engine(JobQueue(redis_client, queue_name))
    millrace("submit", "--messages", '[{"role": "user", "content": "x"}]', "--id", "a", "--n", "2")
    job = engine.claim_one()
    show_chat(engine, job, range(3), 0)
    assert millrace("get", "a").err == "--- reasoning\né0 é1 é2 \n"
    show_chat(engine, job, range(3, 9), 0)
    show_chat(engine, job, range(4, 6), 1, first=-4)
    engine.finish(job)
    (fields,) = millrace("get", "a", "--json").json_lines()
    whole = ["--- candidate 0", "é5 é6 é8 ", "CALL", "--- candidate 1", "é5 "]
    for verb, lines in (("get", whole), ("wait", whole), ("tail", ["é5 é6 ", "CALL", "é8 ", *whole[3:]])):
        ran = millrace(verb, "a")
        assert ran.err == "--- reasoning\né0 é1 é2 é3 \n--- answer\n"
        shown = [line for line in ran.out.splitlines() if not line.startswith("a: finished")]
        position = lines.index("CALL")
        assert json.loads(shown[position]) == fields["tool_calls"][0]
        assert [*shown[:position], "CALL", *shown[position + 1 :]] == lines


def test_jobs_are_listed_by_state(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    engine.finish(engine.claim()[0], "two\nlines")
    millrace("submit", "x", "--id", "b")
    rows = [line.split("\t") for line in millrace("ls").out.splitlines()]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("b", "queued", "0", "x"),
        ("a", "finished", "9", "x -> two lines"),
    ]
    assert [job["id"] for job in millrace("ls", "--state", "finished", "--json").json_lines()] == ["a"]
    assert millrace("ls", "--limit", "1").out.count("\n") == 1
    millrace("submit", "x", "--id", "c", "--batch", "one")
    millrace("submit", "x", "--id", "d", "--batch", "one")
    millrace("cancel", "c")
    for more, listed in (((), ["d", "c"]), (("--limit", "1"), ["d"]), (("--state", "cancelled"), ["c"])):
        assert [job["id"] for job in millrace("ls", "--batch", "one", "--json", *more).json_lines()] == listed
    assert millrace("ls", "--batch", "none").status == 3


def test_a_job_that_goes_on_while_jobs_are_listed_is_listed_once(
    millrace: Command, engine: EngineByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job_id in ("a", "b"):
        millrace("submit", "x", "--id", job_id)
    list_jobs = Client.list_jobs

    def list_and_go_on(client: Client, state: Any, limit: int) -> list[Job]:
        found = list_jobs(client, state, limit)
        if state == "queued":
            running.extend(engine.claim())
        elif state == "running":
            engine.finish(running.pop(), "text")
        return found

    running: list[ClaimedJob] = []
    monkeypatch.setattr(Client, "list_jobs", list_and_go_on)
    rows = [tuple(line.split("\t")[:2]) for line in millrace("ls").out.splitlines()]
    assert rows == [("a", "running"), ("b", "finished")]


def test_a_job_that_is_deleted_while_its_batch_is_listed_is_left_out(
    millrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job_id in ("a", "b", "c"):
        millrace("submit", "x", "--id", job_id, "--batch", "one")
    millrace("cancel", "b")
    batch_jobs = Client.batch_jobs

    def list_and_delete(client: Client, batch: str) -> dict[str, str]:
        found = batch_jobs(client, batch)
        millrace("delete", "b")
        return found

    monkeypatch.setattr(Client, "batch_jobs", list_and_delete)
    assert [job["id"] for job in millrace("ls", "--batch", "one", "--json").json_lines()] == ["a", "c"]


@pytest.mark.parametrize("id_length", [32, 128])
def test_a_narrow_terminal_shows_whole_ids(
    id_length: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("id", "state", "tokens", "text"), [("a" * id_length, "finished", "900", "many words " * 5)])
    assert "a" * id_length + "  finished  900 " in capsys.readouterr().out


ERROR = "the device reported " + "a long error " * 20


@pytest.mark.parametrize("columns", [60, 100, 1000])
def test_failed_jobs_are_listed_with_their_errors(
    columns: int,
    millrace: Command,
    engine: EngineByHand,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    millrace("submit", "x", "--id", "a")
    engine.fail(engine.claim()[0], ERROR + "\nand its stack")
    assert millrace("ls", "--state", "failed").out.endswith(f"\terror: {ERROR}\n")
    (job,) = millrace("ls", "--state", "failed", "--json").json_lines()
    assert job["error"]["message"] == ERROR + "\nand its stack"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["ls", *millrace.place]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert re.match(r"a   failed  0       \d+ s +error: the device reported a long", line)
    assert "stack" not in line
    assert line.strip().endswith("…") and len(line.rstrip()) == columns if columns < 200 else ERROR.strip() in line


def test_running_jobs_show_how_far_they_are(
    millrace: Command, engine: EngineByHand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    millrace("submit", "Once upon\na time", "--id", "a", "--tenant", "t", "--meta", '{"prompt": 1}')
    (job,) = engine.claim()
    engine.show(job, "one")
    assert re.fullmatch(
        "a: running, 3 tokens so far, attempt 1, engine by-hand, submitted [0-9]+ s ago, tenant t, "
        "prompt: Once upon a time\none\n",
        millrace("get", "a").out,
    )
    assert re.fullmatch(
        "a\trunning\t3\t[0-9]+ s\t1\tt\tby-hand\tOnce upon a time -> one\n", millrace("ls", "--state", "running").out
    )
    for verb in (("get", "a"), ("ls",)):
        (shown,) = millrace(*verb, "--json").json_lines()
        assert (shown["num_tokens"], shown["engine"], shown["tenant"], shown["attempt"], shown["prompt"]) == (
            *(3, "by-hand", "t", 1),
            "Once upon\na time",
        )
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns, is_engine_shown in (("90", True), ("60", False)):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["ls", *millrace.place]) == 0
        row = capsys.readouterr().out.splitlines()[-1]
        assert ("  t  " in row, "  by-hand  " in row) == (True, is_engine_shown)


def test_tokens_that_nobody_watches_are_counted_too(redis_client: redis.Redis, queue_name: str) -> None:
    queue = JobQueue(redis_client, queue_name)
    client = Client(redis_client, queue_name)
    client.submit("x", job_id="a", n=2)
    engine = Engine(queue)
    job = engine.claim_one()
    outputs = [NewOutput(offset=0, token_ids=[1, 2], index=index) for index in range(2)]
    assert queue.write([Append(job_id=job.job_id, lease=job.lease, fingerprint="f", outputs=outputs)]) == ["ok"]
    assert (client.get("a").num_tokens, client.get("a").token_ids) == (4, [])


def test_a_list_says_why_its_jobs_do_not_begin(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x")
    assert "no engine serves queue" in millrace("ls").err
    assert millrace("ls", "--state", "finished").err == ""
    engine.claim()
    assert millrace("ls").err == ""


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"max_tokens":4,"prompt":"a \\"b\\" \\u00e4 \\ud83d\\ude00","top_k":1}', 'a "b" \xe4 \U0001f600'),
        (b'{"prompt":"abc\\', "abc"),
        (b'{"prompt":"ab\xc3', "ab"),
        (b'{"prompt":"ab\\ud83d', "ab?"),
        (b'{"messages":[{"content":"Hello","role":"user"}]}', "Hello"),
        (b'{"messages":[{"content":[{"text":"Hello","type":"text"}],"role":"user"}]}', "Hello"),
        (b'{ "messages" : [{"role":"user","content":[{"type":"text","text":"Hel', "Hel"),
        (b'{"meta":{"content":"x","prompt":"y"},"min_p":0.5,"prompt":"z"}', "z"),
        (b'{"meta":{"content":"x","pro', ""),
        (b'{"meta":' + b"[" * 100_000, ""),
        (b'{"prompt_token_ids":[1,2,3]}', "[1,2,3"),
        (b"{}", ""),
        (b"", ""),
    ],
)
def test_the_beginning_of_a_prompt_is_read_from_a_part_of_the_body(body: bytes, shown: str) -> None:
    assert prompt_start(body) == shown


def test_the_counts_of_a_queue(millrace: Command, engine: EngineByHand, queue_name: str) -> None:
    ran = millrace("stats", "--min-engines", "1")
    assert (ran.status, ran.err.partition(": ")[2]) == (
        1,
        f"queue {queue_name}: 0 engines have a heartbeat, 1 required\n",
    )
    millrace("submit", "x")
    engine.finish(engine.claim()[0], "text")
    (counts,) = millrace("stats", "--json").json_lines()
    assert (counts["queued"], counts["finished"], counts["engines"], counts["generated_tokens"]) == (0, 1, 1, 4)
    ran = millrace("stats", "--min-engines", "1")
    assert ran.status == 0
    assert "generated tokens\t4\n" in ran.out
    assert "paused\tno\n" in ran.out
    assert "queue_name: 1 engine has a heartbeat, 2 required" in millrace("stats", "--min-engines", "2").err.replace(
        queue_name, "queue_name"
    )


def test_an_unknown_job_is_status_3(millrace: Command) -> None:
    for verb in ("get", "tail", "cancel"):
        ran = millrace(verb, "nobody")
        assert (ran.status, ran.out) == (3, "")
        assert "nobody" in ran.err
        assert len(ran.err.splitlines()) == 1


def test_an_invalid_request_is_status_2_and_names_the_field(millrace: Command) -> None:
    millrace("submit", "x", "--id", "a")
    for arguments, field in [
        (("x", "--max-tokens", "0"), "max_tokens"),
        (("x", "--temperature", "nan"), "temperature"),
        (("",), "prompt"),
        (("another prompt", "--id", "a"), "id"),
    ]:
        ran = millrace("submit", *arguments)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith(f"millrace: {field}: ")
        assert len(ran.err.splitlines()) == 1
    assert millrace("submit", "-", stdin=b"\xff").status == 2
    ran = millrace("submit", "x", "--id", "not an id")
    assert (ran.status, ran.out) == (2, "")
    assert "argument --id: must match [A-Za-z0-9._-]{1,128}, got 'not an id'" in ran.err


@pytest.mark.parametrize(
    "options",
    [
        ("--temperature", "nan"),
        ("--delay-s", "-1"),
        ("--delay-s", "inf"),
        ("--deadline-s", "0"),
        ("--deadline-s", "-5"),
        ("--deadline-s", "nan"),
        ("--deadline-s", "5", "--delay-s", "5"),
        ("--run-at", "1700000000000"),
        ("--run-at", "2030-01-31", "--delay-s", "1"),
        ("--priority", "3000000000"),
        ("--tenant", "a b"),
        ("--batch", "a b"),
        ("--batch", ""),
        ("--meta", '{"a": NaN}'),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_named_before_anything_is_submitted(
    options: tuple[str, ...], millrace: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command in this process: nothing of it depends on a process of its own."""
    field = options[0].removeprefix("--").replace("-", "_")
    (tmp_path / "jobs").write_text('{"prompt": "x"}\n')
    for what in (("x",), ("--file", str(tmp_path / "jobs"))):
        assert main(["submit", *millrace.place, *what, *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"millrace: {field}: ")
        assert len(err.splitlines()) == 1


def test_a_queue_name_that_cannot_be_is_status_2(redis_url: str) -> None:
    for verb in (("stats",), ("ls",), ("submit", "x")):
        ran = Command(redis_url, "a b")(*verb)
        assert ran.status == 2
        assert ran.err.startswith("millrace: queue: ")


def test_a_server_that_cannot_be_used_is_status_4(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/no.sock", "redis://127.0.0.1:1/0"):
        ran = Command(url, "default")("stats")
        assert (ran.status, ran.out) == (4, "")
        assert len(ran.err.splitlines()) == 1
    assert Command("http://127.0.0.1", "default")("stats").status == 2, "another attempt ends the same way"


def test_no_job_may_be_in_the_queue_where_the_server_has_refused_it_or_was_not_there() -> None:
    with EmbeddedServer(options={"maxmemory": "1"}) as server:
        refused = run_main("submit", "x", "--redis", server.url)
        server.stop()
        absent = run_main("submit", "x", "--redis", server.url)
    assert (refused.status, absent.status) == (4, 4)
    assert "is out of memory" in refused.err
    assert "may be in the queue" not in refused.err
    assert absent.err.endswith(". Start a Redis there, or check --redis or MILLRACE_REDIS_URL.\n")


def test_the_server_comes_from_the_environment_too(millrace: Command, redis_url: str, queue_name: str) -> None:
    millrace("submit", "x", "--id", "a")
    ran = python("-P", "-m", "millrace", "get", "a", "--queue", queue_name, MILLRACE_REDIS_URL=redis_url)
    assert ran.out.startswith("a: queued, ")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line(millrace: Command, options: list[str]) -> None:
    command = [sys.executable, *millrace.line("stats", *options)]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, cwd=ROOT, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert (ran.returncode, ran.stderr) == (1, b"millrace: stdout can't be written: No space left on device\n")


def test_the_id_of_a_job_is_told_where_stdout_cannot_be_written(millrace: Command) -> None:
    command = [sys.executable, *millrace.line("submit", "x", "--id", "a")]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, cwd=ROOT, env=environment(), stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S)
    message = b"job 'a' is in the queue, but stdout can't be written: No space left on device"
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (1, b"millrace: " + message)
    assert millrace("get", "a").status == 0


@pytest.mark.parametrize(
    ("verb", "closed", "message"),
    [
        (("stats",), ">&-", "stdout is closed"),
        (("submit", "-"), "<&-", "stdin is"),
        (("submit", "--file", "-"), "<&-", "stdin is"),
        (("submit", "--prompt-token-ids", "-"), "<&-", "stdin is"),
    ],
)
def test_a_closed_stream_is_named(millrace: Command, verb: tuple[str, ...], closed: str, message: str) -> None:
    command = f"{sys.executable} {' '.join(millrace.line(*verb))} {closed}"
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, timeout=LIMIT_S)
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith(f"millrace: {message}") and ran.stderr.count(b"\n") == 1


def test_waiting_too_long_is_status_5(millrace: Command) -> None:
    ran = millrace("submit", "x", "--wait", "--timeout", "0.2")
    assert (ran.status, ran.out) == (5, "")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("verb", [("stats",), ("ls", "--json")])
def test_a_reader_that_has_seen_enough_ends_it_quietly_as_sigpipe_does(
    verb: tuple[str, ...], millrace: Command
) -> None:
    millrace("submit", "x")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *millrace.line(*verb)]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT_S)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, b"")


# --- several candidates ---------------------------------------------------------------------------------------------


def test_every_candidate_is_shown(millrace: Command, engine: EngineByHand) -> None:
    assert millrace("submit", "x", "--id", "a", "--n", "2") == (0, "a\n", "")
    (claimed,) = engine.claim()
    engine.finish(claimed, "one", "two")
    texts = "--- candidate 0\none\n--- candidate 1\ntwo\n"
    assert millrace("submit", "x", "--id", "a", "--n", "2", "--wait").out == texts
    facts, shown = millrace("get", "a").out.split("\n", 1)
    assert facts.startswith("a: finished (stop), 3 prompt + 6 output tokens, ") and shown == texts
    assert millrace("tail", "a").out == "one\n--- candidate 1\ntwo\n"
    (job,) = millrace("get", "a", "--json").json_lines()
    assert (job["text"], [output["text"] for output in job["outputs"]]) == ("one", ["one", "two"])
    events = millrace("tail", "a", "--json").json_lines()
    assert [event["index"] for event in events if not event["state"]] == [0, 1]


@pytest.mark.parametrize("options", [{"logprobs": 0}, {"n": 2}, {"meta": {"a": [1]}}])
def test_the_command_and_a_program_print_the_same_json(
    options: dict[str, Any], millrace: Command, engine: EngineByHand, redis_client: redis.Redis, queue_name: str
) -> None:
    client = Client(redis_client, queue_name)
    client.submit("x", job_id="a", **options)
    (claimed,) = engine.claim()
    engine.finish(claimed, *["one", "two"][: options.get("n", 1)])
    job = client.get("a").to_dict()
    assert json.loads(json.dumps(job)) == job == millrace("get", "a", "--json").json_lines()[0]
    assert job["timings"]["total_s"] == client.get("a").timings.total_s
    events = [event.to_dict() for event in client.stream("a")]
    assert json.loads(json.dumps(events)) == events == millrace("tail", "a", "--json").json_lines()


def test_json_does_not_repeat_the_only_text(millrace: Command, engine: EngineByHand) -> None:
    millrace("submit", "x", "--id", "a")
    engine.finish(engine.claim()[0], "one")
    (job,) = millrace("get", "a", "--json").json_lines()
    assert (job["text"], "outputs" in job) == ("one", False)


@pytest.mark.parametrize(("n", "temperature"), [("65", "1"), ("0", "1"), ("2", "0")])
def test_a_number_of_candidates_that_cannot_be_is_named(millrace: Command, n: str, temperature: str) -> None:
    ran = millrace("submit", "x", "--n", n, "--temperature", temperature)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("millrace: n: ")
