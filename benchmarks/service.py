"""An engine service as a process of its own, and a client that gives it work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import ROOT
from millrace import Client, GenerationRequest

STOP_LIMIT_S = 60.0
"""What a service gets to end by itself."""


class Service:
    """Owns one engine service and a client of it."""

    def __init__(
        self,
        url: str,
        model: Path,
        queue: str,
        start: Sequence[str] = ("-m", "millrace.engine_service"),
        log: Path | None = None,
    ) -> None:
        """`start`: how Python starts the service, for one that is not quite as users have it. `log`: a file that takes all
        that it says, down to INFO."""
        self._client = Client(url, queue=queue)
        self._begin_s = time.perf_counter()
        command = [sys.executable, "-P", *start, "--model", str(model), "--redis", url]
        command += ["--queue", queue, "--device", "cpu", "--executor", "mp"]
        command += ["--log-level", "WARNING" if log is None else "INFO"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with contextlib.ExitStack() as opened:
            output = None if log is None else opened.enter_context(log.open("w"))
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def seconds_to_first_token(self) -> float:
        """From the start of the process until a waiting job's first token can be read."""
        job_id = self._client.submit(prompt="3 + 4 =", max_tokens=4, stream=True)
        next(iter(self._client.stream(job_id)))
        return time.perf_counter() - self._begin_s

    def idle_cpu_share(self, seconds: float) -> float:
        """CPU seconds per second of the service and its worker while there is nothing to do."""
        time.sleep(1.0)
        begin_s, begin_cpu_s = time.perf_counter(), self.cpu_s(with_workers=True)
        time.sleep(seconds)
        return (self.cpu_s(with_workers=True) - begin_cpu_s) / (time.perf_counter() - begin_s)

    def run(self, work: Sequence[GenerationRequest]) -> float:
        """Seconds from the first submit to the last result in hand."""
        begin_s = time.perf_counter()
        ids = self._client.submit_many(work)
        num_done = sum(job.state == "finished" for job in self._client.as_completed(ids))
        seconds = time.perf_counter() - begin_s
        assert num_done == len(work), f"{num_done} of {len(work)} finished"
        return seconds

    def send_signal(self, number: signal.Signals) -> None:
        """To the service process."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End it, by force and with an error when it does not end by itself."""
        try:
            self._process.terminate()
            self._process.wait(STOP_LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._client.close()

    def cpu_s(self, *, with_workers: bool) -> float:
        """CPU seconds so far of the service process, and of its workers when they are asked for."""
        if not with_workers:
            return _process_cpu_s(str(self._process.pid))
        return sum(map(_process_cpu_s, [str(self._process.pid), *self.worker_pids()]))

    def worker_pids(self) -> list[str]:
        """Of the processes that it has started."""
        return Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()


def _process_cpu_s(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
