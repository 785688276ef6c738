"""A job as readers get it: what its methods return and raise."""

from __future__ import annotations

import pytest

from millrace import Job, JobFailed
from millrace.results.job import Timings
from millrace.results.messages import JobError


def job(state: str, error: JobError | None = None) -> Job:
    return Job(
        id="a",
        state=state,
        text="",
        token_ids=[],
        outputs=[],
        finish_reason=None,
        usage=None,
        error=error,
        timings=Timings(created_ms=0),
    )


def test_a_finished_job_raises_nothing_and_is_returned() -> None:
    finished = job("finished")
    assert finished.raise_for_state() is finished


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("failed", "job 'a' has failed, and its error has expired"),
        ("cancelled", "job 'a' was cancelled"),
        ("expired", "job 'a' has expired: its deadline passed before its end"),
        ("delayed", "job 'a' is delayed; wait for its end"),
        ("queued", "job 'a' is queued; wait for its end"),
        ("running", "job 'a' is running; wait for its end"),
    ],
)
def test_a_job_in_any_other_state_raises_one_error_that_names_it(state: str, message: str) -> None:
    with pytest.raises(JobFailed) as caught:
        job(state).raise_for_state()
    error = caught.value
    assert (str(error), error.job_id, error.state, error.kind, error.reason) == (message, "a", state, None, "")


def test_the_error_of_a_job_that_has_failed_has_its_kind_and_its_message() -> None:
    with pytest.raises(JobFailed, match=r"^job 'a' has failed: crashed: three engines have died$") as caught:
        job("failed", JobError(kind="crashed", message="three engines have died")).raise_for_state()
    assert (caught.value.kind, caught.value.reason) == ("crashed", "three engines have died")
