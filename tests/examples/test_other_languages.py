"""The clients in other languages on a real server: they use only what docs/protocol.md describes."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from typing import Any

import pytest

from millrace import GenerationRequest, SamplingParams
from millrace.embedded import EmbeddedServer
from millrace.engine_service.serving.inbox import Inbox
from millrace.producer.errors import InvalidRequest
from millrace.producer.options import build_request
from millrace.producer.wire import parse_body, to_submission
from millrace.results.connection import connect
from millrace.results.keys import QueueKeys
from millrace.results.messages import Event, InboxEntry, JobError, JobId
from millrace.results.queue import JobQueue
from millrace.results.replies import Outcome
from tests.examples.conftest import LIMIT_S, NODE, needs_node
from tests.processes import ROOT
from tests.results.engines import Engine
from tests.results.invariants import check_queue

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="no bash on this machine: the shell example is not run")


class Answerer:
    """Owns a thread that answers one job as an engine: three events and a given end."""

    def __init__(self, url: str, state: str = "finished") -> None:
        self._queue = JobQueue(connect(url), "examples")
        self._state = state
        self.body = b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        check_queue(self._queue._client, "examples")
        self._queue.close()

    def _run(self) -> None:
        engine, limit_s = Engine(self._queue), time.monotonic() + LIMIT_S
        while not (jobs := engine.claim(1)):
            assert time.monotonic() < limit_s
            for entry in self._queue.read_inbox("0", 10, 50):
                self._take(entry)
        self.body = jobs[0].body
        first = 0 if len(jobs[0].checkpoints) > 1 else None
        for offset, text in enumerate(["sev", "en é", ' "quoted"\n']):
            engine.show(jobs[0], offset, [offset], text, first)
            if len(jobs[0].checkpoints) > 1:
                engine.show(jobs[0], offset, [offset], f"{offset}, ", 2)
        end = Event(offset=3, token_ids=[3], text="end", index=first)
        if self._state == "failed":
            engine.finish(jobs[0], end, state="failed", error=JobError(kind="internal", message="no more tea"))
        else:
            engine.finish(jobs[0], end)

    def _take(self, entry: InboxEntry) -> None:
        assert self._queue.accept(entry.entry_id, to_submission(parse_body(entry.raw))) == Outcome("created")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


TEXT = 'seven é "quoted"\nend'
PROMPT = 'say "hé"\tand \\ so\non'


@needs_node
def test_a_job_from_node(server: EmbeddedServer) -> None:
    answerer = Answerer(server.url)
    ran = run(NODE or "", "examples/node/generate.js", PROMPT, server.url, "examples")
    answerer.join()
    assert (ran.returncode, ran.stdout) == (0, TEXT), ran.stderr
    request = parse_body(answerer.body)
    assert (request.prompt, request.stream, request.meta) == (PROMPT, True, {"from": "node"})
    job_id = ran.stderr.split()[1]
    with connect(server.url) as client:
        assert JobQueue(client, "examples").get(job_id).meta == {"from": "node"}


@needs_node
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost"]
)  # a name with two addresses gives an error without a message
def test_node_reports_a_server_that_is_away_in_one_line(host: str) -> None:
    ran = run(NODE or "", "examples/node/generate.js", "x", f"redis://{host}:1")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "ECONNREFUSED" in ran.stderr


@needs_bash
def test_bash_reports_a_server_that_is_away_in_one_line() -> None:
    ran = run(BASH or "", "examples/shell/generate.sh", "x", "127.0.0.1:1")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", "no Redis answers at 127.0.0.1:1\n")


@needs_node
def test_node_takes_login_and_database_from_the_url(server: EmbeddedServer) -> None:
    script = """
    import { Redis } from "./examples/node/redis.js";
    const redis = await Redis.connect(process.argv[1]);
    await redis.command("SET", "who", "node");
    redis.close();
    """
    with connect(server.url) as admin:
        admin.execute_command("ACL SETUSER", "app", "on", ">p@ss word", "~*", "+@all")
    url = server.url.replace("redis://", "redis://app:p%40ss%20word@").removesuffix("/0") + "/3"
    ran = run(NODE or "", "--input-type=module", "--eval", script, url)
    assert ran.returncode == 0, ran.stderr
    with connect(url) as client:
        assert client.get("who") == b"node"


@needs_node
def test_node_and_python_agree_on_the_digest(server: EmbeddedServer) -> None:
    script = """
    import { Millrace } from "./examples/node/millrace.js";
    import { Redis } from "./examples/node/redis.js";
    const redis = await Redis.connect(process.argv[1]);
    const millrace = new Millrace(redis, { queue: "examples", lua: "results/lua" });
    const id = await millrace.submit({ id: "same", prompt: "x", max_tokens: 5, delay_s: 3600.5, stop: ["b", "a"] });
    await redis.command("SCRIPT", "FLUSH");
    console.log(await millrace.submit({ prompt: "x", max_tokens: 5, id, stop: ["b", "a"], delay_s: 3600.5 }));
    console.log(await millrace.submit({ id, prompt: "y" }).catch((error) => error.message));
    console.log(await millrace.submit({ prompt: "y", tenant: "a b" }).catch((error) => error.message));
    console.log(await millrace.state(id), await millrace.cancel(id), (await millrace.wait(id)).state);
    redis.close();
    """
    ran = run(NODE or "", "--input-type=module", "--eval", script, server.url)
    assert ran.stdout.splitlines() == [
        "same",
        "the id same belongs to another job",
        "the job was refused: invalid tenant",
        "delayed cancelled cancelled",
    ], ran.stderr
    request = parse_body(b'{"id":"same","prompt":"x","max_tokens":5,"delay_s":3600.5,"stop":["b","a"]}')
    with connect(server.url) as client:
        assert JobQueue(client, "examples").submit([to_submission(request)]) == [Outcome("exists")]


@needs_node
def test_what_is_null_in_node_is_not_given(server: EmbeddedServer) -> None:
    script = """
    import { Millrace } from "./examples/node/millrace.js";
    import { Redis } from "./examples/node/redis.js";
    const redis = await Redis.connect(process.argv[1]);
    const millrace = new Millrace(redis, { queue: "examples", lua: "results/lua" });
    const id = await millrace.submit({ prompt: "x", delay_s: 3600, run_at: null, deadline_s: null, meta: null, seed: -1 });
    console.log(await millrace.state(id));
    console.log(await redis.command("HGET", `millrace:{examples}:job:${id}`, "seed"));
    redis.close();
    """
    ran = run(NODE or "", "--input-type=module", "--eval", script, server.url)
    state, seed = ran.stdout.split()
    assert (state, int(seed) >= 0) == ("delayed", True)


@needs_node
def test_every_field_may_be_null_in_node(server: EmbeddedServer) -> None:
    request = {
        **dict.fromkeys([*GenerationRequest.__struct_fields__, *SamplingParams.__struct_fields__]),
        "prompt": "x",
    }
    del request["sampling"]
    with connect(server.url) as client:
        job_id = submit_in_node(server.url, request)
        queue = JobQueue(client, "examples")
        body, record = client.get(queue.keys.body(job_id)), client.hgetall(queue.keys.job(job_id))
    assert job_id != "null"
    assert body == b'{"max_tokens":null,"prompt":"x"}'
    assert (record[b"tenant"], record[b"priority"], record[b"cost"]) == (b"default", b"0", b"1025")


SCHEMA = {
    "type": "object",
    "properties": {
        "zebra": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é\u2028\x1f/"}}},
        "age": {"type": "number", "minimum": 0.5},
    },
    "required": ["zebra", "age"],
}
SCHEMA_TEXT = '{"type": "object",\n "properties": {"b \\"": {"const": "\\u00e9\\/ \\\\"}, "a": {}, "10": {}, "9": {}}}'
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@needs_node
@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": "x", "structured_outputs": {"regex": None, "json": SCHEMA}},
        {"prompt": "x", "structured_outputs": {"json": SCHEMA_TEXT}},
        {"prompt": "x", "structured_outputs": {"json": False}},
        {"prompt": "x", "structured_outputs": {"structural_tag": TAG}},
        {"prompt": "x", "structured_outputs": {"choice": ["b", "a"]}, "response_format": {"type": "text"}},
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"prompt": "x", "response_format": {"type": "json_object"}},
        {"prompt": "x", "response_format": {"type": "structural_tag", **TAG}},
        {"messages": [{"role": "user", "content": None, "tool_calls": [TOOL]}], "tools": [TOOL], "max_tokens": None},
        {
            "prompt": "é",
            "temperature": 0,
            "top_p": 0.5,
            "logit_bias": {"100": 1, "20": 0.5},
            "stop": "b",
            "delay_s": 60,
        },
        {"prompt": "x", "meta": {"\U0001f600": 1, "\uff01": {"10": 1, "9": 2.5}, "temperature": 1}},
    ],
)
def test_the_same_request_from_node_and_python_is_the_same_job(
    server: EmbeddedServer, request_: dict[str, Any]
) -> None:
    submit_in_node(server.url, {"id": "same", **request_})
    options: Any = {"job_id": "same", **request_}
    submission = to_submission(build_request(options.pop("prompt", None), options))
    with connect(server.url) as client:
        queue = JobQueue(client, "examples")
        assert client.get(queue.keys.body("same")) == submission.body
        assert client.hget(queue.keys.job("same"), "cost") == str(submission.cost).encode()
        assert queue.submit([submission]) == [Outcome("exists")]


@needs_node
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json": SCHEMA}},
    ],
)
def test_the_engine_refuses_a_response_format_that_node_does_not_know(
    server: EmbeddedServer, form: dict[str, Any]
) -> None:
    job_id = submit_in_node(server.url, {"prompt": "x", **form})
    with connect(server.url) as client:
        body = client.get(QueueKeys("examples").body(job_id))
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body)
    assert caught.value.field == "response_format"


def submit_in_node(url: str, request: dict[str, Any]) -> JobId:
    """Submit a request with the Node client. Return the job's id."""
    script = """
    import { Millrace } from "./examples/node/millrace.js";
    import { Redis } from "./examples/node/redis.js";
    const redis = await Redis.connect(process.argv[1]);
    console.log(await new Millrace(redis, { queue: "examples" }).submit(JSON.parse(process.argv[2])));
    redis.close();
    """
    ran = run(NODE or "", "--input-type=module", "--eval", script, url, json.dumps(request))
    assert ran.returncode == 0, ran.stderr
    return JobId(ran.stdout.strip())


