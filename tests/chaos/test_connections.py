"""How many connections an engine uses, and a server that accepts no more. All five invariants hold: an engine that starts
then reports the refusal, and one that has served before retries until it is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millrace import Client
from millrace.results.errors import RedisUnavailable
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import LIMIT_S, wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.slow, TEST_LIMIT]

CONNECTIONS_OF_AN_ENGINE = 5
"""As in docs/reliability.md: one each for leases, the wait for jobs, signals, the inbox and results."""

REFUSED = "Cannot connect to Redis"


def num_connections(place: Place) -> int:
    return int(place.redis.info("clients")["connected_clients"])


@contextmanager
def full(place: Place) -> Iterator[None]:
    """Existing connections stay; new ones are refused."""
    place.client.stats()
    place.redis.config_set("maxclients", "1")
    yield
    place.redis.config_set("maxclients", "10000")


def test_a_server_that_takes_no_more_clients(hurt_place: Place) -> None:
    """An engine that starts then ends with one line. One that loses its connections counts as dead, its jobs continue on the
    engine that kept its own, and later it serves again."""
    place = hurt_place
    before = num_connections(place) + 1  # the client's, which has not connected yet
    way = place.proxy()
    lucky = place.engine("--max-num-seqs", "8")
    place.submit(make_jobs(8, max_tokens=100))
    place.wait_all()
    assert num_connections(place) - before <= CONNECTIONS_OF_AN_ENGINE
    cut_off = place.engine("--max-num-seqs", "8", via=way)
    ids = place.submit(make_jobs(16, max_tokens=400, first=50))
    wait_until(lambda: place.num_tokens_kept() > 8 * 64)
    assert num_connections(place) - before <= 2 * CONNECTIONS_OF_AN_ENGINE
    with full(place):
        way.cut()
        late = place.launch()
        with Client(place.server.url, queue=place.queue) as client, pytest.raises(RedisUnavailable, match=REFUSED):
            client.stats()
        assert late.process.wait(LIMIT_S) == 4
        *_, line = late.text().splitlines()
        assert line.startswith(f"millrace serve: {REFUSED}") and "maxclients" in line
        place.wait_all(ids)
        wait_until(lambda: REFUSED in cut_off.text())
    wait_until(lambda: place.client.stats().engines == 2)
    assert lucky.terminate() == 0
    place.submit(make_jobs(4, first=100))
    place.wait_all()
    place.check(ALL, cut_off)
    lucky.check_kv_returned()
