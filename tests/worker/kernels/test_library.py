"""A library that is missing, of another version or for another machine costs speed, and one line in the log."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import millrace.worker.kernels.library as kernels_library
from millrace.worker.attention.compiled import CompiledAttention
from millrace.worker.attention.cpu import CPUAttention
from millrace.worker.attention.select import choose_attention
from millrace.worker.kernels.library import VARIABLE, Kernels, find_kernels, load_library

CPU = torch.device("cpu")
OTHER = Path(torch.__file__).parent / "lib" / "libc10.so"
"""A library without our functions."""


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    find_kernels.cache_clear()
    yield
    find_kernels.cache_clear()


def test_the_attention_of_a_cpu_is_compiled(kernels: Kernels) -> None:
    assert isinstance(choose_attention("auto", CPU), CompiledAttention)
    assert isinstance(choose_attention("cpu", CPU), CompiledAttention)


def test_an_instruction_set_can_be_chosen(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, kernels.instruction_set)
    found = find_kernels()
    assert found is not None
    assert found.instruction_set == kernels.instruction_set


def test_none_means_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    assert find_kernels() is None
    assert isinstance(choose_attention("auto", CPU), CPUAttention)


@pytest.mark.parametrize("name", ["sse9", "AVX2", ""])
def test_an_unknown_name_is_reported_and_ignored(
    name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    assert find_kernels() is not None
    assert f'{VARIABLE} is "{name}"' in caplog.text


def test_an_instruction_set_that_the_machine_lacks_is_reported_and_replaced(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "avx512")
    monkeypatch.setattr(kernels_library, "supported_instruction_sets", lambda _: ["generic"])
    found = find_kernels()
    assert found is not None
    assert found.instruction_set == "generic"
    assert "which this machine does not have: using generic" in caplog.text


def put_library(directory: Path, content: bytes | Path) -> Path:
    target = directory / f"_library{EXTENSION_SUFFIXES[0]}"
    target.write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    return directory


def test_kernels_that_a_checkout_lacks_name_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (directory := tmp_path / "worker" / "kernels").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "worker")
    with pytest.raises(OSError, match=f"from the checkout {tmp_path}, .*pip install -e"):
        load_library(tmp_path / "link" / "kernels")
    (tmp_path / "pyproject.toml").unlink()
    with pytest.raises(OSError, match="install a C compiler"):
        load_library(directory)


def test_a_file_that_is_no_library_or_for_another_machine(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        load_library(put_library(tmp_path, b"not a library"))
    with pytest.raises(OSError):
        load_library(put_library(tmp_path, b"\x7fELF\x02\x01\x01" + bytes(200)))


def test_a_library_without_our_functions(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        load_library(put_library(tmp_path, OTHER))


def test_a_library_of_another_version(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_library, "VERSION", 0)
    with pytest.raises(OSError, match="instead of 0: install Millrace again"):
        load_library(Path(kernels_library.__file__).parent)


def test_without_a_usable_library_one_line_says_what_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels_library, "__file__", str(tmp_path / "library.py"))
    for content in (None, b"not a library", OTHER):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        if content is not None:
            put_library(tmp_path, content)
        find_kernels.cache_clear()
        caplog.clear()
        assert isinstance(choose_attention("auto", CPU), CPUAttention)
        assert choose_attention("auto", CPU).name == "cpu"
        (record,) = caplog.records
        assert "slower" in record.getMessage()
        assert len(record.getMessage()) < 500
