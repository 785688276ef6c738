"""What `durability` promises once `submit` has returned; without a confirmation each job is in the queue at most once.

All five invariants hold for every job that was confirmed, and for every job where the server keeps what it has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace import GenerationRequest, NotDurable
from millrace.embedded import EmbeddedServer
from millrace.results.durability import Durability
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import Undisturbed, make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_a_server_that_dies_keeps_what_was_confirmed_on_disk(
    queue_name: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Settings: appendonly yes, appendfsync everysec. After kill -9 its log is set back to its state when `submit` returned,
    as after a power cut."""
    with (
        EmbeddedServer(appendonly=True, options={"appendfsync": "everysec"}) as server,
        Place(server, queue_name, tmp_path, undisturbed) as place,
    ):
        place.submit(make_jobs(16, max_tokens=24), "disk")
        (log,) = (server._directory / "appendonlydir").glob("*.incr.aof")
        num_confirmed_bytes = log.stat().st_size
        place.client.submit_many(make_jobs(16, first=100))
        server.kill()
        os.truncate(log, num_confirmed_bytes)
        server.start()
        assert place.client.stats().queued == 16
        engine = place.engine()
        place.wait_all()
        place.check(ALL, engine)


@pytest.mark.parametrize(
    ("durability", "words"),
    [
        pytest.param("disk", "set appendonly yes", id="disk without AOF", marks=pytest.mark.slow),
        pytest.param("replica", "no replica has confirmed", id="replica without one", marks=pytest.mark.slow),
    ],
)
def test_what_a_server_cannot_confirm_is_in_the_queue_once(place: Place, durability: Durability, words: str) -> None:
    """The producer gets the error while an engine already works, and submits all again: as before, and with "memory"."""
    engine = place.engine()
    requests = make_jobs(16, max_tokens=24)
    ids = [request.id for request in requests]
    for _ in range(2):
        with pytest.raises(NotDurable, match=words) as caught:
            place.client.submit_many(requests, durability=durability)
        assert caught.value.job_ids == ids
    assert place.submit(requests) == ids
    place.wait_all()
    assert place.client.stats().finished == 16
    place.check(ALL, engine)


@pytest.fixture
def pair() -> Iterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """Start a primary and a replica of it."""
    with EmbeddedServer(tcp=True, options={"repl-diskless-sync-delay": "0"}) as primary:
        port = primary.url.split(":")[-1].removesuffix("/0")
        with EmbeddedServer(options={"replicaof": f"127.0.0.1 {port}"}) as follower:
            yield primary, follower


@pytest.fixture
def places(
    pair: tuple[EmbeddedServer, EmbeddedServer], queue_name: str, tmp_path: Path, undisturbed: Undisturbed
) -> Iterator[tuple[Place, Place]]:
    """The queue on the primary, and on the replica, which is in sync."""
    primary, follower = pair
    with (
        Place(primary, queue_name, tmp_path, undisturbed) as before,
        Place(follower, queue_name, tmp_path, undisturbed) as after,
    ):
        wait_until(lambda: after.redis.info("replication")["master_link_status"] == "up")
        yield before, after


@pytest.mark.slow
def test_a_replica_that_takes_over_has_what_it_has_confirmed(places: tuple[Place, Place]) -> None:
    """The primary dies as soon as `submit` has returned."""
    before, after = places
    before.submit(make_jobs(16, max_tokens=24), "replica")
    before.server.kill()
    _check_all_are_served(after, list(before.accepted.values()))


@pytest.mark.slow
def test_a_replica_that_was_frozen_during_submit_has_all_after_another_submit(places: tuple[Place, Place]) -> None:
    """While it is frozen no submit is confirmed, not even of known jobs. Then one is, and the replica takes over."""
    before, after = places
    requests = make_jobs(16, max_tokens=24)
    os.kill(after.server.pid, signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(NotDurable, match="no replica has confirmed"):
            before.submit(requests, "replica")
        assert before.client.stats().queued == 16
    os.kill(after.server.pid, signal.SIGCONT)
    before.submit(requests, "replica")
    assert before.client.stats().queued == 16
    before.server.kill()
    _check_all_are_served(after, requests)


def _check_all_are_served(place: Place, requests: list[GenerationRequest]) -> None:
    """Make the replica the primary; start an engine there, and submit once more."""
    place.redis.replicaof("NO", "ONE")
    assert place.client.stats().queued == len(requests)
    engine = place.engine()
    place.submit(requests)
    place.wait_all()
    assert place.client.stats().finished == len(requests)
    place.check(ALL, engine)
