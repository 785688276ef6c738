"""A server that answers with errors: each of them while engines run. All five invariants hold.

Clients are told what it is; engines go on with what they hold, try again, and lose nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from millrace.embedded import EmbeddedServer
from millrace.results.errors import RedisUnavailable
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import Undisturbed, make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]

Trouble = Callable[[Place], AbstractContextManager[None]]


@contextmanager
def read_only(place: Place) -> Iterator[None]:
    """Make it the replica of a primary that does not exist, and a primary again. Blocked clients are disconnected."""
    place.redis.replicaof("127.0.0.1", 1)
    yield
    place.redis.replicaof("NO", "ONE")


@contextmanager
def without_its_primary(place: Place) -> Iterator[None]:
    """The same with a server that refuses reads too, because its data may be stale."""
    place.redis.config_set("replica-serve-stale-data", "no")
    with read_only(place):
        yield


@contextmanager
def failing_to_save(place: Place) -> Iterator[None]:
    """Make every snapshot fail: a folder has the name of the snapshot file."""
    folder = Path(str(place.redis.config_get("dir")["dir"])) / "dump.rdb"
    folder.mkdir()
    place.redis.config_set("save", "3600 1")
    save_and_wait_for(place, "err")
    yield
    folder.rmdir()
    save_and_wait_for(place, "ok")


def save_and_wait_for(place: Place, status: str) -> None:
    def has_saved() -> bool:
        persistence = place.redis.info("persistence")
        return not persistence["rdb_bgsave_in_progress"] and persistence["rdb_last_bgsave_status"] == status

    place.redis.bgsave()
    wait_until(has_saved)


@contextmanager
def without_its_replicas(place: Place) -> Iterator[None]:
    """Make it require a replica for each write."""
    place.redis.config_set("min-replicas-to-write", "1")
    yield
    place.redis.config_set("min-replicas-to-write", "0")


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        pytest.param(read_only, "is a read-only replica", id="READONLY"),
        pytest.param(without_its_primary, "Link with MASTER is down", id="MASTERDOWN", marks=pytest.mark.slow),
        pytest.param(failing_to_save, "MISCONF", id="MISCONF", marks=pytest.mark.slow),
        pytest.param(without_its_replicas, "NOREPLICAS", id="NOREPLICAS", marks=pytest.mark.slow),
    ],
)
def test_it_takes_no_writes_for_a_while(hurt_place: Place, trouble: Trouble, message: str) -> None:
    """For longer than the lease, with running and with queued jobs."""
    place = hurt_place
    engines = place.engines(2, "--max-num-seqs", "8")
    place.submit(make_jobs(16, max_tokens=300))
    wait_until(lambda: place.num_tokens_kept() > 0)
    with trouble(place):
        with pytest.raises(RedisUnavailable, match=message):
            place.client.submit_many(make_jobs(1, first=100))
        place.outlast_the_lease()
        wait_until(lambda: all(message in engine.text() for engine in engines))
    place.submit(make_jobs(4, first=100))
    place.wait_all()
    place.check(ALL, *engines)


@pytest.mark.slow
def test_it_is_loading_its_data(queue_name: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Settings: appendonly yes, appendfsync always; the server is slowed down while it reads each command of its log. Level
    DEBUG shows each reason of an outage; INFO shows the second one only if it lasts."""
    slow = {"appendfsync": "always", "key-load-delay": "250"}  # microseconds
    with (
        EmbeddedServer(appendonly=True, options=slow) as server,
        Place(server, queue_name, tmp_path, undisturbed) as place,
    ):
        engines = place.engines(2, "--max-num-seqs", "8", "--log-level", "DEBUG")
        make_the_log_long(place)
        place.submit(make_jobs(16, max_tokens=300))
        wait_until(lambda: place.num_tokens_kept() > 0)
        server.kill()
        starter = threading.Thread(target=server.start)
        starter.start()
        refusals = submit_until_accepted(place)
        starter.join()
        assert any("is still loading its data" in refusal for refusal in refusals)
        place.wait_all()
        place.check(ALL, *engines)
        assert all("is still loading its data" in engine.text() for engine in engines)


def make_the_log_long(place: Place) -> None:
    """So that loading takes longer than a client retries."""
    with place.redis.pipeline(transaction=False) as pipe:
        for number in range(15_000):
            pipe.set(f"filler-{number}", "x")
        pipe.execute()


def submit_until_accepted(place: Place) -> list[str]:
    """Return the errors that the client got until then."""
    refusals: list[str] = []
    while True:
        try:
            place.submit(make_jobs(4, first=100))
            return refusals
        except RedisUnavailable as error:
            refusals.append(str(error))
