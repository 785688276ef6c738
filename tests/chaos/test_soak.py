"""A short soak: one kill of each kind, on a queue that always has work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.conftest import TEST_LIMIT
from tests.chaos.soak import soak
from tests.chaos.workload import Undisturbed

pytestmark = [pytest.mark.faults, TEST_LIMIT]

SEED = 321
"""A cut, an engine after its commit, a producer, the server, a worker."""


def test_four_kills_lose_double_and_tear_nothing(tmp_path: Path, undisturbed: Undisturbed) -> None:
    account = soak(4, SEED, tmp_path, undisturbed, print, has_standbys=False)
    assert account["violation"] is None
    assert (account["lost"], account["doubled"], account["torn"]) == (0, 0, 0)
    assert set(account["kills"]) == {"engine after commit", "producer", "server", "worker"}
    assert account["num_jobs"] > 48
