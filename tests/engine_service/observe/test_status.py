"""The line of figures in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.engine_service.observe.status import StatusLog
from millrace.engine_service.serving.job_table import JobMetrics

IDLE = SimpleNamespace(
    scheduler=SimpleNamespace(num_running=0, num_waiting=0, num_prompt_tokens=0),
    executor=SimpleNamespace(num_tokens=0),
    pool_use=0.0,
)
BUSY = SimpleNamespace(
    scheduler=SimpleNamespace(num_running=12, num_waiting=3, num_prompt_tokens=50),
    executor=SimpleNamespace(num_tokens=900),
    pool_use=0.345,
)


def test_there_is_a_line_while_there_is_work_and_one_after_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    nothing, jobs = JobMetrics(), JobMetrics()
    jobs.num_by_outcome |= {"finished": 7, "failed": 1}
    engine: Any = iter([IDLE, IDLE, BUSY, BUSY, IDLE, IDLE])
    ended = iter([nothing, nothing, jobs, jobs, nothing, nothing])
    status = StatusLog(lambda: next(engine), lambda: next(ended))
    status._before_s = 0.0
    counts = []
    for number in range(1, 6):
        status.log(10.0 * number)
        counts.append(len(caplog.records))
    assert counts == [0, 1, 2, 3, 3]
    assert caplog.messages[:2] == [
        "running 12, waiting 3; tokens/s: 90.0 out, 5.0 in; KV pool 34.5 % used; jobs finished 7, failed 1",
        "running 12, waiting 3; tokens/s: 0.0 out, 0.0 in; KV pool 34.5 % used; jobs finished 0, failed 0",
    ]
    assert caplog.records[0].__dict__["fields"]["tokens_per_s_out"] == 90.0
