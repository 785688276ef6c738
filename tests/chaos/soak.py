"""The soak: two engines serve a stream of jobs while processes are killed at random, repeatably by seed.

A kill is a SIGKILL of an engine, a worker, the server or a producer. Between kills there are other faults: frozen engines,
reset and silent connections, lost replies, flushed scripts. At the end all five invariants are checked.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from millrace import Client, GenerationRequest
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.scripts import SOURCES
from tests.chaos.checker import ALL, Checker
from tests.chaos.processes import HEARTBEAT_S, ChaosEngine, ProducerProcess, wait_until
from tests.chaos.proxy import Catch, Proxy
from tests.chaos.workload import Undisturbed, make_jobs

QUEUE = "soak"
NUM_ENGINES = 2
NUM_OPEN_JOBS = 48
PREFIX = "Here is what everybody who counts has to know before the first number. " * 3
CATALOGUE = [
    *make_jobs(64, max_tokens=80),
    *make_jobs(48, max_tokens=250, first=64),
    *make_jobs(16, 500, first=112),
    *make_jobs(48, max_tokens=80, first=128, prefix=PREFIX, n=3),
    *make_jobs(16, max_tokens=250, first=176, prefix=PREFIX, n=3),
]
"""The undisturbed run computes each of these once; the soak runs them many times under new ids. A third of them has three
candidates and begins alike."""

KILLS = {
    "engine": 6,
    "engine after claim": 2,
    "engine before commit": 2,
    "engine after commit": 2,
    "worker": 4,
    "server": 1,
    "producer": 1,
}
FAULTS = {"freeze": 1, "cut": 2, "blackhole": 1, "lost reply": 2, "script flush": 2}
FAULT_SHARE = 0.4
"""The share of kills that have another fault before them."""

START_LIMIT_S = 120.0
END_LIMIT_S = 600.0
WINDOW_LIMIT_S = 3.0


class Slot:
    """Owns one running engine with its proxy, and the prepared engine that replaces it, if there is one."""

    def __init__(self, server: EmbeddedServer, folder: Path, name: str, *, has_standby: bool) -> None:
        self._server = server
        self._folder = folder
        self._name = name
        self._has_standby = has_standby
        self._numbers = itertools.count(1)
        self._next: tuple[ChaosEngine, Proxy, Path] | None = None
        self.take_over()

    def take_over(self) -> None:
        """Make the prepared engine, or a new one, the running one, and prepare another."""
        self.engine, self.proxy, mark = self._next or self._prepare()
        mark.touch()
        if self._has_standby:
            self._next = self._prepare()

    @property
    def is_serving(self) -> bool:
        return "serves" in self.engine.text()

    def close(self) -> None:
        self.engine.__exit__(None, None, None)
        self.proxy.__exit__()
        if self._next is not None:
            engine, proxy, _ = self._next
            engine.__exit__(None, None, None)
            proxy.__exit__()

    def _prepare(self) -> tuple[ChaosEngine, Proxy, Path]:
        number = next(self._numbers)
        proxy = Proxy(self._server.url)
        mark = self._folder / f"{self._name}-{number}.go"
        log = self._folder / f"{self._name}-{number}.log"
        options = ("--max-num-seqs", "16")
        return ChaosEngine(log, proxy.url, QUEUE, *options, faults={"serves_when": str(mark)}), proxy, mark


class Soak:
    """Owns everything that runs, and the counts of kills and faults."""

    def __init__(self, seed: int, folder: Path, *, has_standbys: bool) -> None:
        self._plan = random.Random(seed)
        """Draws the sequence of kills and faults, which does not depend on timing. `_rng` draws the rest."""
        self._rng = random.Random(seed)
        self._folder = folder
        self._stack = ExitStack()
        options = {"appendfsync": "always"}
        self.server = self._stack.enter_context(EmbeddedServer(appendonly=True, options=options))
        self.client = self._stack.enter_context(Client(self.server.url, queue=QUEUE))
        self.redis: Any = connect(self.server.url)
        self._stack.callback(self.redis.close)
        self._numbers = itertools.count(1)
        self.accepted: dict[str, GenerationRequest] = {}
        self._open: set[str] = set()
        self.kills: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = {}
        self._load_scripts()
        names = [f"engine-{number}" for number in range(NUM_ENGINES)]
        self._slots = [Slot(self.server, folder, name, has_standby=has_standbys) for name in names]

    def run(self, num_kills: int, report: Callable[[str], None]) -> None:
        begin_s = time.monotonic()
        wait_until(lambda: any(slot.is_serving for slot in self._slots), START_LIMIT_S, "an engine")
        while self.kills.total() < num_kills:
            self._feed()
            self._wait_for_a_moment()
            if self._plan.random() < FAULT_SHARE:
                self._disturb()
            self._kill()
            if self.kills.total() % 25 == 0:
                report(self._line(time.monotonic() - begin_s))
        report("no more faults; waiting for the rest")
        for _ in self.client.as_completed(sorted(self._open), END_LIMIT_S):
            pass

    def drain(self) -> list[ChaosEngine]:
        """Drain the engines and return them."""
        engines = []
        for slot in self._slots:
            slot.engine.wait_until_serving()
            assert slot.engine.terminate() == 0, slot.engine.text()
            engines.append(slot.engine)
        return engines

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._stack.close()

    # --- jobs ------------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        self._open = {job_id for job_id in self._open if not self._has_ended(job_id)}
        requests = [self._draw() for _ in range(NUM_OPEN_JOBS - len(self._open))]
        self.client.submit_many(requests)
        self._note_accepted(requests)

    def _draw(self) -> GenerationRequest:
        return msgspec.structs.replace(self._rng.choice(CATALOGUE), id=f"job-{next(self._numbers)}")

    def _note_accepted(self, requests: list[GenerationRequest]) -> None:
        self.accepted.update({request.id or "": request for request in requests})
        self._open.update(request.id or "" for request in requests)

    def _has_ended(self, job_id: str) -> bool:
        return bool(self.redis.hexists(self.client._keys.job(job_id), "ended"))

    def _wait_for_a_moment(self) -> None:
        """Wait until some more jobs have finished, or a short time."""
        done = self.client.stats().finished
        until_s = time.monotonic() + self._rng.uniform(0.0, 1.5)
        goal = done + self._rng.randint(1, 12)
        while time.monotonic() < until_s and self.client.stats().finished < goal:
            time.sleep(0.01)
        wait_until(lambda: any(slot.is_serving for slot in self._slots), START_LIMIT_S, "an engine")

    # --- kills -----------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        (kind,) = self._plan.choices(list(KILLS), list(KILLS.values()))
        if kind == "worker":
            kind = self._kill_worker()
        elif kind == "server":
            self._kill_server()
        elif kind == "producer":
            self._kill_producer()
        else:
            kind = self._kill_engine(kind)
        self.kills[kind] += 1

    def _serving_slot(self) -> Slot:
        return self._rng.choice([slot for slot in self._slots if slot.is_serving])

    def _kill_engine(self, kind: str) -> str:
        """Kill an engine and return the kind: one whose moment does not come is killed at any moment."""
        slot = self._serving_slot()
        catch = self._catch(slot.proxy, kind)
        if catch is not None and not catch.comes_within(WINDOW_LIMIT_S):
            kind = "engine"
        engine, proxy = slot.engine, slot.proxy
        others = [other for other in self._slots if other is not slot and self._is_alive(other)]
        engine.kill()
        leases, begin_s = f"{self.client._keys.prefix}leases:{engine.engine_id}", time.monotonic()
        has_jobs = self.redis.exists(leases)
        slot.take_over()
        wait_until(lambda: not self.redis.exists(leases), START_LIMIT_S, "the recovery")
        if has_jobs:
            who = "beside another engine" if any(map(self._is_alive, others)) else "as the only one"
            self._took(f"engine killed {who} until its jobs are back", begin_s)
        if catch is not None:
            catch.release()  # what the dead engine had sent arrives after all
        engine.__exit__(None, None, None)
        proxy.__exit__()
        return kind

    def _is_alive(self, slot: Slot) -> bool:
        """Whether it counts as alive in the queue, so that it may recover jobs."""
        return slot.is_serving and bool(self.redis.exists(self.client._keys.prefix + "engine:" + slot.engine.engine_id))

    def _catch(self, proxy: Proxy, kind: str) -> Catch | None:
        match kind:
            case "engine after claim":
                return proxy.catch("claim", "hold-reply")
            case "engine before commit":
                return proxy.catch("finish", "hold-request")
            case "engine after commit":
                return proxy.catch("finish", "hold-reply")
        return None

    def _kill_worker(self) -> str:
        slot = self._serving_slot()
        num_ready = slot.engine.text().count("ready:")
        pids = slot.engine.worker_pids()
        if not pids:  # just now it is being replaced
            return self._kill_engine("engine")
        begin_s = time.monotonic()
        slot.engine.kill_worker()
        wait_until(lambda: slot.engine.text().count("ready:") > num_ready, START_LIMIT_S, "the next worker")
        self._took("worker killed until the next one is ready", begin_s)
        return "worker"

    def _kill_server(self) -> None:
        done, begin_s = self.client.stats().finished, time.monotonic()
        self.server.kill()
        self.server.start()
        self._load_scripts()
        self._feed()
        wait_until(lambda: self.client.stats().finished > done, START_LIMIT_S, "the next result")
        self._took("server killed until the next result", begin_s)

    def _kill_producer(self) -> None:
        requests = [self._draw() for _ in range(12)]
        file = self._folder / "producer.jsonl"
        file.write_text("".join(_line_of(request) for request in requests))
        producer = ProducerProcess(self.server.url, QUEUE, file)
        producer.go_on(len(requests))
        producer.read_accepted(self._rng.randint(1, 8))
        producer.kill()
        producer.close()
        self.client.submit_many(requests)
        self._note_accepted(requests)

    # --- other faults -------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        (kind,) = self._plan.choices(list(FAULTS), list(FAULTS.values()))
        slot = self._serving_slot()
        match kind:
            case "freeze":
                slot.engine.freeze()
                time.sleep(3 * HEARTBEAT_S)
                slot.engine.thaw()
            case "blackhole":
                slot.proxy.blackhole(*self._rng.choice([("to_server",), ("to_client",), ("to_server", "to_client")]))  # type: ignore[arg-type]
                time.sleep(3 * HEARTBEAT_S)
                slot.proxy.heal()
            case "cut":
                slot.proxy.cut()
            case "lost reply":
                slot.proxy.catch(self._rng.choice(["claim", "finish", "append", "heartbeat"]), "cut-before-reply")
            case "script flush":
                self.redis.script_flush()
                self._load_scripts()
        self.faults[kind] += 1

    def _load_scripts(self) -> None:
        for name in ("claim", "finish", "append", "heartbeat"):
            self.redis.script_load(SOURCES[name])

    # --- the results -----------------------------------------------------------------------------------------------

    def _took(self, what: str, begin_s: float) -> None:
        self.recoveries.setdefault(what, []).append(time.monotonic() - begin_s)

    def _line(self, seconds: float) -> str:
        stats = self.client.stats()
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total():4} kills in {seconds:5.0f} s: {stats.finished} of {len(self.accepted)} jobs finished, "
            f"{stats.failed} failed ({kinds}; {self.faults.total()} other faults)"
        )


def _line_of(request: GenerationRequest) -> str:
    return json.dumps({"sampling": {}, **msgspec.to_builtins(request)}) + "\n"


def soak(
    num_kills: int,
    seed: int,
    folder: Path,
    undisturbed: Undisturbed,
    report: Callable[[str], None],
    *,
    has_standbys: bool = True,
) -> dict[str, Any]:
    """Run a soak and return its results; "violation" names the invariant that does not hold. `has_standbys`: a killed engine
    is replaced by one that was started before, instead of one that is started then."""
    begin_s = time.monotonic()
    run = Soak(seed, folder, has_standbys=has_standbys)
    try:
        run.run(num_kills, report)
        drained = run.drain()
        return {
            "server_info": run.redis.info("server"),
            "seed": seed,
            "num_kills": run.kills.total(),
            "kills": dict(sorted(run.kills.items())),
            "other_faults": dict(sorted(run.faults.items())),
            "num_engines": NUM_ENGINES,
            "heartbeat_limit_s": HEARTBEAT_S,
            "num_jobs": len(run.accepted),
            "num_jobs_with_candidates": sum(request.sampling.n > 1 for request in run.accepted.values()),
            "num_tokens": run.client.stats().generated_tokens,
            "seconds": round(time.monotonic() - begin_s, 1),
            "recovery_s": {what: _spread(times) for what, times in sorted(run.recoveries.items())},
            **_verdict(run, drained, undisturbed),
        }
    finally:
        run.close()


def _verdict(run: Soak, drained: list[ChaosEngine], undisturbed: Undisturbed) -> dict[str, Any]:
    checker = Checker(run.server.url, QUEUE, undisturbed.outputs(run.accepted.values()))
    verdict: dict[str, Any] = {
        "lost": len(checker.lost()),
        "doubled": len(checker.doubled()),
        "torn": len(checker.torn()),
        "violation": None,
    }
    try:
        checker.check(ALL, drained=drained)
    except AssertionError as error:
        verdict["violation"] = str(error)[:2000]
    checker.close()
    return verdict


def _spread(times: list[float]) -> dict[str, float]:
    return {
        "times": len(times),
        "median": round(statistics.median(times), 2),
        "p90": round(sorted(times)[int(len(times) * 0.9)], 2),
        "max": round(max(times), 2),
    }
