"""Processes that a verb starts on this machine, and ends: an engine with a server of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from millrace.cli.exits import INVALID, NO_REDIS, OTHER, CommandError
from millrace.cli.output import remark
from millrace.cli.serve import engine_command, require_engine

_STOP_GRACE_S = 10.0
_LAST_LINES = 30
_WAITS = "device: waiting"


class ChildProcess:
    """Owns one process inside a `with` block, and the file with its output."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """The process writes its output and its temporary files to `folder`. `environment` is added to ours."""
        self._name = name
        self._command = command
        self._environment = {**os.environ, **(environment or {}), "TMPDIR": str(folder)}
        self._log = folder / f"{name}.log"

    def __enter__(self) -> Self:
        from millrace.executor.rank.serve import die_with_parent

        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # the verb handles Ctrl-C and ends its processes in order
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # there is one thread
            )
        self._output = self._log.open(errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._process.terminate()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def has_ended(self) -> bool:
        """Return whether the process has ended with success. Raises CommandError with its last output if it failed. A line
        about its wait for a device, which has no limit, is shown."""
        status = self._process.poll()
        for line in self._output:
            if _WAITS in line:
                remark(f"the {self._name}: {line[line.index(_WAITS) :].rstrip()}")
        if status:
            lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            message = "\n".join([f"the {self._name} ended with status {status}; its last output:", *lines])
            raise CommandError(message, INVALID if status == INVALID else OTHER)
        return status == 0


@contextlib.contextmanager
def private_server() -> Iterator[str]:
    """Yield the URL of a server that runs inside the `with` block. Raises CommandError if there is no server program."""
    from millrace.embedded import EmbeddedServer, EmbeddedServerError

    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(EmbeddedServer())
        except EmbeddedServerError as error:
            raise CommandError(str(error), NO_REDIS) from error
        yield server.url


@contextlib.contextmanager
def local_engine(options: Sequence[str], queue: str) -> Iterator[tuple[str, ChildProcess]]:
    """Yield the URL of a private server, and an engine with these options that serves the queue there."""
    require_engine()
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder, private_server() as url:
        command = engine_command([*options, "--redis", url, "--queue", queue])
        with ChildProcess("engine", command, Path(folder)) as engine:
            yield url, engine
