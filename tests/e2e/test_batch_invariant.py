"""With `batch_invariant`, text and log-probabilities in bfloat16 are those of an undisturbed run of the job alone."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from millrace import LLM, Client, GenerationRequest, SamplingParams
from millrace.engine_service.config import EngineConfig, checked
from millrace.engine_service.errors import ConfigurationError
from millrace.results.logprobs import TokenLogprobs
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, TINY

SHARED = "Add the numbers, one step after the other, and write the sum at the end of the line: 12 + 7 = "
PROMPTS = [f"{SHARED}{first} + {second} =" for first, second in ((3, 4), (20, 22), (11, 7), (5, 9), (31, 6), (8, 8))]
PROMPTS += ["A story about a fox:", "Tom and Mia"]
PARAMS = [
    SamplingParams(temperature=0.9 * (number % 2), seed=number, max_tokens=80, ignore_eos=True, logprobs=2)
    for number in range(len(PROMPTS))
]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "executor": "uni",
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "batch_invariant": True,
    "max_model_len": 256,
}
Scored = list[tuple[int, dict[int, float]]]
"""Each output token, and the log-probabilities of the most likely ones."""


def scored(token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> Scored:
    """To the 6 decimals that a job has."""
    assert logprobs is not None
    found = [{token_id: round(one.logprob, 6) for token_id, one in each.items()} for each in logprobs]
    return list(zip(token_ids, found, strict=True))


def generate(num_together: int = len(PROMPTS), **options: Any) -> list[Scored]:
    with LLM(TINY, **(OPTIONS | options)) as llm:
        found: list[Scored] = []
        for first in range(0, len(PROMPTS), num_together):
            part = slice(first, first + num_together)
            outputs = [each.outputs[0] for each in llm.generate(PROMPTS[part], PARAMS[part], use_tqdm=False)]
            found += [scored(each.token_ids, each.logprobs) for each in outputs]
        return found


@pytest.fixture(scope="module")
def expected() -> list[Scored]:
    return generate(1, enable_prefix_caching=False, run_ahead=False)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 24}, {"max_num_batched_tokens": 24, "num_blocks": 40}]
)
def test_in_a_batch_with_cached_prompts_chunks_and_preemptions(options: dict[str, Any], expected: list[Scored]) -> None:
    assert generate(**options) == expected


@pytest.mark.ranks
def test_on_two_ranks(expected: list[Scored]) -> None:
    """Tensor parallel ranks add in another order, so they have results of their own."""
    divided: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2}
    assert generate(**divided) == generate(1, **divided, enable_prefix_caching=False)
    assert generate(executor="mp", pipeline_parallel_size=2) == expected


@pytest.mark.faults
def test_after_the_worker_and_then_the_engine_is_killed(
    start_engine: StartEngine, client: Client, expected: list[Scored]
) -> None:
    options = ("--dtype", "bfloat16", "--kv-cache-dtype", "bfloat16", "--batch-invariant", "--max-model-len", "256")
    engine = start_engine(*options)
    requests = zip(PROMPTS, PARAMS, strict=True)
    ids = list(client.submit_many(GenerationRequest(prompt=each, sampling=one, stream=True) for each, one in requests))
    events = iter(client.stream(ids[0]))
    next(events)
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    next(events)
    engine.kill()
    start_engine(*options)
    outputs = [client.wait(job_id, LIMIT_S).outputs[0] for job_id in ids]
    assert [scored(each.token_ids, each.logprobs) for each in outputs] == expected


def test_a_block_size_that_excludes_it() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^block_size: must be a multiple of 16 with batch_invariant, got 24$"
    ):
        checked({"model": "m", "batch_invariant": True, "block_size": 24}, EngineConfig)