@needs_node
def test_node_says_why_a_job_can_never_be_taken(server: EmbeddedServer) -> None:
    script = """
    import { Millrace } from "./examples/node/millrace.js";
    import { Redis } from "./examples/node/redis.js";
    const redis = await Redis.connect(process.argv[1]);
    const millrace = new Millrace(redis, { queue: "examples", lua: "results/lua" });
    console.log(await millrace.submit({ prompt: "x", max_tokens: 50 }).catch((error) => error.message));
    redis.close();
    """
    with connect(server.url) as client:
        client.hset(QueueKeys("examples").settings, "max_queued_tokens", "50")
    ran = run(NODE or "", "--input-type=module", "--eval", script, server.url)
    assert ran.stdout == "the job was refused: oversized max_queued_tokens 50\n", ran.stderr


@needs_bash
@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("failed", 1)])
def test_a_job_from_the_shell(server: EmbeddedServer, state: str, status: int) -> None:
    answerer = Answerer(server.url, state)
    place = server.url.removeprefix("redis://").removesuffix("/0")
    ran = run(BASH or "", "examples/shell/generate.sh", PROMPT, place, "examples")
    answerer.join()
    assert (ran.returncode, ran.stdout) == (status, TEXT + "\n"), ran.stderr
    assert ran.stderr.splitlines()[-1] == state
    assert ("no more tea" in ran.stderr) == (state == "failed")
    assert parse_body(answerer.body).prompt == PROMPT


