"""Which GPUs an engine takes with `--device auto`: locks of real processes on GPUs that an environment variable names."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.executor.launch.devices import gpu_uuids, lock_free_gpus
from tests.e2e.engines import EngineProcess
from tests.processes import LoggedProcess, checkout_environment, wait_until

FOUR = "GPU-a0,GPU-b1,GPU-c2,GPU-d3"
PROGRAM = """
import logging, os, signal, sys
from pathlib import Path
from millrace.executor.launch.devices import lock_free_gpus
logging.basicConfig(level=logging.INFO, format="%(message)s")
lock_free_gpus(int(sys.argv[1]), Path(sys.argv[2]))
print("has", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
signal.pause()
"""


class Taker(LoggedProcess):
    """Takes GPUs and waits for its end."""

    def __init__(self, folder: Path, name: str, number: int = 1, gpus: str = FOUR) -> None:
        command = [sys.executable, "-P", "-c", PROGRAM, str(number), str(folder / "locks")]
        environment = {**checkout_environment(), "CUDA_VISIBLE_DEVICES": gpus}
        super().__init__(folder / f"{name}.log", command, environment)

    @property
    def has_gpus(self) -> bool:
        return "has GPU" in self.text()

    def gpus(self) -> list[str]:
        """Wait until it has its GPUs, and return them."""
        self.wait_for_log("has GPU")
        return self.text().partition("has ")[2].split()[0].split(",")


def test_each_engine_takes_a_gpu_of_its_own_and_a_dead_one_gives_it_back(tmp_path: Path) -> None:
    with Taker(tmp_path, "1", gpus="GPU-a0,GPU-b1") as first, Taker(tmp_path, "2", gpus="GPU-a0,GPU-b1") as second:
        mine = first.gpus()
        assert {*mine, *second.gpus()} == {"GPU-a0", "GPU-b1"}
        with Taker(tmp_path, "3", gpus="GPU-a0,GPU-b1") as third:
            third.wait_for_log("waiting for 1 of 2 GPUs; other engines hold the locks")
            first.kill()
            assert third.gpus() == mine
            assert third.text().count("waiting") == 1


def test_an_engine_of_several_ranks_takes_all_or_none(tmp_path: Path) -> None:
    with Taker(tmp_path, "three", 3) as three:
        assert three.gpus() == ["GPU-a0", "GPU-b1", "GPU-c2"]
        with Taker(tmp_path, "two", 2) as two, Taker(tmp_path, "one") as one:
            two.wait_for_log("waiting for 2 of 4 GPUs")
            assert one.gpus() == ["GPU-d3"], "the waiting engine holds none"
            three.kill()
            assert two.gpus() == ["GPU-a0", "GPU-b1"]


def test_engines_that_start_at_once_take_different_gpus(tmp_path: Path) -> None:
    with Taker(tmp_path, "1", 2) as first, Taker(tmp_path, "2", 2) as second, Taker(tmp_path, "3", 2) as third:
        takers = [first, second, third]
        wait_until(lambda: sum(taker.has_gpus for taker in takers) == 2)
        (late,) = [taker for taker in takers if not taker.has_gpus]
        late.wait_for_log("waiting for 2 of 4 GPUs")
        early = [taker for taker in takers if taker is not late]
        assert sorted(early[0].gpus() + early[1].gpus()) == FOUR.split(",")
        given_back = early[1].gpus()
        early[1].kill()
        assert late.gpus() == given_back


def test_an_engine_reports_a_process_that_keeps_the_folder_locked(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    folder = os.open(tmp_path / "locks", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with Taker(tmp_path, "1") as taker:
            taker.wait_for_log(
                f"waiting for 1 of 4 GPUs; another process holds the lock on the folder {tmp_path / 'locks'}"
            )
            fcntl.flock(folder, fcntl.LOCK_UN)
            assert taker.gpus() == ["GPU-a0"]
    finally:
        os.close(folder)


def test_replicas_of_one_service_take_different_gpus(redis_url: str, queue_name: str, tmp_path: Path) -> None:
    def replica(number: int) -> EngineProcess:
        options = ("--device", "auto", "--device-locks", str(tmp_path / "locks"))
        return EngineProcess(tmp_path / f"{number}.log", redis_url, queue_name, *options)

    def visible(engine: EngineProcess) -> str:
        (rank,) = engine.wait_until_serving().worker_pids()
        variables = Path(f"/proc/{rank}/environ").read_text().split("\0")
        return next(text for text in variables if text.startswith("CUDA_VISIBLE_DEVICES="))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a0,GPU-b1")  # no machine has them, so the ranks compute on the CPU
        with replica(1) as first, replica(2) as second:
            assert {visible(first), visible(second)} == {"CUDA_VISIBLE_DEVICES=GPU-a0", "CUDA_VISIBLE_DEVICES=GPU-b1"}
            with replica(3) as third:
                third.wait_for_log("waiting for 1 of 2 GPUs")
                assert third.terminate() == 0


NVIDIA_SMI = """#!/bin/sh
[ "$*" = -L ] || exit 1
echo "GPU 0: NVIDIA A100 (UUID: GPU-0f00-1)"
echo "GPU 1: NVIDIA A100 (UUID: GPU-1f11-2)"
echo "  MIG 3g.20gb     Device  0: (UUID: MIG-aa-1)"
echo "  MIG 3g.20gb     Device  1: (UUID: MIG-GPU-1f11/2/0)"
echo "GPU 2: NVIDIA A100 (UUID: GPU-2f22-3)"
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program `nvidia-smi` that lists three GPUs, one of them divided."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


LISTED = ["GPU-0f00-1", "MIG-aa-1", "MIG-GPU-1f11/2/0", "GPU-2f22-3"]


@pytest.mark.usefixtures("driver")
def test_the_driver_lists_gpus_and_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_uuids() == LISTED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "to be restored")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    lock_free_gpus(4, tmp_path / "new" / "locks")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(LISTED)
    assert len(list((tmp_path / "new" / "locks").iterdir())) == 4


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("named", "expected"), [("GPU-b, MIG-c", ["GPU-b", "MIG-c"]), ("0,1", []), ("", []), ("-1", [])]
)
def test_gpus_that_the_environment_names_are_the_only_ones(
    named: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpu_uuids() == expected
    if not expected:
        lock_free_gpus(1, tmp_path / "locks")
        assert (os.environ["CUDA_VISIBLE_DEVICES"], (tmp_path / "locks").exists()) == (named, False)


def test_a_driver_that_fails_is_reported_and_nothing_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("millrace.executor.launch.devices.num_visible_gpus", lambda: 2)
    with caplog.at_level(logging.WARNING, "millrace.executor"):
        lock_free_gpus(1, tmp_path / "locks")
    assert "without locks, since nvidia-smi -L fails" in caplog.text


@pytest.mark.parametrize("name", ["GPU-a0", "a file"])
def test_what_cannot_work_is_refused_with_the_option(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a0")
    if name == "GPU-a0":
        with pytest.raises(ValueError, match="device: auto needs 2 GPUs, this host has 1"):
            lock_free_gpus(2, tmp_path)
    else:
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=r"device_locks: .* cannot be used: .*; name another folder"):
            lock_free_gpus(1, tmp_path / name)


@pytest.mark.parametrize(
    ("put", "kind"),
    [
        (lambda file: file.symlink_to(file.with_name("target")), "a symbolic link"),
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
    ],
    ids=["link", "fifo", "folder"],
)
def test_what_others_put_in_the_place_of_a_lock_is_refused(
    put: Callable[[Path], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a0,GPU-b1")
    lock = tmp_path / "GPU-b1"
    put(lock)
    with pytest.raises(ValueError, match=rf"^device_locks: .* cannot be used: {lock} is {kind}; name another folder$"):
        lock_free_gpus(2, tmp_path)
    assert not (tmp_path / "target").exists()
    lock.rmdir() if lock.is_dir() else lock.unlink()
    lock_free_gpus(2, tmp_path)  # the first GPU's lock was given back


def test_a_fifo_in_the_place_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a0")
    os.mkfifo(tmp_path / "locks")
    with pytest.raises(ValueError, match=r"device_locks: .* cannot be used: .*Not a directory"):
        lock_free_gpus(1, tmp_path / "locks")
