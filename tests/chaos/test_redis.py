"""Faults of the server. All five invariants hold if it keeps what it has accepted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millrace.results.errors import RedisUnavailable
from tests.chaos.checker import ALL
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_killed_and_restarted_with_every_write_on_the_disk(hurt_place: Place) -> None:
    """Settings: appendonly yes, appendfsync always. A reader follows a job all the time."""
    place = hurt_place
    engines = place.engines(2, "--max-num-seqs", "8")
    place.submit(make_jobs(16, max_tokens=250))
    reader = place.watch("job-1")
    wait_until(lambda: reader.num_tokens > 0)
    place.server.kill()
    place.server.start()
    place.submit(make_jobs(4, first=100))
    place.wait_all()
    place.check(ALL, *engines)


@pytest.mark.slow
def test_frozen_for_longer_than_the_lease(hurt_place: Place) -> None:
    """No engine could send its heartbeat; none may count as crashed for that."""
    place = hurt_place
    engines = place.engines(2, "--max-num-seqs", "8")
    place.submit(make_jobs(24, max_tokens=400))
    wait_until(lambda: place.num_tokens_kept() > 0)
    os.kill(place.server.pid, signal.SIGSTOP)
    place.outlast_the_lease()
    os.kill(place.server.pid, signal.SIGCONT)
    place.wait_all()
    place.check(ALL, *engines)


def test_out_of_memory_nothing_comes_in_and_what_is_in_ends(hurt_place: Place) -> None:
    place = hurt_place
    reserve = place.reserve()
    place.submit(make_jobs(12))
    with _full(place):
        with pytest.raises(RedisUnavailable, match="out of memory"):
            place.client.submit_many(make_jobs(1, first=100))
        engine = reserve.call()
        place.wait_all()
    place.submit(make_jobs(1, first=100))
    place.wait_all()
    place.check(ALL, engine)


def test_scripts_forgotten_again_and_again(place: Place) -> None:
    engine = place.engine("--max-num-seqs", "8")
    place.submit(make_jobs(24, max_tokens=120))
    num_flushed = 0
    while place.client.stats().finished < 24:
        place.redis.script_flush()
        num_flushed += 1
        time.sleep(0.05)
    assert num_flushed > 3
    place.wait_all()
    place.check(ALL, engine)


@contextmanager
def _full(place: Place) -> Iterator[None]:
    place.redis.config_set("maxmemory", "1mb")
    yield
    place.redis.config_set("maxmemory", "0")
