"""The page that other languages implement from: complete, and true."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from millrace.producer.errors import InvalidRequest
from millrace.producer.request import GenerationRequest
from millrace.producer.sampling import SamplingParams
from millrace.producer.wire import parse_body, to_submission
from millrace.results import keys
from millrace.results.queue import JobQueue
from millrace.results.scripts import SOURCES
from millrace.results.transport import Transport
from tests.results.engines import Engine

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
SCRIPTS = {path.stem: path.read_text() for path in (ROOT / "results" / "lua").rglob("*.lua")}


def test_every_key_is_on_the_page() -> None:
    assert keys.__doc__ is not None
    legend = re.findall(
        r"^    ([a-z]+(?::<[a-z]+>)?) {2,}(?:hash|string|stream|zset|set|list) ", keys.__doc__, re.MULTILINE
    )
    assert len(legend) == 30
    assert [name for name in legend if f"| `{name}` |" not in PAGE] == []


def test_every_script_is_on_the_page_and_says_what_it_does() -> None:
    for path in (ROOT / "results" / "lua").glob("*.lua"):
        assert f"`{path.stem}`" in PAGE
        assert SCRIPTS[path.stem].startswith("-- ")
        assert "\n-- Returns " in SCRIPTS[path.stem]
    assert "`KEYS[1]` is the prefix `millrace:{<queue>}:`" in PAGE


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine: the shell example is not run")
def test_the_shell_example_makes_the_scripts_as_the_python_client_does() -> None:
    (example,) = re.findall(r"^cd results/lua\n.*?^}\n", PAGE, re.MULTILINE | re.DOTALL)
    for name in ("claim", "stats"):
        script = ["bash", "-c", f"{example}source_of {name}"]
        made = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        assert made.stdout == SOURCES[name]


def test_every_field_of_a_request_is_on_the_page() -> None:
    names = {*GenerationRequest.__struct_fields__, *SamplingParams.__struct_fields__} - {"sampling"}
    assert [name for name in names if f"`{name}`" not in PAGE] == []


REQUEST = PAGE.split("## The request")[1].split("\n## ")[0]
REQUEST_FIELDS = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", REQUEST, re.MULTILINE))


def is_accepted(**fields: object) -> bool:
    body: dict[str, object] = {"prompt": "x"} if fields.get("prompt_token_ids") is None else {}
    if "prompt" in fields:
        body = {"prompt_token_ids": [1]}
    try:
        parse_body(json.dumps(body | fields).encode())
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("field", [name for name, rule in REQUEST_FIELDS.items() if " .. " in rule])
def test_the_ranges_of_the_page_are_those_of_the_code(field: str) -> None:
    rule = REQUEST_FIELDS[field].replace("`max_tokens`", "16").replace("above 0", "1").replace("^", "**")
    found = re.search(r"(-?[\d*]+) \.\. ([\d*]+(?:-1)?)", rule)
    assert found
    low, high = eval(found[1]), eval(found[2])
    tried = [low - 1, low, high, high + 1]
    values = [[value] for value in tried] if rule.startswith("list") else tried
    assert [is_accepted(**{field: value}) for value in values] == [False, True, True, False]


def test_the_bodies_and_digests_of_the_page_are_those_of_the_code() -> None:
    block = PAGE.split("Requests, each with its canonical body and digest:\n\n```\n")[1].split("\n```")[0]
    examples = [example.split("\n") for example in block.split("\n\n")]
    assert len(examples) == 3
    for raw, body, digest in examples:
        found = to_submission(parse_body(raw.encode()))
        assert (found.body.decode(), found.digest) == (body, digest)


def test_the_arguments_of_a_finish_are_those_of_the_script(queue: JobQueue, engine: Engine) -> None:
    """The page names them in their order, as the script's header does."""
    (page,) = re.findall(r"\*\*`finish`\*\*: (.*?) all that is left of its parts", PAGE, re.DOTALL)
    (header,) = re.findall(r"-- ARGV  1 job id, 2 lease, (.*?)-- Returns", SCRIPTS["finish"], re.DOTALL)
    words = ["state", "reason", "prompt", "completion", "cached tokens", "error", "retryable", "token came", "log-prob"]
    for text in (page, header):
        places = [text.index(word) for word in words]
        assert places == sorted(places)
    assert "chat" not in page.partition("log-prob")[0]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("heartbeat", ["engine id", "in ms", "sleep level", "name of"]),
        ("claim", ["engine id", "claim id", "most jobs", "KV budget", "fingerprint", "jobs", "1", "digests", "1"]),
        ("inbox", ["id to read after", "most entries", "most bytes", "longest body"]),
        ("recover", ["most jobs to recover"]),
    ],
)
def test_the_fixed_arguments_of_a_script_are_on_the_page(script: str, words: list[str]) -> None:
    (page,) = re.findall(rf"(?:\*\*|The script )`{script}`(.*?)(?:\n\d\. \*\*|\n\n)", PAGE, re.DOTALL)
    (header,) = re.findall(r"-- ARGV (.*?)-- Returns", SCRIPTS[script], re.DOTALL)
    numbers = re.findall(r"(?:^|, |\n--) *(\d+) ", header)
    assert max(map(int, numbers)) == len(words)
    for text in (page.partition("It returns")[0], header):
        place = 0
        for word in words:
            place = text.index(word, place) + len(word)


def test_every_field_of_the_record_is_on_the_page() -> None:
    table = PAGE.split("### The record")[1].split("### Settings")[0]
    source = "".join(SCRIPTS.values())
    fields = {
        "v",
        "digest",
        "serial",
        "created",
        "state",
        "tenant",
        "cost",
        "seed",
        "stream",
        "published",
        "lease",
        "engine",
        "base",
        "started",
        "redrive_of",
        "redriven_as",
    }
    fields |= set(
        re.findall(r"(?:'HSET'|'HSETNX'|'HINCRBY'), (?:prefix \.\. 'job:' \.\. id|job|key), '([a-z_]+)'", source)
    )
    assert fields >= {"published", "attempt", "crashes", "cancel", "mismatch", "started", "trimmed", "fingerprint"}
    assert [field for field in fields if f"`{field}`" not in table] == []


def test_a_client_of_plain_commands_gets_through(queue: JobQueue, engine: Engine, transport: Transport) -> None:
    prefix = f"millrace:{{{queue.keys.queue}}}:"
    job = ("a1", "digest", '{"prompt":"3 + 4 ="}', "20", "1", "default", "0", "", "")
    assert transport.send(("EVAL", SOURCES["submit"], "1", prefix, *job)) == [b"created"]
    assert transport.send(("HGET", prefix + "job:a1", "state")) == b"queued"
    engine.finish(engine.claim_one())
    ((_, entries),) = transport.send(("XREAD", "STREAMS", prefix + "result:a1", "0"))
    assert entries[-1][1][b"state"] == b"finished"
    assert transport.send(("EVAL", SOURCES["cancel"], "1", prefix, "a1")) == b"finished"
