"""Bad input through every entry point: it harms nobody else, and each gets an error that can be read."""

from __future__ import annotations

import pytest

from tests.fuzz.run import run_fuzz


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_bad_inputs_cost_the_good_jobs_nothing() -> None:
    report = run_fuzz(2000, seed=12)
    assert report.problems == []
