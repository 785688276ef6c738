"""Draws of the Triton kernels on a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from millrace.worker.sampler import sample
from tests.worker.kernels.test_sampling import random_rows
from tests.worker.rows import sampling_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("vocab_size", [1, 17, 4097, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_equal_the_cpus(vocab_size: int, dtype: torch.dtype) -> None:
    count = 256
    logits = (torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)) * 2.5).to(dtype)
    settings = replace(sampling_rows(random_rows(count, random.Random(vocab_size), vocab_size)), processors=None)
    on_gpu = sample(logits.cuda(), settings).cpu()
    # The logarithms of the GPU may differ in the last bit, which decides a draw once in some 100,000.
    assert int((on_gpu != sample(logits, settings)).sum()) <= 1


def test_a_draw_depends_on_its_own_row_alone() -> None:
    logits = torch.randn(64, 32_000, device="cuda") * 2.5
    settings = replace(sampling_rows(random_rows(64, random.Random(2), 32_000)), processors=None)
    together = sample(logits.clone(), settings)
    for part in torch.arange(64).split(7):
        assert torch.equal(sample(logits[part.cuda()], settings.select(part)), together[part.cuda()])


@pytest.mark.usefixtures("no_waiting")
def test_a_draw_does_not_wait_for_the_device() -> None:
    logits = torch.randn(64, 32_000, device="cuda", dtype=torch.bfloat16)
    settings = replace(sampling_rows(random_rows(64, random.Random(3), 32_000)), processors=None)
    expected = sample(logits, settings)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    token_ids = sample(logits, settings)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(token_ids, expected)
