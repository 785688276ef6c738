"""When the output of jobs is saved, and what becomes of jobs that an engine hands back unstarted."""

from __future__ import annotations

import time
from typing import Any

import pytest

from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.serving.jobs import ServedJob
from millrace.engine_service.serving.output import CHECKPOINT_TOKENS, SAVE_EVERY_STEPS, Output
from millrace.executor.wire.messages import RowSampling, SeqId
from millrace.results.messages import Append, ClaimedJob, JobId, Lease, Release, Write

HOUR_S = 3600


def claimed_job(**fields: Any) -> ClaimedJob:
    values = {"attempt": 1, "body": b"{}", "seed": 1, "cost": 1, "crash_count": 0, "token_ids": [], "num_published": 0}
    values |= {"is_watched": False, "created_ms": 0}
    return ClaimedJob(job_id=JobId("a"), lease=Lease(1), **{**values, **fields})


@pytest.mark.parametrize(("max_tokens", "num_writes"), [(49, 0), (64, 0), (65, 1), (128, 1), (129, 2), (300, 4)])
def test_an_unwatched_job_is_saved_before_it_is_64_tokens_ahead_but_not_when_it_ends_before(
    max_tokens: int, num_writes: int
) -> None:
    sampling = RowSampling(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, candidate=0, min_tokens=0, end_token_ids=[]
    )
    sequence = Sequence(
        SeqId(1), [1], sampling, StopRules(max_tokens=max_tokens, min_tokens=0, end_token_ids=frozenset())
    )
    job = ServedJob(claimed_job(), [Generation(sequence, TextRules(is_text_wanted=False), None)])
    written: list[Write] = []
    output = Output(written.append, "model-a")
    for num_tokens in range(1, max_tokens):
        sequence.output_token_ids.append(7)
        if num_tokens % SAVE_EVERY_STEPS == 0:
            output.save_due([job], job.saved_at_s)
        assert num_tokens - job.candidates[0].num_saved <= CHECKPOINT_TOKENS
    assert len(written) == num_writes
    assert all(isinstance(write, Append) for write in written)


@pytest.mark.parametrize(
    ("age_s", "at_least_ms", "at_most_ms"),
    [(0, 1000, 1000), (20, 5000, 10_000), (HOUR_S, 15_000, 15_000), (-HOUR_S, 1000, 1000), (10**9, 15_000, 15_000)],
)
def test_a_job_for_a_newer_engine_stays_away_for_longer_the_older_it_is(
    age_s: int, at_least_ms: int, at_most_ms: int
) -> None:
    """Whatever the clocks of the server and of this host say."""
    claimed = claimed_job(created_ms=int((time.time() - age_s) * 1000), protocol=2)
    written: list[Write] = []
    Output(written.append, "model-a").defer(claimed)
    (release,) = written
    assert isinstance(release, Release)
    assert at_least_ms <= release.delay_ms <= at_most_ms
