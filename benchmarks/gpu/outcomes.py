"""A plugin of pytest that writes what becomes of each test to a file, one JSON object a line.

A test is written when it begins, too. So one in which the process ends by itself is known.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

FILE = "MILLRACE_TEST_OUTCOMES"
"""The variable with the path of the file."""
SHARE = "MILLRACE_TEST_SHARE"
"""The variable with the number of a share of the tests and the number of shares, such as 0/2. Not set: all tests."""
REASON_LENGTH = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share, num_shares = map(int, os.environ.get(SHARE, "0/1").split("/"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % num_shares == share]


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="crashed", reason="the process ended in this test")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        _write(test=report.nodeid, outcome=outcome, reason=_reason(report.longreprtext))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(test=report.nodeid, outcome="error", reason=_reason(report.longreprtext))


def pytest_sessionfinish(exitstatus: int) -> None:
    _write(status=int(exitstatus))


def _reason(text: str) -> str:
    """Return the last line with an error, or the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[-1][:REASON_LENGTH]


def _write(**fields: Any) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(fields) + "\n")
