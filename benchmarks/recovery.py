"""Measures how long jobs stop when the worker is killed: from SIGKILL to the next token that a reader gets.

A service runs under load: each of NUM_READERS readers follows a job, and submits the next one when it ends. The time
includes everything: the service detects the loss, a new process starts, imports torch, reads the weights and allocates
the pool, and the jobs' tokens so far are computed again. `start_phases_s` has the phases of the new worker's start. No
job may fail, and each must have the same tokens as without a kill. Each round is one kill.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.options import Options
from benchmarks.service import Service
from millrace import Client

NUM_ROUNDS = 50
NUM_READERS = 16
NUM_TOKENS = 256
PAUSE_S = (0.2, 1.0)
"""Range of the random time between a recovery and the next kill, so that jobs are hit at different points."""
IN_TRANSIT_S = 0.2
"""Tokens that arrive within this time after a kill were computed before it: no Python process starts so fast."""
LIMIT_S = 120.0
"""For a job, and for a recovery."""
QUEUE = "bench-recovery"


class Reader(threading.Thread):
    """Submits a job and follows it, again and again until `is_stopped` is set."""

    def __init__(self, url: str, expected: list[int]) -> None:
        super().__init__(daemon=True)
        self.last_token_s = 0.0
        """Time of the last token, by `time.perf_counter`."""
        self.num_done = self.num_failed = self.num_other = 0
        self.is_stopped = False
        self._url = url
        self._expected = expected

    def run(self) -> None:
        with Client(self._url, queue=QUEUE) as client:
            while not self.is_stopped:
                self._follow_one(client)

    def _follow_one(self, client: Client) -> None:
        token_ids: list[int] = []
        for event in client.stream(submit(client)):
            token_ids += event.token_ids
            if event.token_ids:
                self.last_token_s = time.perf_counter()
            if event.state is not None:
                self.num_done += 1
                self.num_failed += event.state != "finished"
        self.num_other += token_ids != self._expected


def submit(client: Client) -> str:
    """Submit a job, always the same."""
    return client.submit("3 + 4 =", temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stream=True)


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part. Service and readers have ended when it returns."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "service.log")
        service = Service(options.url, options.model, queue=QUEUE, log=log)
        try:
            with Client(options.url, queue=QUEUE) as client:
                expected = client.wait(submit(client), timeout_s=LIMIT_S).token_ids
            readers = [Reader(options.url, expected) for _ in range(NUM_READERS)]
            for reader in readers:
                reader.start()
            waits = [_kill_once(service, readers, random.Random(number)) for number in range(options.num_rounds)]
            for reader in readers:
                reader.is_stopped = True
            for reader in readers:
                reader.join(LIMIT_S)
        finally:
            service.stop()
        phases = _phases(log.read_text())
    first, last = ([pair[index] for pair in waits] for index in (0, 1))
    return {
        "num_kills": options.num_rounds,
        "num_readers": NUM_READERS,
        "jobs_done": sum(reader.num_done for reader in readers),
        "jobs_failed": sum(reader.num_failed for reader in readers),
        "jobs_with_other_tokens": sum(reader.num_other for reader in readers),
        "next_token_of_any_s": _summary(first),
        "next_token_of_all_s": _summary(last),
        "start_phases_s": {name: round(statistics.median(seconds), 3) for name, seconds in phases.items()},
        "weight_load_s": _summary(phases["load_model"]),
        "each_s": [round(seconds, 3) for seconds in last],
    }


def _kill_once(service: Service, readers: list[Reader], pause: random.Random) -> tuple[float, float]:
    """Kill the worker. Return the seconds until the first reader, and until all readers, got a new token."""
    time.sleep(pause.uniform(*PAUSE_S))
    (pid,) = service.worker_pids()
    killed_s = time.perf_counter()
    os.kill(int(pid), signal.SIGKILL)
    first_s = 0.0
    while time.perf_counter() < killed_s + LIMIT_S:
        has_token = [reader.last_token_s > killed_s + IN_TRANSIT_S for reader in readers]
        first_s = first_s or (time.perf_counter() if any(has_token) else 0.0)
        if all(has_token):
            return first_s - killed_s, time.perf_counter() - killed_s
        time.sleep(0.001)
    raise TimeoutError(
        f"{has_token.count(False)} of {len(readers)} jobs got no token for {LIMIT_S:g} s: see the service's log"
    )


def _phases(log: str) -> dict[str, list[float]]:
    """Return the seconds of each phase of the workers' starts, by name, without the first start."""
    _, *starts = re.findall(r"rank 0 is ready: (.*)", log)
    phases: dict[str, list[float]] = {}
    for start in starts:
        for name, seconds in re.findall(r"(\w+) ([\d.]+) s", start):
            phases.setdefault(name, []).append(float(seconds))
    return phases


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": round(statistics.median(ordered), 3), "p95": round(p95, 3), "max": round(ordered[-1], 3)}
