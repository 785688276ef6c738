"""Seeded sampling gives the same text (in float32) in any batch and after any fault."""

from __future__ import annotations

import os
import signal

import pytest

from millrace import LLM, Client, GenerationRequest, SamplingParams
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, TINY

PROMPT = "A story about a fox:"
LENGTH = 400


def sampling(seed: int = 7, max_tokens: int = LENGTH) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> str:
    """Return the text of the job when it runs alone."""
    with LLM(TINY, device="cpu", dtype="float32") as llm:
        (output,) = llm.generate(PROMPT, sampling(), use_tqdm=False)
    return output.outputs[0].text


def test_the_seed_makes_the_text(alone: str) -> None:
    with LLM(TINY, device="cpu", dtype="float32") as llm:
        outputs = llm.generate([PROMPT, PROMPT], [sampling(), sampling(seed=8)], use_tqdm=False)
    assert outputs[0].outputs[0].text == alone
    assert outputs[1].outputs[0].text != alone


def test_in_a_batch_of_64(alone: str) -> None:
    prompts = [PROMPT] + [f"{number} + 4 =" for number in range(63)]
    params = [sampling()] + [sampling(seed=number, max_tokens=20 + number) for number in range(63)]
    with LLM(TINY, device="cpu", dtype="float32", max_num_batched_tokens=128) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert outputs[0].outputs[0].text == alone


def test_after_preemptions(alone: str) -> None:
    prompts, params = [PROMPT] * 4, [sampling(seed=8), sampling(seed=9), sampling(), sampling(seed=10)]
    with LLM(TINY, device="cpu", dtype="float32", num_blocks=70, max_model_len=500) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().num_preemptions > 0
    assert outputs[2].outputs[0].text == alone


@pytest.mark.faults
def test_after_the_worker_is_killed(alone: str, start_engine: StartEngine, client: Client) -> None:
    engine = start_engine()
    job_id = submit(client)
    next(iter(client.stream(job_id)))
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    assert client.wait(job_id, LIMIT_S).text == alone


@pytest.mark.faults
def test_after_the_engine_is_killed_and_another_takes_over(
    alone: str, start_engine: StartEngine, client: Client
) -> None:
    engine = start_engine()
    job_id = submit(client)
    next(iter(client.stream(job_id)))
    engine.kill()
    assert client.get(job_id).state == "running"
    start_engine()
    job = client.wait(job_id, LIMIT_S)
    assert job.text == alone
    assert job.attempt == 2
    assert "".join(event.text for event in client.stream(job_id)) == alone


def submit(client: Client) -> str:
    """Submit the job, and others that fill the batch."""
    client.submit_many(
        GenerationRequest(prompt=f"{number} + 4 =", sampling=sampling(seed=number, max_tokens=900))
        for number in range(20)
    )
    return client.submit(
        prompt=PROMPT, temperature=0.9, top_p=0.95, seed=7, max_tokens=LENGTH, ignore_eos=True, stream=True
    )
