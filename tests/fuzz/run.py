"""One run of the fuzzer: a server, an engine, a gateway, bad input through every entry point, and good jobs beside it."""

from __future__ import annotations

import math
import random
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis
from rq import Queue
from rq.serializers import JSONSerializer

from millrace import Client
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from tests.e2e.engines import EngineProcess
from tests.fuzz.entry_points import (
    AsyncioClient,
    EntryPoint,
    Http,
    Inbox,
    RqGateway,
    Scripts,
    SubmitFile,
    SyncClient,
    check_message,
    good_request,
)
from tests.processes import LoggedProcess, module_command, wait_until
from tests.results.invariants import check_queue

QUEUE = "fuzz"
RQ_QUEUE = "fuzz-rq"
LIMIT_S = 60.0
MAX_DELAY_S = 0.05
"""Most that one input may delay somebody else's job."""
NUM_BASELINE = 30
NUM_REPEATS = 10
"""How often an input that seemed to delay a job is sent again: other load delays a job now and then, the input each time."""
MAX_GROWTH_BYTES = 256 << 20
"""Most that a process may have grown by at the end. An engine's allocators keep what a few inputs of 1 MiB took."""
MAX_REDIS_BYTES = 384 << 20
"""Most that the server may hold at the end: the records of all jobs, some with bodies of nearly 1 MiB."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has found."""

    seed: int
    num_inputs: dict[str, int]
    """By entry point."""
    num_good_jobs: int
    baseline_s: float
    """Median time of a good job without bad input beside it."""
    delay_s: dict[str, float]
    """Percentiles over the inputs: how much longer the good job behind one took."""
    growth_bytes: dict[str, int]
    """By process: resident bytes at the end less those at the start."""
    redis_bytes: int
    problems: list[str]


class Problem(NamedTuple):
    number: int
    """Of the input. `--seed` and this number make it again."""
    entry_point: str
    what: str

    def __str__(self) -> str:
        return f"input {self.number} ({self.entry_point}): {self.what}"


def run_fuzz(num_inputs: int, seed: int, *, progress: Callable[[int], None] = lambda number: None) -> Report:
    """Send `num_inputs` bad inputs. What is wrong stands in `problems`."""
    with _system() as system:
        fuzz = _Fuzz(system, seed)
        fuzz.measure_baseline()
        before = system.resident_bytes()
        for number in range(num_inputs):
            fuzz.send(number)
            progress(number + 1)
        return fuzz.report(before)


class _System(NamedTuple):
    url: str
    connection: redis.Redis
    engine: EngineProcess
    gateway: LoggedProcess
    entry_points: Sequence[EntryPoint]

    def resident_bytes(self) -> dict[str, int]:
        pids = {"engine": self.engine.process.pid, "gateway": self.gateway.process.pid}
        pids |= {f"worker {n}": pid for n, pid in enumerate(self.engine.worker_pids())}
        return {name: _resident_bytes(pid) for name, pid in pids.items()}


@contextmanager
def _system() -> Iterator[_System]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedServer())
        connection = connect(server.url)
        stack.callback(connection.close)
        options = ("--metrics-port", "0", "--served-model-name", "tiny")
        engine = stack.enter_context(EngineProcess(directory / "engine.log", server.url, QUEUE, *options))
        command = module_command(
            "millrace", "gateway", "rq", "--queues", RQ_QUEUE, "--to-queue", QUEUE, "--redis", server.url
        )
        gateway = stack.enter_context(LoggedProcess(directory / "gateway.log", command))
        engine.wait_until_serving()
        gateway.wait_for_log("RQ queues")
        found = re.search(r"metrics and health on http://([\d.]+):(\d+)", engine.text())
        assert found, engine.text()
        entry_points = (
            Inbox(connection, QUEUE),
            SyncClient(server.url, QUEUE),
            AsyncioClient(server.url, QUEUE),
            Scripts(connection, QUEUE),
            SubmitFile(server.url, QUEUE),
            Http((found[1], int(found[2]))),
            RqGateway(connection, RQ_QUEUE),
        )
        for entry_point in entry_points:
            stack.callback(entry_point.close)
        yield _System(server.url, connection, engine, gateway, entry_points)


