"""`millrace gateway rq` as a process: it starts, says so, and ends when it is told. What it does with jobs is tested with
the gateway itself."""

from __future__ import annotations

import json
import signal

import pytest

from millrace.cli import build_parser, gateway
from millrace.cli.exits import CommandError
from tests.millrace.cli.command import Command, run_main, started
from tests.processes import LIMIT_S


def test_it_serves_until_it_is_told_to_stop(millrace: Command, queue_name: str) -> None:
    options = ("--queues", f"{queue_name}-rq", "--log-format", "json")
    with started("-P", "-m", "millrace", "gateway", "rq", *millrace.place, *options) as running:
        assert running.stderr
        for line in running.stderr:
            if f"{queue_name}-rq -> Millrace queue {queue_name}" in json.loads(line)["message"]:
                break
        running.send_signal(signal.SIGTERM)
        assert "stopped" in running.communicate(timeout=LIMIT_S)[1]
    assert running.returncode == 0


def test_without_rq_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "find_spec", lambda name: None)
    args = build_parser().parse_args(["gateway", "rq", "--queues", "a"])
    with pytest.raises(CommandError, match=r"needs rq; run in the checkout: pip install '\.\[gateway\]'"):
        args.run(args)


@pytest.mark.parametrize(
    ("options", "queue"),
    [((), "default"), (("--to-queue", "a"), "a"), (("--queue", "a"), "a"), (("--queue", "a", "--to-queue", "a"), "a")],
)
def test_both_names_of_the_millrace_queue_mean_the_same(options: tuple[str, ...], queue: str) -> None:
    assert build_parser().parse_args(["gateway", "rq", "--queues", "x", *options]).queue == queue


@pytest.mark.parametrize("scheme", ["redis+cluster", "rediss+cluster"])
@pytest.mark.parametrize("check", [(), ("--check",)])
def test_a_cluster_is_refused_before_it_is_looked_for(scheme: str, check: tuple[str, ...]) -> None:
    ran = run_main("gateway", "rq", "--queues", "x", "--redis", f"{scheme}://127.0.0.1:1", *check)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("millrace: RQ cannot use a cluster: give the URL of a single server")
