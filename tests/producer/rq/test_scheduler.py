"""The scheduler of docs/rq.md: jobs for later come back to the gateway's queue."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from pathlib import Path

from rq import Queue, Retry

from millrace.results.messages import JobError
from tests.processes import ROOT, LoggedProcess
from tests.producer.rq.parts import EchoEngine, GatewayProcess, enqueue, value_of, wait_for


def recipe(queue: Queue, redis_url: str) -> str:
    """Return the program of the page, for this queue and this server."""
    program: str
    (program,) = re.findall(r"^```py\n(.*?RQScheduler.*?)^```", (ROOT / "docs" / "rq.md").read_text(), re.M | re.S)
    assert '"generate"' in program and "Redis()" in program
    return program.replace('"generate"', repr(queue.name)).replace("Redis()", f"Redis.from_url({redis_url!r})")


def test_scheduled_jobs_and_retries_with_an_interval_run(
    engine: EchoEngine, gateway: GatewayProcess, rq_queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    engine.errors["retried"] = JobError(kind="internal", message="out of luck")
    later = rq_queue.enqueue_in(timedelta(seconds=1), "millrace.generate", prompt="hello", max_tokens=8, meta={"a": 1})
    retried = enqueue(rq_queue, job_id="retried", retry=Retry(max=1, interval=1))
    wait_for("scheduled", later, retried)
    command = [sys.executable, "-c", recipe(rq_queue, redis_url)]
    with LoggedProcess(tmp_path / "scheduler.log", command) as scheduler:
        wait_for("finished", later, retried)
        assert (value_of(later)["text"], later.get_meta()) == ("echo: hello", {"a": 1})
        assert engine.runs["retried.r1"] == 1
        assert scheduler.terminate() == 0
