"""Seeded sampling gives the same text (in float32) in any batch and after any fault."""

from __future__ import annotations

import os
import signal

import msgspec
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
    with LLM(TINY, device="cpu", executor="uni", dtype="float32") as llm:
        (output,) = llm.generate(PROMPT, sampling(), use_tqdm=False)
    return output.outputs[0].text


def test_the_seed_makes_the_text(alone: str) -> None:
    with LLM(TINY, device="cpu", executor="uni", dtype="float32") as llm:
        outputs = llm.generate([PROMPT, PROMPT], [sampling(), sampling(seed=8)], use_tqdm=False)
    assert outputs[0].outputs[0].text == alone
    assert outputs[1].outputs[0].text != alone


def test_in_a_batch_of_64(alone: str) -> None:
    prompts = [PROMPT] + [f"{number} + 4 =" for number in range(63)]
    params = [sampling()] + [sampling(seed=number, max_tokens=20 + number) for number in range(63)]
    with LLM(TINY, device="cpu", executor="uni", dtype="float32", max_num_batched_tokens=128) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert outputs[0].outputs[0].text == alone


def test_after_preemptions(alone: str) -> None:
    prompts, params = [PROMPT] * 4, [sampling(seed=8), sampling(seed=9), sampling(), sampling(seed=10)]
    with LLM(TINY, device="cpu", executor="uni", dtype="float32", num_blocks=70, max_model_len=500) as llm:
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


# --- several candidates ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def candidates() -> list[str]:
    """Return the texts of three candidates, each of which ends at another place, when nothing else runs."""
    with LLM(TINY, device="cpu", executor="uni", dtype="float32") as llm:
        (output,) = llm.generate(PROMPT, msgspec.structs.replace(sampling(), n=3), use_tqdm=False)
    return [one.text for one in output.outputs]


def submit_candidates(client: Client) -> str:
    return client.submit(
        prompt=PROMPT, temperature=0.9, top_p=0.95, seed=7, max_tokens=LENGTH, ignore_eos=True, stream=True, n=3
    )


def test_the_first_candidate_is_the_job_without_others(alone: str, candidates: list[str]) -> None:
    assert candidates[0] == alone
    assert len(set(candidates)) == 3


@pytest.mark.faults
def test_every_candidate_after_the_worker_is_killed(
    candidates: list[str], start_engine: StartEngine, client: Client
) -> None:
    engine = start_engine()
    job_id = submit_candidates(client)
    next(iter(client.stream(job_id)))
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    assert [output.text for output in client.wait(job_id, LIMIT_S).outputs] == candidates


@pytest.mark.faults
def test_every_candidate_after_the_engine_is_killed(
    candidates: list[str], start_engine: StartEngine, client: Client
) -> None:
    """Another one goes on, after the checkpoint of each. The stream shows every token of each once."""
    first = start_engine("--heartbeat", "1")
    job_id = submit_candidates(client)
    stream = client.stream(job_id)
    events = [next(stream)]
    while len({event.index for event in events}) < 3:
        events.append(next(stream))
    first.kill()
    start_engine("--heartbeat", "1")
    events += stream
    job = client.get(job_id)
    assert [output.text for output in job.outputs] == candidates
    assert ["".join(event.text for event in events if event.index == index) for index in range(3)] == candidates
    assert job.usage is not None
    assert job.usage.completion_tokens == 3 * LENGTH
    assert job.attempt == 2
