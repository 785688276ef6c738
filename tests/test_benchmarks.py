"""What the benchmarks say of the machine, and that they leave no process behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.environment import describe
from benchmarks.service import Service
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
