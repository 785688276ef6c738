"""The benchmarks: what they report of the machine, that they do what they count, and that they compare checkouts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import redis

from benchmarks import compare, queueing
from benchmarks.environment import describe
from benchmarks.interval import median_interval
from benchmarks.service import Service
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from tests.processes import wait_until
from tests.results.full_queue import FullQueue

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
    queue = FullQueue(redis_client, name)
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


FAKE_BENCHMARKS = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
root = pathlib.Path(__file__).parent.parent
with open(root.parent / "runs", "a") as runs:
    print(root.name, *sys.argv[1:-2], file=runs)
figures = {"jobs_per_s": 30 if root.name == "this" else 20, "ratios": [1, 2], "zero": 0}
out.write_text(json.dumps({"queue": figures}))
"""


def test_two_checkouts_are_compared_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("this", "other"):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks" / "__init__.py").touch()
        (tmp_path / name / "benchmarks" / "__main__.py").write_text(FAKE_BENCHMARKS)
    monkeypatch.setattr(compare, "ROOT", tmp_path / "this")
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / "other"), "--part", "queue", "--pairs", "3", "--quick"])
    compare.main()
    runs = (tmp_path / "runs").read_text().splitlines()
    assert runs == [f"{name} --part queue --quick" for name in ("this", "other", "other", "this", "this", "other")]
    shown = capsys.readouterr().out
    assert "1.5000 to 1.5000" in shown and "ratios" not in shown

    monkeypatch.setattr(compare, "ROOT", tmp_path / "other")
    compare.main()
    assert len((tmp_path / "runs").read_text().splitlines()) == 12, "a checkout with itself shows the noise"

    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path), "--part", "queue"])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert "has no benchmarks: give the root of a checkout" in capsys.readouterr().err


def test_the_interval_of_a_median_is_made_of_two_values() -> None:
    assert median_interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
    assert median_interval([float(value) for value in range(40)]) == (13.0, 26.0)
