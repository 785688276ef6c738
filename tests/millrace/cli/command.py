"""Runs the `millrace` command as a user does: a process of its own, its words and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def environment(**extra: str) -> dict[str, str]:
    """Ours without the variables that name a server, and with the checkout on the path."""
    kept = {name: value for name, value in os.environ.items() if name not in {"MILLRACE_REDIS_URL", "REDIS_URL"}}
    return {**kept, "PYTHONPATH": str(ROOT), **extra}


def python(*arguments: str, cwd: Path = ROOT, stdin: str | bytes = b"", **extra: str) -> Ran:
    ran = subprocess.run(
        [sys.executable, *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        cwd=cwd,
        env=environment(**extra),
        timeout=60,
    )
    return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that goes on while the test does something else; it never outlives the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_interrupts,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _hear_interrupts() -> None:
    """A run of the tests in the background of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """The command, bound to one server and queue."""

    def __init__(self, redis_url: str, queue: str) -> None:
        self.place = ("--redis", redis_url, "--queue", queue)

    def __call__(self, verb: str, *arguments: str, stdin: str | bytes = b"") -> Ran:
        return python(*self.line(verb, *arguments), stdin=stdin)

    def line(self, verb: str, *arguments: str) -> Sequence[str]:
        return ("-P", "-m", "millrace", verb, *self.place, *arguments)
