"""Runs the `millrace` command: its output and its exit status, from a process of its own or from `main` in this one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from millrace.cli import main
from tests.processes import LIMIT_S, ROOT

WITH_SMALL_FILES = """\
import resource, signal, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from millrace.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""A program for `python -c`: the command, where no file can be larger than 5,000 bytes."""


class Ran(NamedTuple):
    """What a command line returned and wrote."""

    status: int
    out: str
    err: str

    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def environment(**extra: str) -> dict[str, str]:
    """Return ours without the variables that name a server, and with the checkout on the path."""
    kept = {name: value for name, value in os.environ.items() if name not in {"MILLRACE_REDIS_URL", "REDIS_URL"}}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


def python(*arguments: str, cwd: Path = ROOT, stdin: str | bytes = b"", **extra: str) -> Ran:
    """Run `python ...` and wait for its end."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        cwd=cwd,
        env=environment(**extra),
        timeout=LIMIT_S,
    )
    return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())


def run_main(*arguments: str, stdin: str | bytes = b"") -> Ran:
    """Run a command line in this process: most tests need no interpreter of their own, which takes most of the time."""
    given = io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), "utf-8")
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with patch("sys.stdin", given), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:  # of argparse
            status = int(end.code or 0)
    return Ran(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs beside the test, and kill it at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_accept_interrupts,
        **options,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _accept_interrupts() -> None:
    """A run of the tests in the background of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """The command, bound to one server and queue."""

    def __init__(self, redis_url: str, queue: str) -> None:
        self.place = ("--redis", redis_url, "--queue", queue)

    def __call__(self, verb: str, *arguments: str, stdin: str | bytes = b"") -> Ran:
        """Run a verb in this process, and wait for its end."""
        return run_main(verb, *self.place, *arguments, stdin=stdin)

    def line(self, verb: str, *arguments: str) -> Sequence[str]:
        """Return the arguments of an interpreter that runs a verb in a process of its own."""
        return ("-P", "-m", "millrace", verb, *self.place, *arguments)
