"""Parts of the demo: a process with a log, and the readers of streamed jobs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from millrace.cli.exits import CommandError

if TYPE_CHECKING:
    from millrace.producer import GenerationRequest

_STOP_GRACE_S = 10.0
_LAST_LINES = 30


class DemoProcess:
    """Owns one process inside a `with` block, and the file with its output. It writes only into the demo's folder."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self._name = name
        self._command = command
        # One thread is enough for the tiny model; several slow each other down on a busy machine.
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
                start_new_session=True,  # the demo handles Ctrl-C and ends its processes in order
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def has_ended(self) -> bool:
        """Return whether the process has ended with success. Raises CommandError with its last output if it failed."""
        status = self._process.poll()
        if status:
            lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise CommandError("\n".join([f"the {self._name} ended with status {status}; its last output:", *lines]))
        return status == 0


class Followers:
    """Owns the texts of the streamed jobs while they grow. Each job has a thread and a connection."""

    def __init__(self, jobs: Sequence[GenerationRequest], redis_url: str, queue: str) -> None:
        self._jobs = [(str(job.id), str(job.prompt)) for job in jobs if job.stream]
        self._redis_url = redis_url
        self._queue = queue
        self._threads: list[threading.Thread] = []
        self.text_by_prompt = {prompt: "" for _, prompt in self._jobs}

    @property
    def have_started(self) -> bool:
        return bool(self._threads)

    def start(self) -> None:
        """Start to read. The jobs must be in the queue."""
        self._threads = [threading.Thread(target=self._follow, args=job, daemon=True) for job in self._jobs]
        for thread in self._threads:
            thread.start()

    def _follow(self, job_id: str, prompt: str) -> None:
        from millrace import Client, MillraceError

        with contextlib.suppress(MillraceError):  # the demo was stopped, and the server is gone
            for event in Client(self._redis_url, queue=self._queue).stream(job_id):
                self.text_by_prompt[prompt] += event.text
