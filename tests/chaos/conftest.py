"""What a fault test uses: a server, engines that reach it directly or through a proxy, and the checker."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from millrace import Client, CompletionOutput, GenerationRequest, Job
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.durability import Durability
from millrace.results.scripts import SOURCES
from millrace.results.tokens import unpack_tokens
from tests.chaos.checker import ALL, Checker, Invariant
from tests.chaos.processes import HEARTBEAT_S, LIMIT_S, ChaosEngine
from tests.chaos.proxy import Proxy
from tests.chaos.reader import LiveReader
from tests.chaos.workload import Undisturbed

TEST_LIMIT = pytest.mark.timeout(400)
"""A test here starts several processes, and the machine may be busy."""

STEP_S = 0.01
"""How much longer each step takes, as with a larger model. The jobs of a test run for seconds, so that it finds them running
even if it had no core for a second."""

SCRIPTS = (
    "submit",
    "claim",
    "begin",
    "append",
    "finish",
    "heartbeat",
    "recover",
    "release",
    "deregister",
    "get",
    "stats",
)


@pytest.fixture(scope="session")
def undisturbed() -> Iterator[Undisturbed]:
    run = Undisturbed()
    yield run
    run.close()


class Place:
    """Owns what one test starts: a client, engines and proxies. Knows the jobs that the queue has accepted."""

    def __init__(self, server: EmbeddedServer, queue: str, folder: Path, undisturbed: Undisturbed) -> None:
        self.server = server
        self.queue = queue
        self.client = Client(server.url, queue=queue)
        self.redis: redis.Redis = connect(server.url)
        self.accepted: dict[str, GenerationRequest] = {}
        self._folder = folder
        self._undisturbed = undisturbed
        self._numbers = itertools.count(1)
        self._readers: list[LiveReader] = []
        self._stack = ExitStack()
        self._stack.callback(self.client.close)
        self._stack.callback(self.redis.close)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    # --- parts -----------------------------------------------------------------------------------------------------

    def proxy(self) -> Proxy:
        """Start a proxy to the server. Load all scripts first, so that a fault at a script's call happens at that call."""
        for name in SCRIPTS:
            self.redis.script_load(SOURCES[name])
        return self._stack.enter_context(Proxy(self.server.url))

    def launch(
        self, *options: str, via: Proxy | None = None, faults: dict[str, Any] | None = None, **settings: Any
    ) -> ChaosEngine:
        """Start an engine, which may not serve yet; `via` is its way to the server."""
        log = self._folder / f"engine-{next(self._numbers)}.log"
        url = via.url if via else self.server.url
        engine = ChaosEngine(log, url, self.queue, *options, faults={"step_s": STEP_S, **(faults or {})}, **settings)
        self._stack.enter_context(engine)
        return engine

    def engine(self, *options: str, via: Proxy | None = None, **settings: Any) -> ChaosEngine:
        """Start an engine and wait until it serves."""
        engine = self.launch(*options, via=via, **settings)
        engine.wait_until_serving()
        return engine

    def engines(self, num_engines: int, *options: str, **settings: Any) -> list[ChaosEngine]:
        """Start engines side by side and wait until they serve."""
        engines = [self.launch(*options, **settings) for _ in range(num_engines)]
        for engine in engines:
            engine.wait_until_serving()
        return engines

    def reserve(self, *options: str, faults: dict[str, Any] | None = None, **settings: Any) -> Reserve:
        """Start an engine that prepares itself and does not serve before `call` or `let_serve`."""
        mark = self._folder / f"go-{next(self._numbers)}"
        return Reserve(self.launch(*options, faults={"serves_when": str(mark), **(faults or {})}, **settings), mark)

    def has_no_signals(self, engine: ChaosEngine) -> bool:
        """Whether the engine has read all its signals."""
        return self.redis.llen(self.client._keys.signals(engine.engine_id)) == 0

    # --- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, requests: list[GenerationRequest], durability: Durability = "memory") -> list[str]:
        """Submit jobs, which `check` checks at the end."""
        ids = self.client.submit_many(requests, durability=durability)
        self.accepted.update(zip(ids, requests, strict=True))
        return ids

    def watch(self, job_id: str, via: Proxy | None = None) -> LiveReader:
        """Start two readers, which `check` checks: one with a single stream, returned, and one that resumes often."""
        url = via.url if via else self.server.url
        readers = [LiveReader(url, self.queue, job_id, hangs_up_after) for hangs_up_after in (None, 5)]
        for reader in readers:
            self._stack.callback(reader.close)
        self._readers += readers
        return readers[0]

    def wait_all(self, ids: list[str] | None = None) -> None:
        """Wait until these jobs, or all accepted ones, have ended."""
        for _ in self.client.as_completed(list(self.accepted) if ids is None else ids, LIMIT_S):
            pass

    def record(self, job_id: str) -> dict[str, str]:
        """Return the job's record in Redis."""
        fields: Any = self.redis.hgetall(self.client._keys.job(job_id))
        return {name.decode(): value.decode() for name, value in fields.items()}

    def states(self) -> dict[str, str]:
        return {job_id: self.client.get(job_id).state for job_id in self.accepted}

    def results(self) -> dict[str, Job]:
        """Return the jobs that have finished so far, by id."""
        jobs = map(self.client.get, self.accepted)
        return {job.id: job for job in jobs if job.state == "finished"}

    def outlast_the_lease(self) -> None:
        """Sleep until a silent engine counts as dead. Nothing shows that moment, so no condition can be waited for."""
        time.sleep(3 * HEARTBEAT_S)

    def tokens_kept(self, job_id: str) -> list[int]:
        """Return the output tokens in its checkpoint: none before the first one and after the end."""
        return unpack_tokens(cast(bytes, self.redis.get(f"{self.client._keys.prefix}tokens:{job_id}") or b""))

    def num_tokens_kept(self) -> int:
        """Return the number of tokens in the checkpoints of all jobs."""
        keys = [f"{self.client._keys.prefix}tokens:{job_id}" for job_id in self.accepted]
        return sum(int(self.redis.strlen(key)) // 4 for key in keys)

    def expected(self, requests: Iterable[GenerationRequest]) -> dict[str, list[CompletionOutput]]:
        """Return the undisturbed candidates by job id."""
        return self._undisturbed.outputs(requests)

    # --- the end ---------------------------------------------------------------------------------------------------

    def check(self, invariants: frozenset[Invariant] = ALL, *drain: ChaosEngine, **states: Any) -> None:
        """Drain these engines, then check the invariants and what the readers got."""
        for engine in drain:
            assert engine.terminate() == 0, engine.text()
        for reader in self._readers:
            reader.check(self.client.get(reader.job_id))
        checker = Checker(self.server.url, self.queue, self.expected(self.accepted.values()))
        try:
            checker.check(invariants, drained=drain, **states)
        finally:
            checker.close()


class Reserve:
    """Owns an engine that is prepared and does not serve yet."""

    def __init__(self, engine: ChaosEngine, mark: Path) -> None:
        self._engine = engine
        self._mark = mark

    def let_serve(self) -> ChaosEngine:
        """Let it serve as soon as it is ready."""
        self._mark.touch()
        return self._engine

    def call(self) -> ChaosEngine:
        """Let it serve, and wait until it does."""
        return self.let_serve().wait_until_serving()


@pytest.fixture
def place(server: EmbeddedServer, queue_name: str, tmp_path: Path, undisturbed: Undisturbed) -> Iterator[Place]:
    """A place on the run's server, which has no faults."""
    with Place(server, queue_name, tmp_path, undisturbed) as place:
        yield place


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server that the test may damage. It confirms a write once it is on disk."""
    with EmbeddedServer(appendonly=True, options={"appendfsync": "always"}) as server:
        yield server


@pytest.fixture
def hurt_place(
    own_server: EmbeddedServer, queue_name: str, tmp_path: Path, undisturbed: Undisturbed
) -> Iterator[Place]:
    """A place on a server of its own."""
    with Place(own_server, queue_name, tmp_path, undisturbed) as place:
        yield place
