"""An engine service in its own process, with a client that submits work to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import python_path
from millrace import Client, GenerationRequest, SamplingParams

STOP_LIMIT_S = 60.0
"""How long a service may take to stop after SIGTERM."""


def fixed_length(prompt: list[int], num_tokens: int, temperature: float = 0.0) -> GenerationRequest:
    """Return a job that generates exactly `num_tokens` tokens."""
    sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    return GenerationRequest(prompt_token_ids=prompt, sampling=sampling)


class Service:
    """Owns one engine service and a client of it."""

    def __init__(
        self,
        url: str,
        model: Path,
        queue: str,
        start: Sequence[str] = ("-m", "millrace.engine_service"),
        log: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Start the service. `start`: Python's arguments for it, to start a modified one. `log`: a file for its log
        from INFO up; without it only warnings are logged. `options`: more of `millrace serve`."""
        self._client = Client(url, queue=queue)
        self._begin_s = time.perf_counter()
        command = [sys.executable, "-P", *start, "--model", str(model), "--redis", url]
        command += ["--queue", queue, "--device", "cpu", "--executor", "mp"]
        command += ["--log-level", "WARNING" if log is None else "INFO", *options]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        with contextlib.nullcontext() if log is None else log.open("w") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def seconds_to_first_token(self) -> float:
        """Return the time from the start of the process to the first token of a waiting job."""
        job_id = self._client.submit(prompt="3 + 4 =", max_tokens=4, stream=True)
        next(iter(self._client.stream(job_id)))
        return time.perf_counter() - self._begin_s

    def idle_cpu_share(self, seconds: float) -> float:
        """Return CPU seconds per second of the idle service and its worker."""
        time.sleep(1.0)
        begin_s, begin_cpu_s = time.perf_counter(), self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - begin_cpu_s) / (time.perf_counter() - begin_s)

    def run(self, work: Sequence[GenerationRequest]) -> float:
        """Submit the work. Return the seconds until the last result has been read."""
        begin_s = time.perf_counter()
        ids = self._client.submit_many(work)
        num_done = sum(job.state == "finished" for job in self._client.as_completed(ids))
        seconds = time.perf_counter() - begin_s
        assert num_done == len(work), f"{num_done} of {len(work)} finished"
        return seconds

    def stop(self) -> None:
        """Stop the service. After STOP_LIMIT_S it is killed, and `subprocess.TimeoutExpired` is raised."""
        try:
            self._process.terminate()
            self._process.wait(STOP_LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._client.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds so far of the service and its workers."""
        return sum(map(_process_cpu_s, [str(self._process.pid), *self.worker_pids()]))

    def worker_pids(self) -> list[str]:
        """Return the pids of the service's child processes."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return [pid for path in tasks.glob("*/children") for pid in path.read_text().split()]


def _process_cpu_s(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
