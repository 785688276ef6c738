"""The limits of control groups, as files say them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.worker.cgroup import cpu_quota, memory_limits

VERSION_1 = "7:memory:/outer/inner\n4:cpu,cpuacct:/outer/inner\n1:name=systemd:/outer\n0::/"
V1_UNLIMITED = "9223372036854771712"


def write_files(root: Path, files: dict[str, str]) -> None:
    """Write files as the kernel shows them, by their paths below `root`."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("millrace.worker.cgroup.ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"system.slice/cpu.max": "200000 100000", "system.slice/engine.service/cpu.max": "max 100000"}, 2.0),
        ({"system.slice/cpu.max": "200000 100000", "system.slice/engine.service/cpu.max": "300000 100000"}, 2.0),
    ],
)
def test_the_smallest_quota_of_version_2_counts(files: dict[str, str], quota: float | None, root: Path) -> None:
    write_files(root, {"proc/self/cgroup": "0::/system.slice/engine.service"})
    write_files(root, {f"sys/fs/cgroup/{name}": content for name, content in files.items()})
    assert cpu_quota() == quota


@pytest.mark.parametrize("group", ["outer/inner/", "outer/", ""])
def test_a_quota_of_version_1_is_found_in_each_group_around_the_process(group: str, root: Path) -> None:
    write_files(root, {"proc/self/cgroup": VERSION_1, f"sys/fs/cgroup/cpu/{group}cpu.cfs_quota_us": "-1"})
    write_files(root, {f"sys/fs/cgroup/cpu/{group}cpu.cfs_period_us": "100000"})
    assert cpu_quota() is None
    write_files(root, {f"sys/fs/cgroup/cpu/{group}cpu.cfs_quota_us": "50000"})
    assert cpu_quota() == 0.5


def test_memory_limits_of_version_2_are_found_in_each_group_around_the_process(root: Path) -> None:
    outer, inner = "sys/fs/cgroup/system.slice", "sys/fs/cgroup/system.slice/engine.service"
    write_files(root, {"proc/self/cgroup": "0::/system.slice/engine.service"})
    write_files(root, {f"{inner}/memory.max": "1000", f"{inner}/memory.current": "300"})
    write_files(root, {f"{inner}/memory.stat": "file 150\ninactive_file 100"})
    write_files(root, {f"{outer}/memory.max": "max", f"{outer}/memory.current": "5000"})
    assert memory_limits() == [(1000, 800)]
    write_files(root, {f"{outer}/memory.max": "4000"})
    assert memory_limits() == [(1000, 800), (4000, 0)]


def test_memory_limits_of_version_1_are_found_in_each_group_around_the_process(root: Path) -> None:
    outer, inner = "sys/fs/cgroup/memory/outer", "sys/fs/cgroup/memory/outer/inner"
    write_files(root, {"proc/self/cgroup": VERSION_1})
    write_files(root, {f"{inner}/memory.limit_in_bytes": V1_UNLIMITED, f"{inner}/memory.usage_in_bytes": "300"})
    write_files(root, {f"{outer}/memory.limit_in_bytes": "1000", f"{outer}/memory.usage_in_bytes": "400"})
    write_files(root, {f"{outer}/memory.stat": "inactive_file 7\ntotal_inactive_file 100"})
    assert min(memory_limits()) == (1000, 700)


def test_a_container_that_sees_its_path_on_the_host_finds_its_limits_at_the_root(root: Path) -> None:
    write_files(root, {"proc/self/cgroup": "7:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123"})
    write_files(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1000"})
    write_files(root, {"sys/fs/cgroup/memory/memory.usage_in_bytes": "400"})
    write_files(root, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"})
    assert memory_limits() == [(1000, 600)]
    assert cpu_quota() == 2.0
