"""Jobs whose prompts begin alike run one after the other, where the pool holds one beginning at a time."""

from __future__ import annotations

from millrace import Client, GenerationRequest, SamplingParams
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S

BEGINNINGS = ("The fox and the river. " * 13, "What the house had seen, " * 12)
"""7 and 9 blocks."""
NUM_JOBS = 48
NUM_SHARED_TOKENS = NUM_JOBS // 2 * (7 + 9) * 16


def test_jobs_that_begin_alike_share_blocks_though_they_come_mixed(start_engine: StartEngine, client: Client) -> None:
    """In the order of age they would share two thirds."""
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [f"{BEGINNINGS[number % 2]}{number} + 1 =" for number in range(NUM_JOBS)]
    ids = client.submit_many([GenerationRequest(prompt=prompt, sampling=sampling) for prompt in prompts])
    start_engine("--max-num-seqs", "1", "--num-blocks", "14", "--block-size", "16")
    usages = [client.wait(job_id, LIMIT_S).usage for job_id in ids]
    assert sum(usage.cached_tokens for usage in usages if usage) > 0.8 * NUM_SHARED_TOKENS
