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
from typing import Any

import pytest

from millrace import Client
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.queue import JobQueue
from tests.examples.conftest import LIMIT_S
from tests.processes import ROOT, wait_until
from tests.results.engines import Engine

START = """
import uvicorn, web
web.KEEP_ALIVE_S = 0.2
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
    def post(self, body: str) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)) as connection:
            connection.request("POST", "/generate", body)
            with connection.getresponse() as response:
                yield response


@pytest.fixture
def web(server: EmbeddedServer) -> Iterator[WebServer]:
    running = WebServer(server.url)
    yield running
    running.process.kill()
    running.process.communicate()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_tokens_and_the_end_of_a_job_are_streamed(server: EmbeddedServer, web: WebServer) -> None:
    engine = Engine(JobQueue(connect(server.url), "default"))
    with web.post('{"prompt": "3 + 4 =", "max_tokens": 9}') as response:
        assert response.getheader("content-type", "").startswith("text/event-stream")
        assert response.readline().startswith(b": ") and response.readline() == b"\n", "nothing to tell yet"
        job = engine.claim_one()
        engine.show(job, 0, [5], " 7")
        found = events(response)
        assert next(found)["text"] == " 7"
        engine.finish(job)
        assert [event["state"] for event in found] == ["finished"]
    with web.post('{"prompt": "3 + 4 =", "max_tokens": -1}') as response:
        assert (response.status, json.loads(response.read())["error"].partition(":")[0]) == (400, "max_tokens")


def test_the_jobs_of_browsers_that_go_and_of_a_server_that_ends_are_cancelled(
    server: EmbeddedServer, web: WebServer
) -> None:
    with Client(server.url) as client, web.post('{"prompt": "x"}') as stays:
        with web.post('{"prompt": "x"}') as gone:
            assert b"no engine has ever served" in gone.readline()
        wait_until(lambda: client.stats().cancelled == 1)
        assert stays.readline()
        web.process.send_signal(signal.SIGTERM)
        web.process.communicate(timeout=LIMIT_S)
        assert client.stats().cancelled == 2
