"""Free memory of the host, and freed memory that the next step uses again."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from millrace.worker.host_memory import advise_huge_pages, free_host_bytes, keep_freed_memory, total_host_bytes
from tests.worker.test_cgroup import write_files


def test_files_that_were_read_do_not_count_as_used_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.worker.cgroup.ROOT", tmp_path)
    group = "sys/fs/cgroup"
    write_files(tmp_path, {"proc/self/cgroup": "0::/", f"{group}/memory.max": "1000000"})
    write_files(tmp_path, {f"{group}/memory.current": "900000"})
    assert free_host_bytes() == 100000
    stat = "anon 200000\nfile 650000\ninactive_file 600000\nactive_file 50000"
    write_files(tmp_path, {f"{group}/memory.stat": stat})
    assert free_host_bytes() == 700000
    write_files(tmp_path, {f"{group}/memory.max": "max"})
    assert free_host_bytes() > 1000000


def test_a_limit_of_the_address_space_is_a_limit_of_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        free, total = free_host_bytes(), total_host_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert 0 < free <= 1 << 30
    assert total <= used + (1 << 30)


def test_what_a_step_has_freed_serves_the_next_one() -> None:
    """Each tensor takes 2,048 pages. By default the kernel maps them again each time."""
    keep_freed_memory()
    for _ in range(10):
        torch.ones(2 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        torch.ones(2 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages in this Linux")
def test_the_whole_huge_pages_of_a_tensor_are_advised() -> None:
    tensor = torch.empty(16 << 20, dtype=torch.uint8)
    advise_huge_pages(tensor)
    advise_huge_pages(torch.empty(1000))  # less than one
    assert "hg" in flags_of_mapping(tensor.data_ptr() + (8 << 20))


def flags_of_mapping(address: int) -> list[str]:
    """Return the flags of the memory mapping that holds an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            begin, end = (int(number, 16) for number in name.split("-"))
            is_inside = begin <= address < end
        elif is_inside and name == "VmFlags:":
            return rest
    return []
