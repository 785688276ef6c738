"""`millrace gateway rq` as a process: it starts, says so, and ends when it is told. What it does with jobs is tested with
the gateway itself."""

from __future__ import annotations

import json
import signal

import pytest

from millrace.cli import gateway
from millrace.cli.exits import CommandError
from tests.millrace.cli.command import Command, started
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
    from millrace.cli import build_parser

    monkeypatch.setattr(gateway, "find_spec", lambda name: None)
    args = build_parser().parse_args(["gateway", "rq", "--queues", "a"])
    with pytest.raises(CommandError, match=r"needs rq; run in the checkout: pip install '\.\[gateway\]'"):
        args.run(args)
