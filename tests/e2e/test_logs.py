"""What an operator reads in the log of an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from millrace import Client
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.queue import JobQueue
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, EngineProcess, wait_until
from tests.results.engines import Engine

SECRET = "xyzzy"


def lines_of(engine: EngineProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in engine.text().splitlines()]


def messages(engine: EngineProcess, pattern: str) -> list[tuple[str, str]]:
    """Return the levels and the texts of the lines that match."""
    return [(line["level"], line["message"]) for line in lines_of(engine) if re.search(pattern, line["message"])]


def test_a_failed_job_and_a_drain(start_engine: StartEngine, client: Client) -> None:
    engine = start_engine("--log-format", "json")
    failed = client.submit(prompt=f"{SECRET} " * 20_000)
    assert client.wait(failed, LIMIT_S).state == "failed"
    running = client.submit(prompt=SECRET, max_tokens=900, ignore_eos=True, stream=True)
    next(iter(client.stream(running)))
    assert engine.terminate() == 0
    ((level, message),) = messages(engine, f"job {failed} failed")
    assert level == "WARNING"
    assert re.search(r"invalid_request: prompt: has \d+ tokens, and the context of 1024 must hold", message)
    assert SECRET not in engine.text()
    first, second, *_, last = (message for _, message in messages(engine, "^drain"))
    assert first == "draining: the engine claims no more jobs"
    assert second == "draining: 1 jobs run and have 25 s to end; the others go back to the queue"
    assert re.fullmatch(r"drained in [\d.]+ s: 1 jobs have ended, 0 go back to the queue", last)
    assert all(re.search(r"[+-]\d\d:\d\d$", line["time"]) for line in lines_of(engine))
    assert any(line["logger"].startswith("millrace.worker") for line in lines_of(engine)), (
        "the ranks log like the engine"
    )


def test_an_outage_has_one_line_for_each_end(tmp_path: Path) -> None:
    options = ("--log-format", "json")
    with EmbeddedServer() as server, EngineProcess(tmp_path / "log", server.url, "away", *options) as engine:
        wait_until(lambda: messages(engine, " serves "))
        server.kill()
        wait_until(lambda: messages(engine, "^outage"))
        server.start()
        wait_until(lambda: messages(engine, "^the outage is over"))
        assert [level for level, _ in messages(engine, "outage|again|heartbeat")] == ["WARNING", "INFO"]


def test_who_was_recovered_from_whom(launch: StartEngine, client: Client, redis_url: str, queue_name: str) -> None:
    for number in range(3):
        client.submit(prompt=f"{number}")
    dead = Engine(JobQueue(connect(redis_url), queue_name))
    assert len(dead.claim()) == 3
    dead.die()
    engine = launch().wait_for_log("recovered")
    assert f"recovered 3 jobs of engine {dead.id}, which has no heartbeat" in engine.text()
    dead.queue.close()
