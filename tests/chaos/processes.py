"""The processes under fault: engine services and producers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.engines import LIMIT_S, ROOT, TINY, EngineProcess, wait_until

__all__ = ["HEARTBEAT_S", "LIMIT_S", "ChaosEngine", "ProducerProcess", "wait_until"]

HEARTBEAT_S = 0.5
"""The engines' limit: after this long without a heartbeat their jobs are recovered."""


class ChaosEngine(EngineProcess):
    """One engine service, started by `tests.chaos.launch`. `faults` are the fields of its `Faults`."""

    def __init__(
        self,
        log: Path,
        redis_url: str,
        queue: str,
        *options: str,
        heartbeat_s: float = HEARTBEAT_S,
        faults: dict[str, Any] | None = None,
        model: Path = TINY,
    ) -> None:
        before = (json.dumps(faults or {}),)
        module = "tests.chaos.launch"
        super().__init__(
            log, redis_url, queue, *options, model=model, module=module, before=before, heartbeat_s=heartbeat_s
        )

    @property
    def engine_id(self) -> str:
        """Its id in Redis, from its log."""
        match = re.search(r"engine (\S+) serves", self.text())
        assert match is not None, f"{self.log.name} does not serve yet"
        return match[1]

    def freeze(self) -> None:
        """Send SIGSTOP: it lives and keeps its connections, and does nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def freeze_worker(self) -> None:
        """Stop the worker: the engine goes on, and its next step does not end."""
        os.kill(self.worker_pids()[0], signal.SIGSTOP)

    def thaw_worker(self) -> None:
        os.kill(self.worker_pids()[0], signal.SIGCONT)

    def kill_worker(self) -> None:
        os.kill(self.worker_pids()[0], signal.SIGKILL)

    def num_dropped(self) -> int:
        """Return how many jobs it has dropped so far because they belong to another engine."""
        return sum(map(int, re.findall(r"(\d+) jobs belong to other engines now", self.text())))

    def num_refused(self) -> int:
        """Return, once it has drained, in how many of its leases a write was refused, because the lease was old."""
        match = re.search(r"leases refused: (\d+)", self.text())
        assert match is not None, f"{self.log.name} has not drained:\n{self.text()}"
        return int(match[1])

    def num_sampled(self) -> int:
        """Return, once it has drained, how many tokens its workers have sampled, those after an end included."""
        match = re.search(r"tokens sampled: (\d+)", self.text())
        assert match is not None, f"{self.log.name} has not drained:\n{self.text()}"
        return int(match[1])

    def check_kv_returned(self) -> None:
        """Check, once it has drained, that every KV block is free."""
        match = re.search(r"KV blocks: (\d+) of (\d+) free", self.text())
        assert match is not None, f"{self.log.name} has not drained:\n{self.text()}"
        assert match[1] == match[2], f"{self.log.name}: {match[0]}"


class ProducerProcess:
    """Owns a script that submits jobs from a file one by one, each for a line on stdin, and prints the confirmed id."""

    SCRIPT = """
import json, sys
from millrace import Client, GenerationRequest, SamplingParams
with Client(sys.argv[1], queue=sys.argv[2]) as client:
    for line, _ in zip(open(sys.argv[3]), sys.stdin):
        fields = json.loads(line)
        sampling = SamplingParams(**fields.pop("sampling"))
        print(client.submit_many([GenerationRequest(sampling=sampling, **fields)])[0], flush=True)
"""

    def __init__(self, redis_url: str, queue: str, jobs: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", self.SCRIPT, redis_url, queue, str(jobs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def go_on(self, num_jobs: int) -> None:
        """Let it submit N more jobs."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n" * num_jobs)
        self.process.stdin.flush()

    def read_accepted(self, num_jobs: int) -> list[str]:
        """Return the next N ids that it has printed."""
        assert self.process.stdout is not None
        return [next(self.process.stdout).strip() for _ in range(num_jobs)]

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
