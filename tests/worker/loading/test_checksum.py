"""A change of any entry of a tensor changes its checksum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from millrace.worker.errors import WeightsChanged
from millrace.worker.loading import checksum
from millrace.worker.loading.checksum import check_unchanged, checksums, weights_checksum


def module_with(tensor: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("weight", tensor)
    return module


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (13, 24)])
def test_each_entry_counts(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_PIECE_BYTES", 64)
    weight = (torch.arange(13 * 24)[: torch.Size(shape).numel()].view(shape) % 7 - 3).to(dtype)
    seen = {checksums(module_with(weight))["weight"]}
    for number in range(weight.numel()):
        changed = weight.clone()
        flat = changed.view(-1)
        flat[number] = ~flat[number] if dtype == torch.bool else flat[number] + 1
        seen.add(checksums(module_with(changed))["weight"])
    assert len(seen) == 1 + weight.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_signs_that_change_together_do_not_cancel_each_other(dtype: torch.dtype) -> None:
    """The highest bits of the words that are summed: whatever their factors, two of them are 2^64."""
    weight = torch.randn(64, 32, dtype=torch.float32).to(dtype)
    for columns in (slice(None), slice(3, None, 4), slice(1, None, 2), slice(31, 32)):
        negated = weight.clone()
        negated[:, columns] *= -1
        with pytest.raises(WeightsChanged):
            check_unchanged(module_with(negated), checksums(module_with(weight)))


def test_rows_that_change_places_are_noticed() -> None:
    weight = torch.randn(9, 33, dtype=torch.float32).bfloat16()
    assert checksums(module_with(weight)) != checksums(module_with(weight.flip(0)))


def test_the_place_in_memory_does_not_count() -> None:
    weight = torch.randn(7, 5, dtype=torch.float32).bfloat16()
    moved = torch.cat([weight.new_zeros(3), weight.view(-1)])[3:].view(7, 5)
    assert (
        checksums(module_with(moved))
        == checksums(module_with(weight))
        == checksums(module_with(weight.t().contiguous().t()))
    )


def test_the_number_of_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(1000, 333, dtype=torch.float32).bfloat16()
    before = checksums(module_with(weight))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert checksums(module_with(weight)) == before


def test_a_module_without_tensors_has_a_checksum() -> None:
    assert checksums(nn.Module()) == {}
    assert checksums(module_with(torch.empty(0))).keys() == {"weight"}
    assert weights_checksum(nn.Module()) == weights_checksum(nn.Module())