class _Fuzz:
    """Owns what a run has sent and found."""

    def __init__(self, system: _System, seed: int) -> None:
        self._system = system
        self._seed = seed
        self._client = Client(system.url, queue=QUEUE)
        self._num_inputs: Counter[str] = Counter()
        self._num_good = 0
        self._baseline_s = 0.0
        self._delays_s: list[float] = []
        self._accepted: list[str] = []
        self._problems: list[Problem] = []

    def measure_baseline(self) -> None:
        """Run good jobs alone."""
        self._baseline_s = statistics.median(self._good_job_s() for _ in range(NUM_BASELINE))

    def send(self, number: int) -> None:
        """Send one bad input and a good job behind it."""
        rng = random.Random(f"{self._seed} {number}")
        entry_point = rng.choices(self._system.entry_points, [one.weight for one in self._system.entry_points])[0]
        self._num_inputs[entry_point.name] += 1
        state = rng.getstate()
        try:
            beside_s = self._beside_s(entry_point, rng, f"bad-{number}")
            self._delays_s.append(beside_s - self._baseline_s)
            if beside_s - self._baseline_s <= MAX_DELAY_S:
                return
            # A file has good jobs too, behind which the neighbour may wait: they go before it in both cases.
            without_s = math.inf
            for repeat in range(NUM_REPEATS):
                self._accepted += entry_point.send_good(f"good-{number}-{repeat}")
                without_s = min(without_s, self._good_job_s())
                if beside_s - without_s <= MAX_DELAY_S:
                    return
                rng.setstate(state)
                beside_s = min(beside_s, self._beside_s(entry_point, rng, f"bad-{number}-{repeat}"))
                if beside_s - without_s <= MAX_DELAY_S:
                    return
            delay_ms = (beside_s - without_s) * 1000
            self._find(number, entry_point, f"delays a good job by {delay_ms:.0f} ms each time")
        except Exception as error:
            self._find(number, entry_point, f"{type(error).__name__}: {error}"[:1000])

    def _beside_s(self, entry_point: EntryPoint, rng: random.Random, job_id: str) -> float:
        """Return how long a good job takes that is submitted right behind a bad input."""
        self._accepted += entry_point.send(rng, job_id)
        return self._good_job_s()

    def _good_job_s(self) -> float:
        began_s = time.monotonic()
        self._num_good += 1
        job_id = self._client.submit_many([good_request(f"good-{self._num_good}")])[0]
        job = self._client.wait(job_id, LIMIT_S)
        assert job.text == " 7", job
        return time.monotonic() - began_s

    def _find(self, number: int, entry_point: EntryPoint, what: str) -> None:
        self._problems.append(Problem(number, entry_point.name, what))

    # --- the end ---

    def report(self, before: dict[str, int]) -> Report:
        """Check what must be true when all has ended."""
        problems = [str(problem) for problem in self._problems]
        for check in (self._check_rq, self._check_jobs, self._check_processes, self._check_memory):
            try:
                check() if check != self._check_memory else check(before)  # type: ignore[call-arg]
            except Exception as error:
                where = "".join(traceback.format_exception(error)[-4:])
                problems.append(f"at the end: {type(error).__name__}: {error}\n{where}"[:2000])
        delays_s = sorted(self._delays_s) or [0.0]
        ranks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        after = self._system.resident_bytes() if not self._system.engine.has_ended else {}
        self._client.close()
        return Report(
            seed=self._seed,
            num_inputs=dict(self._num_inputs),
            num_good_jobs=self._num_good,
            baseline_s=self._baseline_s,
            delay_s={name: delays_s[min(len(delays_s) - 1, int(rank * len(delays_s)))] for name, rank in ranks.items()},
            growth_bytes={name: after[name] - before.get(name, 0) for name in after},
            redis_bytes=self._redis_bytes(),
            problems=problems,
        )

    def _check_rq(self) -> None:
        """A good job of RQ ends, and no damaged one is `started` any more."""
        queue = Queue(RQ_QUEUE, connection=self._system.connection, serializer=JSONSerializer)
        good = queue.enqueue("millrace.generate", prompt="3 + 4 =", max_tokens=4, temperature=0, result_ttl=60)
        wait_until(lambda: good.return_value(refresh=True) is not None, LIMIT_S, "the end of RQ's good job")
        value: Any = good.return_value()
        assert value["text"] == " 7"
        wait_until(lambda: self._num_started() == 0, LIMIT_S, "the end of RQ's damaged jobs")

    def _num_started(self) -> int:
        (gateway,) = [one for one in self._system.entry_points if isinstance(one, RqGateway)]
        keys = [f"rq:job:{job_id}" for job_id in gateway.enqueued]
        with self._system.connection.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(key, "status")
            return sum(status == b"started" for status in pipe.execute(raise_on_error=False))

    def _check_jobs(self) -> None:
        """Whatever was accepted has ended once, the inbox is empty, and every error can be read."""
        connection: Any = self._system.connection
        wait_until(lambda: connection.xlen(f"millrace:{{{QUEUE}}}:inbox") == 0, LIMIT_S, "the end of the inbox")
        wait_until(lambda: self._open_jobs() == 0, LIMIT_S, "the end of all jobs")
        check_queue(connection, QUEUE)
        ended = {fields[b"id"].decode() for _, fields in connection.xrange(f"millrace:{{{QUEUE}}}:done")}
        assert not (lost := set(self._accepted) - ended), f"accepted, and never ended: {sorted(lost)[:5]}"
        for job in self._client.list_jobs("failed", 10_000):
            assert job.error is not None, job.id
            check_message(job.error.message)
        for _, fields in connection.xrange(f"millrace:{{{QUEUE}}}:rejected"):
            check_message(msgspec.json.decode(fields[b"error"])["message"])

    def _open_jobs(self) -> int:
        """Jobs that are not over; those that an input delayed until far ahead are cancelled."""
        stats = self._client.stats()
        if stats.delayed:
            self._client.cancel_many([job.id for job in self._client.list_jobs("delayed", 1_000)])
        return stats.queued + stats.running + stats.delayed

    def _check_processes(self) -> None:
        for process in (self._system.engine, self._system.gateway):
            assert not process.has_ended, process.text()[-1000:]
        num_traces = self._system.engine.text().count("Traceback")
        assert not num_traces, f"{num_traces} tracebacks in the engine's log: {_first_traceback(self._system.engine)}"

    def _check_memory(self, before: dict[str, int]) -> None:
        growth = {name: size - before.get(name, size) for name, size in self._system.resident_bytes().items()}
        assert max(growth.values()) < MAX_GROWTH_BYTES, f"bytes that a process has grown by: {growth}"
        assert self._redis_bytes() < MAX_REDIS_BYTES, f"{self._redis_bytes()} bytes in Redis"

    def _redis_bytes(self) -> int:
        return int(self._system.connection.info("memory")["used_memory"])


def _first_traceback(process: LoggedProcess) -> str:
    return "".join(process.text().partition("Traceback")[1:])[:1500]


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * 4096
