"""No process of a service has a module of ours under two names: `worker.runner` beside `millrace.worker.runner`."""

from __future__ import annotations

import re

import pytest

from millrace import Client
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S
from tests.processes import FOLDERS


def test_the_engine_and_its_workers_import_our_modules_as_parts_of_millrace(
    start_engine: StartEngine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # every process writes each module that it imports
    engine = start_engine()
    assert client.wait(client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0), LIMIT_S).text == " 7"
    assert engine.terminate() == 0
    names = re.findall(r"^import time: .*\| +(\S+)$", engine.text(), re.MULTILINE)
    assert {"millrace.engine_service.engine", "millrace.executor.rank.serve", "millrace.worker.runner"} <= set(names)
    assert [name for name in names if name.partition(".")[0] in FOLDERS] == []
