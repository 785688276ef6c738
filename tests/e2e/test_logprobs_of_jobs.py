"""Log-probabilities of jobs: through Redis, and on another engine after the first one has died."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from millrace import Client, Job, SamplingParams
from millrace.engine_service.text import Tokenizer
from tests.e2e.conftest import Service, StartEngine
from tests.e2e.engines import LIMIT_S, ROOT, TINY, wait_until
from tests.e2e.test_logprobs import PARAMS, PROMPTS, check_output, check_token, forward
from tests.e2e.test_metrics import figures
from tests.millrace.cli.command import python, run_main


def check_job(job: Job, prompt: str, params: SamplingParams) -> None:
    assert (job.state, len(job.outputs)) == ("finished", params.n)
    ids = Tokenizer(TINY).encode(prompt)
    for output in job.outputs:
        check_output(ids, output, params.logprobs)
    if params.prompt_logprobs is None:
        assert job.prompt_logprobs is None
        return
    assert job.prompt_logprobs is not None and len(job.prompt_logprobs) == len(ids)
    for token_id, found, expected in zip(ids[1:], job.prompt_logprobs[1:], forward(ids), strict=False):
        assert found is not None
        check_token(found, token_id, expected, params.prompt_logprobs)


def test_jobs_with_and_without_them_share_a_batch(start_engine: StartEngine, client: Client) -> None:
    start_engine("--num-blocks", "40", "--block-size", "4", "--dtype", "float32")
    wanted = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    ids = [client.submit(prompt=prompt, sampling=params) for prompt, params in wanted]
    for job_id, (prompt, params) in zip(ids, wanted, strict=True):
        check_job(client.wait(job_id, LIMIT_S), prompt, params)


def test_a_stream_has_one_entry_for_each_token_also_before_a_stop_string(shared_client: Client) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    text = shared_client.wait(shared_client.submit("20 + 22 =", **options), LIMIT_S).text
    job_id = shared_client.submit("20 + 22 =", stream=True, stop=text[8:10], **options)
    events = [event for event in shared_client.stream(job_id) if event.state is None]
    assert len(events) > 1
    for event in events:
        assert event.logprobs is not None
        assert [next(iter(found)) for found in event.logprobs] == event.token_ids
    job = shared_client.get(job_id)
    assert job.outputs[0].logprobs == [found for event in events for found in event.logprobs or []]
    assert job.timings.first_token_ms is not None


def test_more_than_the_engine_gives_fails_the_job_by_name(shared_client: Client) -> None:
    job = shared_client.wait(shared_client.submit("1 + 1 =", logprobs=21), LIMIT_S)
    assert job.error is not None
    assert (job.state, job.error.kind, job.error.field) == ("failed", "invalid_request", "logprobs")


def test_the_command_shows_them(service: Service, redis_url: str) -> None:
    options = ("--redis", redis_url, "--queue", service.queue)
    ran = run_main("submit", *options, "--logprobs", "1", "--prompt-logprobs", "0", "--wait", "--json", "1 + 1 =")
    job = json.loads(ran.out)
    assert len(job["outputs"][0]["logprobs"]) == len(job["token_ids"])
    assert job["prompt_logprobs"][0] is None and len(job["prompt_logprobs"]) == job["usage"]["prompt_tokens"]


def test_the_example_shows_the_probability_of_each_token(service: Service, redis_url: str) -> None:
    options = ("--redis", redis_url, "--queue", service.queue)
    ran = python(str(ROOT / "examples" / "logprobs.py"), "3 + 4 =", *options)
    assert ran.status == 0, ran.err
    lines = ran.out.splitlines()
    assert [line.partition(" 1")[0] for line in lines[:2]] == ["' '", "'7'"]
    assert {line.count("%") for line in lines} == {3}


def test_an_engine_that_drains_writes_the_log_probabilities_that_it_builds(
    start_engine: StartEngine, client: Client
) -> None:
    """SIGTERM comes after the job's last step and before its result, which all tokens of the vocabulary make large."""
    engine = start_engine("--max-logprobs", "-1", "--metrics-port", "0")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    prompt = [5 + number % 100 for number in range(1000)]
    job_id = client.submit(prompt_token_ids=prompt, sampling=params)
    wait_until(lambda: figures(engine)["millrace_jobs_total[finished]"] == 1)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(LIMIT_S) == 0, engine.text()
    assert "draining: 0 jobs run" in engine.text()
    job = client.get(job_id)
    assert (job.state, job.attempt, job.num_tokens) == ("finished", 1, 1)
    assert job.outputs[0].logprobs is not None and job.prompt_logprobs is not None
    assert [found and next(iter(found)) for found in job.prompt_logprobs] == [None, *prompt[1:]]
    assert {len(found) for found in [*job.prompt_logprobs[1:], *job.outputs[0].logprobs] if found} == {512}


@pytest.mark.faults
@pytest.mark.parametrize("streamed", [True, False])
def test_after_the_death_of_an_engine_no_token_lacks_them(
    start_engine: StartEngine, client: Client, streamed: bool
) -> None:
    first = start_engine("--dtype", "float32")
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    several = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=700, ignore_eos=True, logprobs=0)
    ids = [client.submit(prompt=PROMPTS[0], sampling=one, stream=streamed) for one in (params, several)]
    wait_until(lambda: client.get(ids[1]).num_tokens >= 150)
    os.kill(first.process.pid, signal.SIGKILL)
    assert {client.get(job_id).state for job_id in ids} == {"running"}
    start_engine("--dtype", "float32")
    for job_id, one in zip(ids, (params, several), strict=True):
        job = client.wait(job_id, LIMIT_S)
        assert job.attempt == 2
        check_job(job, PROMPTS[0], one)


@pytest.mark.faults
def test_after_the_death_of_a_worker_alone_the_results_are_the_same(start_engine: StartEngine, client: Client) -> None:
    """With log-probabilities, processors and several candidates, streamed and not."""
    engine = start_engine("--dtype", "float32")
    penalized: dict[str, Any] = {"frequency_penalty": 0.2, "repetition_penalty": 1.1, "bad_words": ["1"]}
    wanted = [
        SamplingParams(temperature=0, max_tokens=700, ignore_eos=True, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=600, ignore_eos=True, logprobs=1, **penalized),
    ]

    def submit() -> list[str]:
        return [
            client.submit(PROMPTS[0], sampling=one, stream=streamed) for one in wanted for streamed in (True, False)
        ]

    def results(ids: list[str]) -> list[Any]:
        jobs = [client.wait(job_id, LIMIT_S) for job_id in ids]
        assert {job.attempt for job in jobs} == {1}
        for job, params in zip(jobs, [one for one in wanted for _ in range(2)], strict=True):
            check_job(job, PROMPTS[0], params)
        return [[(output.token_ids, output.text) for output in job.outputs] for job in jobs]

    undisturbed = results(submit())
    ids = submit()
    wait_until(lambda: client.get(ids[-1]).num_tokens >= 150)
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    assert {client.get(job_id).state for job_id in ids} == {"running"}
    assert results(ids) == undisturbed
    assert engine.text().count("restarting the workers") == 1