@needs_bash
def test_the_shell_escapes_every_control_character(server: EmbeddedServer) -> None:
    prompt = "".join(map(chr, range(1, 128))) + "\\u0001 & é"
    answerer = Answerer(server.url)
    place = server.url.removeprefix("redis://").removesuffix("/0")
    ran = run(BASH or "", "examples/shell/generate.sh", prompt, place, "examples")
    answerer.join()
    assert ran.returncode == 0, ran.stderr
    assert parse_body(answerer.body).prompt == prompt


@needs_bash
def test_the_shell_prints_every_candidate(server: EmbeddedServer) -> None:
    answerer = Answerer(server.url)
    place = server.url.removeprefix("redis://").removesuffix("/0")
    ran = run(BASH or "", "examples/shell/generate.sh", PROMPT, place, "examples", "3")
    answerer.join()
    assert (ran.returncode, ran.stdout) == (0, TEXT + "\n--- candidate 2\n0, 1, 2, \n"), ran.stderr
    assert parse_body(answerer.body).sampling.n == 3


@needs_node
def test_node_submits_several_candidates_as_python_does(server: EmbeddedServer) -> None:
    script = """
    import { Millrace } from "./examples/node/millrace.js";
    import { Redis } from "./examples/node/redis.js";
    const redis = await Redis.connect(process.argv[1]);
    const millrace = new Millrace(redis, { queue: "examples", lua: "results/lua" });
    await millrace.submit({ id: "three", prompt: "abcd", max_tokens: 5, n: 3 });
    console.log((await redis.command("HMGET", "millrace:{examples}:job:three", "n", "cost")).join(" "));
    console.log(await millrace.submit({ prompt: "x", n: 65 }).catch((error) => error.message));
    redis.close();
    """
    ran = run(NODE or "", "--input-type=module", "--eval", script, server.url)
    submission = to_submission(parse_body(b'{"id":"three","prompt":"abcd","max_tokens":5,"n":3}'))
    assert ran.stdout.splitlines() == [f"3 {submission.cost}", "the job was refused: invalid n"], ran.stderr
    with connect(server.url) as client:
        assert JobQueue(client, "examples").submit([submission]) == [Outcome("exists")]


@needs_bash
def test_the_shell_says_why_a_job_can_never_be_taken(server: EmbeddedServer) -> None:
    """An engine turns its inbox entry into a failed job."""
    queue = JobQueue(connect(server.url), "examples")
    queue._client.hset(queue.keys.settings, "max_queued_tokens", "10")
    inbox = Inbox(queue)
    inbox.start()
    ran = run(BASH or "", "examples/shell/generate.sh", "x", server.url.removeprefix("redis://")[:-2], "examples")
    inbox.stop()
    inbox.thread.join()
    queue.close()
    assert ran.returncode == 1
    assert "max_queued_tokens" in ran.stderr
    assert ran.stderr.splitlines()[-1] == "failed"
