"""How long jobs stand still when the worker is killed: from SIGKILL to the next token that a reader sees.

A service with its worker and a model that is made here, under load: NUM_READERS jobs whose readers follow them, and who
submit another one as soon as one ends. What is measured is all that a reader feels: the loss is noticed, a new process
starts, imports torch, reads the weights and allocates the pool, and the jobs' tokens so far are computed again. Beside it
stands what the new worker took for each phase of its start, "load_model" being the weights. No job may fail, and none may
end with another text than it has undisturbed.

`python -P -m benchmarks.recovery [--kills 50] [--out FILE]`
"""

from __future__ import annotations

import argparse
import json
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

from rich.console import Console

from benchmarks.environment import ROOT, describe
from benchmarks.generation import make_model
from benchmarks.service import Service
from millrace import Client
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect

NUM_KILLS = 50
NUM_READERS = 16
NUM_TOKENS = 256
PAUSE_S = (0.2, 1.0)
"""Between a recovery and the next kill, drawn anew each time: jobs are hit at every point of their life."""
ON_THE_WAY_S = 0.2
"""Tokens that come sooner after the kill were computed before it: no Python starts so fast."""
LIMIT_S = 120.0
QUEUE = "bench-recovery"


class Reader(threading.Thread):
    """Submits a job, follows it, and begins again, until it is told to stop."""

    def __init__(self, url: str, expected: list[int]) -> None:
        super().__init__(daemon=True)
        self.came_s = 0.0
        """When the last token came, of `time.perf_counter`."""
        self.num_done = self.num_failed = self.num_other = 0
        self.is_over = False
        self._url = url
        self._expected = expected

    def run(self) -> None:
        with Client(self._url, queue=QUEUE) as client:
            while not self.is_over:
                self._follow_one(client)

    def _follow_one(self, client: Client) -> None:
        token_ids: list[int] = []
        for event in client.stream(submit(client)):
            token_ids += event.token_ids
            if event.token_ids:
                self.came_s = time.perf_counter()
            if event.state is not None:
                self.num_done += 1
                self.num_failed += event.state != "finished"
        self.num_other += token_ids != self._expected


def submit(client: Client) -> str:
    """One job, always the same."""
    return client.submit("3 + 4 =", temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stream=True)


def measure(url: str, model: Path, log: Path, num_kills: int = NUM_KILLS) -> dict[str, Any]:
    """All figures of this file. Service and readers are gone when it returns."""
    service = Service(url, model, queue=QUEUE, log=log)
    readers: list[Reader] = []
    try:
        with Client(url, queue=QUEUE) as client:
            expected = client.wait(submit(client), timeout_s=LIMIT_S).token_ids
        readers = [Reader(url, expected) for _ in range(NUM_READERS)]
        for reader in readers:
            reader.start()
        waits = [_kill_once(service, readers, random.Random(number)) for number in range(num_kills)]
        for reader in readers:
            reader.is_over = True
        for reader in readers:
            reader.join(LIMIT_S)
    finally:
        service.stop()
    phases = _phases(log.read_text())
    first, last = [one for one, _ in waits], [other for _, other in waits]
    return {
        "num_kills": num_kills,
        "num_readers": NUM_READERS,
        "jobs_done": sum(reader.num_done for reader in readers),
        "jobs_failed": sum(reader.num_failed for reader in readers),
        "jobs_with_other_tokens": sum(reader.num_other for reader in readers),
        "next_token_of_any_s": _summary(first),
        "next_token_of_all_s": _summary(last),
        "start_phases_s": {name: round(statistics.median(took), 3) for name, took in phases.items()},
        "weight_load_s": _summary(phases["load_model"]),
        "each_s": [round(seconds, 3) for seconds in last],
    }


def _kill_once(service: Service, readers: list[Reader], pause: random.Random) -> tuple[float, float]:
    """Seconds until the first reader, and until each of them, has seen a new token."""
    time.sleep(pause.uniform(*PAUSE_S))
    (pid,) = service.worker_pids()
    killed_s = time.perf_counter()
    os.kill(int(pid), signal.SIGKILL)
    first_s = 0.0
    while time.perf_counter() < killed_s + LIMIT_S:
        came = [reader.came_s > killed_s + ON_THE_WAY_S for reader in readers]
        first_s = first_s or (time.perf_counter() if any(came) else 0.0)
        if all(came):
            return first_s - killed_s, time.perf_counter() - killed_s
        time.sleep(0.001)
    raise TimeoutError(f"{came.count(False)} of {len(readers)} jobs stand still for {LIMIT_S:g} s")


def _phases(log: str) -> dict[str, list[float]]:
    """Seconds of each phase of the workers' starts, but the first one."""
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


def main() -> None:
    """Measure against a private server, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out" / "recovery.json")
    options = parser.parse_args()
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as directory:
        result = describe(dict(connect(server.url).info("server")))
        model = make_model(Path(directory))
        result["recovery"] = measure(server.url, model, Path(directory, "service.log"), options.kills)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    Console().print_json(data=result["recovery"])
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
