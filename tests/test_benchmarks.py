"""What the benchmarks say of the machine, that they count what they put in, and that they leave nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import redis

from benchmarks import queueing
from benchmarks.environment import describe
from benchmarks.service import Service
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from millrace.results.queue import JobQueue
from tests.processes import wait_until

DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(sys.argv[-2:], flush=True); signal.pause()"

FAKE_SMI = "#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 143771 MiB'\n"


def test_what_cannot_be_known_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe({})
    assert facts["commit"] is None or len(facts["commit"]) == 40
    monkeypatch.setattr("benchmarks.environment.ROOT", tmp_path)  # no repository
    facts = describe({})
    assert (facts["commit"], facts["is_dirty"]) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    facts = describe({})
    assert (facts["commit"], facts["is_dirty"], facts["machine"]["gpus"]) == (None, None, [])


def test_gpus_are_named_with_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (smi := tmp_path / "nvidia-smi").write_text(FAKE_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu = {"name": "NVIDIA H200", "driver": "580.65.06", "memory": "143771 MiB"}
    assert describe({})["machine"]["gpus"] == [gpu]


def test_a_service_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.service.STOP_LIMIT_S", 0.1)
    log = tmp_path / "log"
    service = Service("redis://127.0.0.1:1", tmp_path, "queue", start=("-c", DEAF), log=log)
    wait_until(log.read_text, what="the service")
    with pytest.raises(subprocess.TimeoutExpired):
        service.stop()
    assert service._process.returncode == -9


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are no multiples of a batch, as those of the benchmarks are."""
    for name, number in (("NUM_JOBS", 300), ("NUM_SINGLE", 20), ("NUM_RQ_RUN", 20), ("BATCH", 256)):
        monkeypatch.setattr(queueing, name, number)


@pytest.mark.usefixtures("few")
def test_as_many_jobs_are_put_in_as_the_figures_are_divided_by(redis_url: str, redis_client: redis.Redis) -> None:
    stream, rq_queue, name = queueing._new_queue(), queueing._rq_queue(redis_url), queueing._new_queue()
    queueing._streams_add(redis_client, stream)
    queueing._rq_enqueue(rq_queue)
    queueing._submit(redis_url, name, queueing.NUM_JOBS)
    queue = JobQueue(redis_client, name)
    assert [redis_client.xlen(stream), rq_queue.count, queue.stats().queued] == [300] * 3
    rq_queue.delete(delete_jobs=True)
    redis_client.delete(stream)

    queueing._claim_and_finish(redis_url, name, 290)
    assert queue.stats().queued == 10


@pytest.mark.usefixtures("few")
def test_a_round_of_the_queue_leaves_nothing_of_the_baselines() -> None:
    with EmbeddedServer() as server, connect(server.url) as client:  # other tests leave jobs of RQ on theirs
        figures = queueing._round(server.url)
        left = [key for pattern in ("bench-*", "rq:job:*", "rq:results:*") for key in client.scan_iter(pattern)]
    assert all(figure > 0 for name, figure in figures.items() if "_cpu_" not in name), figures
    assert left == []
