"""Servers that may lose what they have accepted: restarted from a log that lacks its end, or empty, or replaced by a replica
that lags.

What the settings can give is asserted and no more: an accepted job may be gone, or be there again as it was before, and then
it is computed again. It never has two different results, no id is in two places, and no engine is stuck: what is submitted
afterwards is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace import GenerationRequest, Job
from millrace.embedded import EmbeddedServer
from tests.chaos.checker import WITHOUT_LOST_JOBS
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import LIMIT_S, ChaosEngine, wait_until
from tests.chaos.proxy import Proxy
from tests.chaos.workload import Undisturbed, make_jobs

pytestmark = [pytest.mark.slow, TEST_LIMIT]


def test_power_is_cut_with_a_log_synced_every_second(queue_name: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Settings: appendonly yes, appendfsync everysec. The last second of the log is lost: the test removes its last part."""
    with (
        EmbeddedServer(appendonly=True, options={"appendfsync": "everysec"}) as server,
        Place(server, queue_name, tmp_path, undisturbed) as place,
    ):
        engine = place.engine("--max-num-seqs", "8")
        place.submit(make_jobs(24, max_tokens=300))
        wait_until(lambda: place.client.stats().finished >= 4)
        seen = place.results()
        server.kill()
        _cut_off_the_end_of_the_log(server)
        server.start()
        _check_what_is_left(place, engine, seen)


def test_restarted_empty(queue_name: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Settings: no appendonly, no save. All data are lost, and the same ids may be submitted again."""
    with EmbeddedServer() as server, Place(server, queue_name, tmp_path, undisturbed) as place:
        engine = place.engine("--max-num-seqs", "8")
        place.submit(make_jobs(24, max_tokens=300))
        wait_until(lambda: place.client.stats().finished >= 4)
        seen = place.results()
        server.kill()
        server.start()
        _check_what_is_left(place, engine, seen)


def test_failover_to_a_replica_that_lags(
    replica: tuple[EmbeddedServer, EmbeddedServer, Proxy], queue_name: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The replica lost its connection to the primary some time ago; now it becomes the primary."""
    primary, follower, link = replica
    with (
        Place(primary, queue_name, tmp_path, undisturbed) as place,
        Place(follower, queue_name, tmp_path, undisturbed) as after,
    ):
        way = place.proxy()
        engine = place.engine("--max-num-seqs", "8", via=way)
        place.submit(make_jobs(12, max_tokens=300))
        wait_until(lambda: after.client.stats().finished >= 4)
        link.blackhole("to_server", "to_client")
        num_seen = place.client.stats().finished
        place.submit(make_jobs(12, max_tokens=300, first=50))
        wait_until(lambda: place.client.stats().finished > num_seen)
        seen = place.results()
        primary.kill()
        after.redis.replicaof("NO", "ONE")
        way.lead_to(follower.url)
        after.accepted = place.accepted
        _check_what_is_left(after, engine, seen)


@pytest.fixture
def replica() -> Iterator[tuple[EmbeddedServer, EmbeddedServer, Proxy]]:
    """Start a primary, a replica, and the link between them."""
    with EmbeddedServer(tcp=True) as primary, Proxy(primary.url) as link:
        port = link.url.split(":")[-1].removesuffix("/0")
        with EmbeddedServer(options={"replicaof": f"127.0.0.1 {port}", "repl-diskless-sync-delay": "0"}) as follower:
            yield primary, follower, link


def _check_what_is_left(place: Place, engine: ChaosEngine, seen: dict[str, Job]) -> None:
    """`seen`: results that a reader may have got before the loss."""
    assert len(seen) >= 4
    left = [job_id for job_id in place.accepted if place.record(job_id)]
    place.wait_all(left)
    again: list[GenerationRequest] = list(place.accepted.values())
    place.submit([*again, *make_jobs(4, first=100)])
    for _ in place.client.as_completed(list(place.accepted), LIMIT_S):
        pass
    place.check(WITHOUT_LOST_JOBS, engine)
    assert set(place.states().values()) == {"finished"}
    for job_id, before in seen.items():
        now = place.client.get(job_id)
        assert (now.text, now.token_ids, now.finish_reason) == (before.text, before.token_ids, before.finish_reason)


def _cut_off_the_end_of_the_log(server: EmbeddedServer) -> None:
    (log,) = (server._directory / "appendonlydir").glob("*.incr.aof")
    size = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(size - size // 4)
