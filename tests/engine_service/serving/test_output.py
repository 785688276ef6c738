"""When the output of jobs is saved, and what becomes of jobs that an engine hands back unstarted."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.serving.jobs import ServedJob
from millrace.engine_service.serving.output import CHECKPOINT_TOKENS, SAVE_EVERY_STEPS, Output
from millrace.executor.wire.messages import RowSampling, SeqId, record_bytes
from millrace.results import commands
from millrace.results.keys import QueueKeys
from millrace.results.messages import Append, Checkpoint, ClaimedJob, Finish, JobId, Lease, Release, Write

HOUR_S = 3600
GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])
KEYS = QueueKeys("default")


def claimed_job(**fields: Any) -> ClaimedJob:
    values = {"attempt": 1, "body": b"{}", "seed": 1, "cost": 1, "crash_count": 0}
    values |= {"checkpoints": [Checkpoint([], 0)], "is_watched": False, "created_ms": 0}
    return ClaimedJob(job_id=JobId("a"), lease=Lease(1), **{**values, **fields})


@pytest.mark.parametrize(("max_tokens", "num_writes"), [(49, 0), (64, 0), (65, 1), (128, 1), (129, 2), (300, 4)])
def test_an_unwatched_job_is_saved_before_it_is_64_tokens_ahead_but_not_when_it_ends_before(
    max_tokens: int, num_writes: int
) -> None:
    sequence = Sequence(
        SeqId(1), [1], GREEDY, StopRules(max_tokens=max_tokens, min_tokens=0, end_token_ids=frozenset())
    )
    job = ServedJob(claimed_job(), [Generation(sequence, TextRules(is_text_wanted=False), None)], due_s=0.0)
    written: list[Write] = []
    output = Output(written.append, "model-a")
    for num_tokens in range(1, max_tokens):
        sequence.output_token_ids.append(7)
        if num_tokens % SAVE_EVERY_STEPS == 0:
            output.save_due([job], job.saved_at_s)
        assert num_tokens - job.candidates[0].num_saved <= CHECKPOINT_TOKENS
    assert len(written) == num_writes
    assert all(isinstance(write, Append) for write in written)


@pytest.mark.parametrize(("num_watched", "num_events"), [(1, 11), (5, 6), (7, 4), (25, 2), (1000, 2)])
def test_few_readers_get_each_token_at_once_and_many_get_some_together(num_watched: int, num_events: int) -> None:
    """11 tokens in steps of 5 ms."""
    rules = StopRules(max_tokens=100, min_tokens=0, end_token_ids=frozenset())
    sequence = Sequence(SeqId(1), [1], GREEDY, rules)
    generation = Generation(sequence, TextRules(is_text_wanted=False), None)
    job = ServedJob(claimed_job(is_watched=True), [generation], due_s=0.0)
    written: list[Write] = []
    output = Output(written.append, "model-a")
    for number in range(11):
        sequence.output_token_ids.append(7)
        output.advance(job, job.candidates[0], now_s=1.0 + number / 200 + 1e-6 * number, num_watched=num_watched)
    assert len(written) == num_events


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


class CountingTokenizer:
    """Counts the texts of entries that are wanted of it."""

    def __init__(self) -> None:
        self.num_texts = 0

    def texts_of(self, token_ids: list[int], before: list[int]) -> list[str]:
        self.num_texts += len(token_ids)
        return [f"t{token_id}" for token_id in token_ids]


def test_the_write_builds_the_log_probabilities_of_a_prompt_once_and_the_loop_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    rules = StopRules(max_tokens=1, min_tokens=0, end_token_ids=frozenset())
    sequence = Sequence(SeqId(1), [5, 6, 7], sampling, rules, output_token_ids=[8])
    sequence.keep_prompt_logprobs(0, b"\0" * (2 * record_bytes(0)))
    tokenizer: Any = CountingTokenizer()
    generation = Generation(sequence, TextRules(), tokenizer)
    generation._final_text = ""
    written: list[Write] = []
    Output(written.append, "model-a").finish(ServedJob(claimed_job(), [generation], due_s=0.0))
    assert tokenizer.num_texts == 0
    (finish,) = written
    assert isinstance(finish, Finish)
    for _ in range(2):
        assert b'[null,[[6,0.0,0,"t6"]],[[7,0.0,0,"t7"]]]' in commands.write(KEYS, finish, 0.0)
        assert (tokenizer.num_texts, pauses) == (2, [0])


def test_the_write_builds_the_log_probabilities_of_the_output_once_and_the_loop_does_not() -> None:
    """Also when the sequence has more tokens by then."""
    sampling = msgspec.structs.replace(GREEDY, logprobs=0)
    rules = StopRules(max_tokens=9, min_tokens=0, end_token_ids=frozenset())
    sequence = Sequence(SeqId(1), [5], sampling, rules)
    tokenizer: Any = CountingTokenizer()
    job = ServedJob(claimed_job(), [Generation(sequence, TextRules(), tokenizer)], due_s=0.0)
    written: list[Write] = []
    output = Output(written.append, "model-a")
    for token_id in (6, 7):
        sequence.keep_logprobs(b"\0" * record_bytes(0))
        sequence.append(token_id)
        output.save(job, 0.0)
    job.generations[0]._final_text, job.generations[0].finish_reason = "", "length"
    output.finish(job)
    assert tokenizer.num_texts == 0
    first, second, finish = (commands.write(KEYS, write, 0.0) for write in written)
    assert b'[[6,0.0,0,"t6"]]\n' in first
    assert b'[[7,0.0,0,"t7"]]\n' in second
    assert b'[[[6,0.0,0,"t6"]],[[7,0.0,0,"t7"]]]' in finish
    assert tokenizer.num_texts == 2
