"""How many threads compute under a CPU quota."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llguidance import LLTokenizer

from millrace.worker.cpu_threads import limit_threads
from millrace.worker.grammars import Grammars
from tests.worker.driver import start_worker
from tests.worker.models import make_model
from tests.worker.test_cgroup import write_files


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("quota", "num_threads"),
    [("max", 3), ("400000", 3), ("300000", 3), ("200000", 2), ("110000", 2), ("100000", 1), ("20000", 1)],
)
def test_a_quota_limits_the_threads(
    quota: str, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "millrace.worker")
    monkeypatch.setattr("millrace.worker.cgroup.ROOT", tmp_path)
    write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    limit_threads()
    assert torch.get_num_threads() == num_threads
    assert ("as the CPU quota is" in caplog.text) == (num_threads < 3)


def test_a_rank_on_a_cpu_limits_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.worker.cgroup.ROOT", tmp_path)
    write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"})
    make_model("llama", tmp_path / "model")
    start_worker(tmp_path / "model")
    assert torch.get_num_threads() == 2


def test_a_quota_limits_the_threads_of_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.worker.cgroup.ROOT", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"})
    assert Grammars(lambda: LLTokenizer("byte"))._num_threads == 2


def test_a_number_that_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.worker.cgroup.ROOT", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 100000"})
    limit_threads()
    assert torch.get_num_threads() == 3
