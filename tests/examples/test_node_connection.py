"""The connection of the Node example: commands side by side, TLS, the environment's URL, and errors in one line."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest
import trustme

from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.queue import JobQueue
from tests.examples.conftest import LIMIT_S, NODE, needs_node
from tests.processes import ROOT
from tests.results.engines import Engine, submit
from tests.results.tls_terminator import TlsTerminator

pytestmark = needs_node

OPEN = """
import { Millrace } from "./examples/node/millrace.js";
import { Redis } from "./examples/node/redis.js";
const redis = await Redis.connect();
const millrace = new Millrace(redis, { queue: "examples" });
"""


def run(script: str, url: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = (NODE or "", "--input-type=module", "--eval", script, *more)
    environment = {**os.environ, "MILLRACE_REDIS_URL": url, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def test_replies_to_commands_side_by_side_are_not_mixed_up(server: EmbeddedServer) -> None:
    script = """
    const numbers = Array.from({ length: 200 }, (_, i) => i);
    const ids = await Promise.all(numbers.map((i) => millrace.submit({ id: `job-${i}`, prompt: `${i} =` })));
    const states = await Promise.all([...numbers.map((i) => millrace.state(`job-${i}`)), millrace.state("none")]);
    const failed = await Promise.allSettled([redis.command("NONSENSE"), redis.command("PING")]);
    console.log(JSON.stringify([ids.join() === numbers.map((i) => `job-${i}`).join(), new Set(states).size, states[200]]));
    console.log(JSON.stringify(failed.map(({ status, value }) => value ?? status)));
    redis.close();
    """
    ran = run(OPEN + script, server.url)
    assert ran.stdout.splitlines() == ["[true,2,null]", '["rejected","PONG"]'], ran.stderr


def test_a_stream_delays_no_other_call(server: EmbeddedServer) -> None:
    queue = JobQueue(connect(server.url), "examples")
    submit(queue, "slow")
    script = """
    const waits = ["slow", "slow"].map((id) => millrace.wait(id));
    const numBlocked = async () => (await redis.command("CLIENT", "LIST")).split("flags=b").length - 1;
    while ((await numBlocked()) < 2); // this connection answers while both streams block theirs
    console.log(await millrace.cancel("slow"));
    console.log((await Promise.all(waits)).map(({ state }) => state).join());
    redis.close();
    """
    ran = run(OPEN + script, server.url)
    queue.close()
    assert ran.stdout.split() == ["cancelled", "cancelled,cancelled"], ran.stderr


def test_rediss_is_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    script = OPEN + 'console.log(await millrace.submit({ id: "a", prompt: "x" })); redis.close();'
    with EmbeddedServer() as behind, TlsTerminator(behind.url, context) as terminator:
        url = f"rediss://localhost:{terminator.port}"
        ran = run(script, url, NODE_EXTRA_CA_CERTS=str(tmp_path / "ca.pem"))
        assert ran.stdout == "a\n", ran.stderr
        refused = generate(url)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "certificate" in refused.stderr


def generate(url: str) -> subprocess.CompletedProcess[str]:
    command = (NODE or "", "examples/node/generate.js", "x")
    environment = {**os.environ, "MILLRACE_REDIS_URL": url}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("url", ["redis://localhost/foo", "http://localhost:6379", "localhost"])
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    ran = generate(url)
    assert (ran.returncode, ran.stderr) == (
        1,
        f"the URL must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH, got {url}\n",
    )


@pytest.mark.parametrize(
    ("end", "name"), [("?db=x", "db"), ("?db=", "db"), ("?db=1&db=x", "db"), ("?ssl_cert_reqs=none", "ssl_cert_reqs")]
)
@pytest.mark.parametrize("start", ["redis://localhost:1/0", "rediss://localhost:1", "unix:///none"])
def test_a_parameter_that_means_nothing_is_refused(start: str, end: str, name: str) -> None:
    ran = generate(start.replace("localhost", "user:secret@localhost") + end)
    assert (ran.returncode, ran.stderr) == (
        1,
        f"the URL must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH, got {start}: "
        f"its parameter {name} is refused, only db=NUMBER may be given\n",
    )


@pytest.mark.parametrize(("tcp", "end"), [(True, "?db=3"), (True, "/5?db=3"), (True, "/3"), (False, "?db=3")])
def test_the_database_is_that_of_the_url(tcp: bool, end: str) -> None:
    script = 'await redis.command("SET", "who", "node"); await (await redis.duplicate()).command("APPEND", "who", "2");'
    with EmbeddedServer(tcp=tcp) as server:
        start = server.url.removesuffix("/0").partition("?")[0]
        ran = run(OPEN + script + "process.exit();", start + end)
        assert ran.returncode == 0, ran.stderr
        with connect(start + "?db=3") as client:
            assert client.get("who") == b"node2"


def test_tls_to_a_port_without_it_is_one_line(server: EmbeddedServer) -> None:
    ran = generate(server.url.replace("redis://", "rediss://"))
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)


def test_calls_fail_when_the_connection_ends(server: EmbeddedServer) -> None:
    script = """
    const calls = [redis.command("BLPOP", "none", 0), redis.command("PING")];
    setTimeout(() => console.log("ready"), 50);
    for (const { status, reason } of await Promise.allSettled(calls)) console.log(status, reason.message);
    await redis.command("PING").catch((error) => console.log(error.message));
    """
    command = (NODE or "", "--input-type=module", "--eval", OPEN + script)
    environment = {**os.environ, "MILLRACE_REDIS_URL": server.url}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    server.kill()
    out, _ = process.communicate(timeout=LIMIT_S)
    assert [line.split()[0] for line in out.splitlines()] == ["rejected", "rejected", "the"] or "ECONN" in out
    server.start()


def test_an_engine_answers_many_streams_at_once(server: EmbeddedServer) -> None:
    queue = JobQueue(connect(server.url), "examples")
    for number in range(20):
        submit(queue, f"job-{number}")
    engine = Engine(queue)
    for job in engine.claim():
        engine.show(job, 0, [1], f"text of {job.job_id}")
        engine.finish(job)
    script = """
    const jobs = await Promise.all(Array.from({ length: 20 }, (_, i) => millrace.wait(`job-${i}`)));
    console.log(jobs.every(({ text }, i) => text === `text of job-${i}`));
    redis.close();
    """
    ran = run(OPEN + script, server.url)
    queue.close()
    assert ran.stdout == "true\n", ran.stderr
