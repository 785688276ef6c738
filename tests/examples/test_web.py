"""The example of a web server streams jobs to browsers, and cancels the jobs of those that have gone."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from typing import Any

import pytest

from millrace import Client
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.messages import ChatOutput
from millrace.results.queue import JobQueue
from tests.examples.conftest import LIMIT_S
from tests.processes import ROOT, wait_until
from tests.results.engines import Engine

START = """
import uvicorn, web
web.KEEP_ALIVE_S, web.GRACE_S = 0.2, 0.5
uvicorn.run(web.app, port=0, timeout_graceful_shutdown=1)
"""


class WebServer:
    """Owns a process that runs the example."""

    def __init__(self, url: str) -> None:
        environment = {"PYTHONPATH": str(ROOT / "examples"), "MILLRACE_REDIS_URL": url}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START], env=environment, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, "the server has ended"
            found = re.search(r"running on http://127.0.0.1:(\d+)", line)
        self._port = int(found[1])

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: str | None = None, **headers: str) -> Iterator[HTTPResponse]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            with connection.getresponse() as response:
                yield response

    def submit(self, body: str, content_type: str = "application/json") -> tuple[int, dict[str, str]]:
        with self.request("POST", "/jobs", body, Content_Type=content_type) as response:
            return response.status, json.loads(response.read())

    def read(self, job_id: str, **headers: str) -> AbstractContextManager[HTTPResponse]:
        return self.request("GET", f"/jobs/{job_id}/events", **headers)


@pytest.fixture
def web(server: EmbeddedServer) -> Iterator[WebServer]:
    running = WebServer(server.url)
    yield running
    running.process.kill()
    running.process.communicate()


def events(response: HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id of each event, and the event."""
    event_id = ""
    while line := response.readline():
        if line.startswith(b"id: "):
            event_id = line[4:].decode().strip()
        elif line.startswith(b"data: "):
            yield event_id, json.loads(line[6:])


@pytest.fixture
def engine(server: EmbeddedServer) -> Engine:
    return Engine(JobQueue(connect(server.url), "default"))


def test_the_page_is_served(web: WebServer) -> None:
    with web.request("GET", "/") as response:
        assert b"EventSource" in response.read()


NESTED = 30_000 * "["


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('{"prompt": "x", "max_tokens": -1}', 400, "max_tokens"),
        ('{"prompt": "x", "max_tokens": null}', 400, "max_tokens"),
        ('{"prompt": "x", "max_tokens": 100000}', 400, "max_tokens"),
        ("{}", 400, "prompt"),
        ("[]", 400, "object"),
        ('{"prompt"', 400, "truncated"),
        (NESTED, 400, "object"),
        ('{"messages": [{"role": "user", "content": ' + NESTED, 400, "recursion"),
        ('{"messages": [{"role": "user", "content": "x", "more": %s}]}' % (900 * "[" + 900 * "]"), 400, "nested"),
        (200_000 * "[", 413, "65536 bytes"),
    ],
    ids=range(10),
)
def test_bodies_that_are_no_question_are_refused(body: str, status: int, words: str, web: WebServer) -> None:
    found, answer = web.submit(body)
    assert (found, words in answer["error"]) == (status, True), answer


def test_a_page_of_another_site_cannot_submit(web: WebServer) -> None:
    """Without asking this server first, a browser lets it send only three types."""
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert web.submit('{"prompt": "x"}', content_type)[0] == 415
    assert web.submit('{"prompt": "x"}', "application/json; charset=utf-8")[0] == 201


def test_a_browser_does_not_choose_tenant_and_priority(server: EmbeddedServer, web: WebServer) -> None:
    status, answer = web.submit(
        '{"prompt": "x", "tenant": "boss", "priority": 9, "job_id": "mine", "durability": "aof"}'
    )
    assert (status, re.fullmatch("web-[0-9a-f]{32}", answer["id"]) is not None) == (201, True)
    with Client(server.url) as client:
        job = client.get(answer["id"])
    assert (job.tenant, job.prompt) == ("web", "x")


def test_jobs_of_other_programs_are_neither_shown_nor_cancelled(server: EmbeddedServer, web: WebServer) -> None:
    with Client(server.url) as client:
        client.submit("secret", job_id="report", stream=True)
        with web.read("report") as response:
            assert response.read() == b'event: gone\ndata: "unknown job"\n\n'
        with web.request("DELETE", "/jobs/report") as response:
            assert response.status == 404
        assert client.get("report").state == "queued"
    with web.read("web-" + 32 * "0") as response:
        assert response.readline() == b"event: gone\n"


def test_an_answer_is_streamed_and_a_page_that_comes_back_goes_on(engine: Engine, web: WebServer) -> None:
    status, answer = web.submit('{"prompt": "3 + 4 =", "max_tokens": 9}')
    assert status == 201
    with web.read(answer["id"]) as response:
        assert response.getheader("content-type", "").startswith("text/event-stream")
        assert response.readline().startswith(b": ") and response.readline() == b"\n", "nothing to tell yet"
        job = engine.claim_one()
        engine.show(job, 0, [5], "Hm", chat=ChatOutput(reasoning="Hm"))
        place, event = next(events(response))
        assert (event["text"], event["content"], event["reasoning"]) == ("Hm", None, "Hm")
    engine.show(job, 1, [6], " 7")
    with web.read(answer["id"], Last_Event_ID=place) as response:
        found = events(response)
        assert next(found)[1]["content"] == " 7"
        engine.finish(job)
        ((last, event),) = found
        assert event["state"] == "finished"
    with web.read(answer["id"], Last_Event_ID=last) as response:
        assert response.read() == b'event: gone\ndata: "the answer is complete"\n\n'


def test_a_job_is_stopped_by_its_button(engine: Engine, web: WebServer) -> None:
    _, answer = web.submit('{"prompt": "x"}')
    with web.request("DELETE", f"/jobs/{answer['id']}") as response:
        assert response.status == 204
    with web.read(answer["id"]) as response:
        assert [event["state"] for _, event in events(response)] == ["cancelled"]


def test_the_jobs_of_browsers_that_go_and_of_a_server_that_ends_are_cancelled(
    server: EmbeddedServer, web: WebServer
) -> None:
    with Client(server.url) as client:
        _, stays = web.submit('{"prompt": "x"}')
        _, goes = web.submit('{"prompt": "x"}')
        _, never_read = web.submit('{"prompt": "x"}')
        with web.read(stays["id"]) as reader:
            with web.read(goes["id"]) as gone:
                assert gone.readline() == b": nothing yet\n", "what keeps the job waiting is the operator's business"
            wait_until(lambda: client.stats().cancelled == 2)
            assert reader.readline()
            states = {client.get(job["id"]).state for job in (goes, never_read)}
            assert (states, client.get(stays["id"]).state) == ({"cancelled"}, "queued")
            web.process.send_signal(signal.SIGTERM)
            web.process.communicate(timeout=LIMIT_S)
        assert client.get(stays["id"]).state == "cancelled"
