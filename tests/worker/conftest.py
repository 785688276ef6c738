"""Tests run with one thread: tiny models gain nothing from a second one, and on a busy machine the threads wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging

collect_ignore = ["interpreted"]
"""Its conftest changes Triton: `test_interpreted.py` runs it in processes of their own."""


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)
