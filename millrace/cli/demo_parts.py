"""The moving parts of the demo: a process with a log of its own, and the readers of streamed answers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from millrace.cli.demo_jobs import DemoJob
from millrace.cli.exits import CommandError

_STOP_GRACE_S = 10.0
_LAST_LINES = 30


class DemoProcess:
    """Owns one process from `with` to the end of its block, and the file that takes its words. Whatever it writes goes to
    the demo's folder and ends with it."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self._name = name
        self._command = command
        # One thread is enough for the tiny model, and two wait for each other when this machine does something else too.
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": str(folder)}
        self._log = folder / f"{name}.log"

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its processes in order
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def has_ended(self) -> bool:
        """Whether it has ended well. Raises, with the last lines that it wrote, when it has failed."""
        status = self._process.poll()
        if status:
            words = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise CommandError("\n".join([f"the {self._name} ended with status {status}; it said:", *words]))
        return status == 0


class Followers:
    """Owns the texts of the streamed jobs as they grow; a thread and a connection for each."""

    def __init__(self, jobs: Sequence[DemoJob], redis_url: str, queue: str) -> None:
        self._jobs = [job for job in jobs if job.is_streamed]
        self._redis_url = redis_url
        self._queue = queue
        self._threads: list[threading.Thread] = []
        self.text_by_prompt = {job.prompt: "" for job in self._jobs}

    @property
    def have_started(self) -> bool:
        return bool(self._threads)

    def start(self) -> None:
        """Begin to read. The jobs must be in the queue by now."""
        self._threads = [threading.Thread(target=self._follow, args=(job,), daemon=True) for job in self._jobs]
        for thread in self._threads:
            thread.start()

    def _follow(self, job: DemoJob) -> None:
        from millrace import Client, MillraceError

        with contextlib.suppress(MillraceError):  # the server is gone: the demo was ended early
            for event in Client(self._redis_url, queue=self._queue).stream(job.job_id):
                self.text_by_prompt[job.prompt] += event.text
