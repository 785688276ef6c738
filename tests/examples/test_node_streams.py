"""The Node example with streams that have lost some entries or all of them."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from millrace import GenerationRequest, SamplingParams
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.logprobs import LazyJson
from millrace.results.messages import ClaimedJob, Event, Usage
from millrace.results.queue import JobQueue
from tests.examples.conftest import LIMIT_S, NODE, needs_node
from tests.processes import ROOT, wait_until
from tests.results.chats import PARTS, show_chat
from tests.results.engines import Engine, finish_of, submit

pytestmark = needs_node

OPEN = """
import readline from "node:readline/promises";
import { Millrace } from "./examples/node/millrace.js";
import { Redis } from "./examples/node/redis.js";
const redis = await Redis.connect(process.argv[1]);
const millrace = new Millrace(redis, { queue: "examples", lua: "results/lua" });
const lines = readline.createInterface({ input: process.stdin });
const pauseAt = (point) => (console.log(point), new Promise((resolve) => lines.once("line", resolve)));
const read = async (events) => {
  const all = [];
  for await (const { id, ...event } of events) all.push(event);
  return all;
};
const close = () => (lines.close(), redis.close());
"""
"""`pauseAt(point)` prints the name of the point and returns the next line of stdin."""


class Node:
    """Owns a script that stops at named points until the test lets it continue."""

    def __init__(self, url: str, script: str) -> None:
        command = (NODE or "", "--input-type=module", "--eval", OPEN + script, url)
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._limit = threading.Timer(LIMIT_S, self._process.kill)
        self._limit.start()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._process.kill()
        self._process.communicate()

    def wait_at(self, point: str) -> None:
        """Wait until it pauses there."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == point + "\n"

    def resume(self, line: str = "") -> None:
        """Let it continue, with this line as the answer."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def read_json(self) -> Any:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class ShortStream:
    """Owns a job whose stream holds at most 4 entries, and the engine that runs it."""

    def __init__(self, url: str, **settings: int) -> None:
        self.queue = JobQueue(connect(url), "examples")
        self.client: Any = self.queue._client
        for name, value in {"max_events": 4, **settings}.items():
            self.client.hset(self.queue.keys.settings, name, str(value))
        submit(self.queue, "long")
        self.engine = Engine(self.queue)
        self.job = self.engine.claim_one()
        self.num_shown = 0

    def __enter__(self) -> ShortStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()

    def show(self, num_events: int) -> None:
        for offset in range(self.num_shown, self.num_shown + num_events):
            assert self.engine.show(self.job, offset, [offset + 300], f"é{offset} ") == "ok"
        self.num_shown += num_events

    def finish(self) -> None:
        assert self.engine.finish(self.job) == "ok"

    def ids(self) -> list[str]:
        return [entry_id.decode() for entry_id, _ in self.client.xrange(self.queue.keys.result("long"))]


@pytest.fixture
def short(server: EmbeddedServer) -> Iterator[ShortStream]:
    with ShortStream(server.url) as short:
        yield short


def text_of(numbers: Iterable[int]) -> str:
    return "".join(f"é{number} " for number in numbers)


def check_whole(events: list[dict[str, Any]], num_tokens: int, first: int = 0) -> None:
    """Check that the events continue after the first tokens, have no gap and no overlap, and end."""
    *shown, end = events
    assert end["state"] == "finished"
    assert "".join(event["text"] for event in shown) == text_of(range(first, num_tokens))
    assert [token - 300 for event in shown for token in event["tokens"]] == list(range(first, num_tokens))
    ends = itertools.accumulate((len(event["tokens"]) for event in shown), initial=first)
    assert [event["offset"] for event in shown] == list(ends)[:-1]


def test_node_waits_for_the_whole_text_of_a_trimmed_stream(server: EmbeddedServer, short: ShortStream) -> None:
    short.show(10)
    short.finish()
    with Node(server.url, 'console.log(JSON.stringify(await millrace.wait("long"))); close();') as node:
        assert node.read_json()["text"] == text_of(range(10))


def test_node_reads_what_was_trimmed_while_it_was_slow(server: EmbeddedServer, short: ShortStream) -> None:
    script = """
    const events = millrace.stream("long");
    const { value: { id, ...first } } = await events.next();
    await pauseAt("has read");
    console.log(JSON.stringify([first, ...(await read(events))]));
    close();
    """
    short.show(1)
    with Node(server.url, script) as node:
        node.wait_at("has read")
        short.show(9)
        short.finish()
        node.resume()
        events = node.read_json()
    check_whole(events, 10)
    assert not any("restart" in event for event in events)


RESUME = """
const after = await pauseAt("after what?");
console.log(JSON.stringify(await read(millrace.stream("long", after))));
close();
"""


@pytest.mark.parametrize("place", [0, 1, -1])
def test_node_resumes_after_an_event_that_is_there(server: EmbeddedServer, short: ShortStream, place: int) -> None:
    short.show(10)
    short.finish()
    trimmed_id = short.client.hget(short.queue.keys.job("long"), "trimmed_id").decode()
    ids = [trimmed_id, *short.ids()]
    num_trimmed = 10 - (len(ids) - 2)
    with Node(server.url, RESUME) as node:
        node.wait_at("after what?")
        node.resume(ids[place])
        events = node.read_json()
    assert not any("restart" in event for event in events)
    if place == -1:
        assert events == [], "nothing follows the end"
    else:
        check_whole(events, 10, first=num_trimmed + place)


def test_node_starts_over_where_the_place_to_resume_after_is_gone(server: EmbeddedServer, short: ShortStream) -> None:
    short.show(1)
    (place,) = short.ids()
    short.show(9)
    short.finish()
    with Node(server.url, RESUME) as node:
        node.wait_at("after what?")
        node.resume(place)
        events = node.read_json()
    check_whole(events, 10)
    assert [event.get("restart", False) for event in events] == [True] + [False] * (len(events) - 1)


def test_node_starts_over_where_the_place_goes_right_before_the_first_entries_are_read(
    server: EmbeddedServer, short: ShortStream
) -> None:
    script = """
    redis.duplicate = async () => ({ command: (...words) => redis.command(...words), close: () => {} });
    const command = redis.command.bind(redis);
    redis.command = async (...words) => {
      if (words[0] === "XREAD") {
        redis.command = command;
        await pauseAt("reads");
      }
      return command(...words);
    };
    """
    short.show(1)
    (place,) = short.ids()
    with Node(server.url, script + RESUME) as node:
        node.wait_at("after what?")
        node.resume(place)
        node.wait_at("reads")
        short.show(9)
        short.finish()
        node.resume()
        events = node.read_json()
    check_whole(events, 10)
    assert [event.get("restart", False) for event in events] == [True] + [False] * (len(events) - 1)


def test_node_says_that_a_result_has_expired(server: EmbeddedServer) -> None:
    script = """
    for (const after of ["0-0", await pauseAt("after what?")]) {
      const events = millrace.stream("long", after);
      console.log(JSON.stringify(await events.next().catch((error) => error.message)));
    }
    close();
    """
    with ShortStream(server.url, result_ttl_ms=1, record_ttl_ms=3_600_000) as short:
        short.show(2)
        place = short.ids()[0]
        short.finish()
        wait_until(lambda: not short.ids())
        with Node(server.url, script) as node:
            node.wait_at("after what?")
            node.resume(place)
            assert [node.read_json(), node.read_json()] == ["the result of job long has expired"] * 2


# --- several candidates ---------------------------------------------------------------------------------------------


def show_candidate(short: ShortStream, job: ClaimedJob, index: int, offsets: Iterable[int]) -> None:
    for offset in offsets:
        assert short.engine.show(job, offset, [offset + 300], f"{index}é{offset} ", index) == "ok"


def check_candidates(short: ShortStream, events: list[dict[str, Any]]) -> None:
    *shown, end = events
    assert (end["state"], end["reasons"]) == ("finished", ["stop", "length", "stop"])
    for output in short.queue.get("three").outputs:
        own = [event for event in shown if event["index"] == output.index]
        assert "".join(event["text"] for event in own) == output.text
        assert [token for event in own for token in event["tokens"]] == output.token_ids


@pytest.mark.parametrize("is_slow", [False, True])
def test_node_reads_all_candidates(server: EmbeddedServer, short: ShortStream, is_slow: bool) -> None:
    """A slow reader gets what it missed, also of a candidate whose events have all been trimmed."""
    script = """
    const events = millrace.stream("three");
    const { value: { id, ...first } } = await events.next();
    await pauseAt("has read");
    console.log(JSON.stringify([first, ...(await read(events))]));
    console.log(JSON.stringify(await millrace.wait("three")));
    close();
    """
    short.client.hset(short.queue.keys.settings, "max_events", 10 if is_slow else 100)
    submit(short.queue, "three", n=3)
    job = short.engine.claim_one()
    show_candidate(short, job, 0, range(1))
    with Node(server.url, script) as node:
        node.wait_at("has read")
        show_candidate(short, job, 2, range(5))
        show_candidate(short, job, 0, range(1, 6))
        short.engine.finish(job, reasons=["stop", "length", "stop"])
        node.resume()
        events, waited = node.read_json(), node.read_json()
    check_candidates(short, events)
    assert not any("restart" in event for event in events)
    outputs = short.queue.get("three").outputs
    assert waited["text"] == outputs[0].text
    assert [(one["text"], one["content"] or "", one["tokens"]) for one in waited["outputs"]] == [
        (one.text, one.content, one.token_ids) for one in outputs
    ]


@pytest.mark.parametrize("is_slow", [False, True])
def test_node_reads_the_parts_of_a_chat_also_where_events_were_trimmed(
    server: EmbeddedServer, short: ShortStream, is_slow: bool
) -> None:
    script = """
    const events = millrace.stream("chat");
    const { value: { id, ...first } } = await events.next();
    await pauseAt("has read");
    console.log(JSON.stringify([first, ...(await read(events))]));
    console.log(JSON.stringify(await millrace.wait("chat")));
    close();
    """
    short.client.hset(short.queue.keys.settings, "max_events", 4 if is_slow else 100)
    submit(short.queue, "chat")
    job = short.engine.claim_one()
    show_chat(short.engine, job, range(1))
    with Node(server.url, script) as node:
        node.wait_at("has read")
        show_chat(short.engine, job, range(1, 9))
        short.engine.finish(job)
        node.resume()
        events, waited = node.read_json(), node.read_json()
    output = short.queue.get("chat").outputs[0]
    *shown, _end = events
    assert "".join(event["content"] or "" for event in shown) == output.content
    assert [call for event in shown for call in event["tool_calls"]] == msgspec.to_builtins(output.tool_calls)
    assert "".join(event["reasoning"] or "" for event in shown) == output.reasoning == "é0 é1 é2 é3 "
    assert waited["outputs"] == [
        {"tokens": output.token_ids, **{name: msgspec.to_builtins(getattr(output, name)) for name in PARTS}}
    ]


def test_node_starts_over_with_all_candidates(server: EmbeddedServer, short: ShortStream) -> None:
    submit(short.queue, "three", n=3)
    job = short.engine.claim_one()
    show_candidate(short, job, 1, range(1))
    ((place, _),) = short.client.xrange(short.queue.keys.result("three"))
    show_candidate(short, job, 0, range(5))
    show_candidate(short, job, 1, range(1, 5))
    short.engine.finish(job, reasons=["stop", "length", "stop"])
    with Node(server.url, RESUME.replace("long", "three")) as node:
        node.wait_at("after what?")
        node.resume(place.decode())
        events = node.read_json()
    check_candidates(short, events)
    assert [event.get("restart", False) for event in events] == [True] + [False] * (len(events) - 1)


def test_node_has_usage_times_and_log_probabilities(server: EmbeddedServer, short: ShortStream) -> None:
    token, prompt = [(300, -0.5, 1, "é0 "), (7, -1.5, 2, "x")], [None, [(4, -0.25, 1, "p")]]
    event = Event(offset=0, token_ids=[300], text="é0 ", logprobs=LazyJson(lambda: json.dumps([token]).encode(), 40))
    finish = finish_of(short.job, event, usage=Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=4))
    more = {"prompt_logprobs": LazyJson(lambda: json.dumps(prompt).encode(), 40), "first_token_s": time.monotonic()}
    assert short.queue.write([msgspec.structs.replace(finish, **more)]) == ["ok"]
    with Node(server.url, 'console.log(JSON.stringify(await read(millrace.stream("long")))); close();') as node:
        shown, end = node.read_json()
    assert shown["logprobs"] == [[[300, -0.5, 1, "é0 "], [7, -1.5, 2, "x"]]]
    assert end["usage"] == {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 4}
    assert end["prompt_logprobs"] == [None, [[4, -0.25, 1, "p"]]]
    assert end["first_token_ms"] == short.queue.get("long").timings.first_token_ms


def test_the_types_have_every_field_of_a_request() -> None:
    types = (ROOT / "examples" / "node" / "millrace.d.ts").read_text()
    (fields,) = re.findall(r"interface Request \{(.*?)\n\}", types, re.DOTALL)
    expected = {*GenerationRequest.__struct_fields__, *SamplingParams.__struct_fields__} - {"sampling"}
    assert set(re.findall(r"^  (\w+)\?:", fields, re.MULTILINE)) == expected
