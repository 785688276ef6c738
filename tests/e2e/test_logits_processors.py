"""Every parameter that changes the logits: mixed in one batch, the same tokens however the steps are planned and placed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from millrace import LLM, Client, GenerationRequest, SamplingParams
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, TINY

PROMPT = "Tom and Mia and Tom and Mia and Tom"
LENGTH = 60
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "max_tokens": LENGTH}
FIELDS: dict[str, dict[str, Any]] = {
    "none": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {"21": 4.0, "225": -100.0}},
    "allowed": {"allowed_token_ids": list(range(60, 100))},
    "bad words": {"bad_words": ["What is", "from", "1 +"]},
    "min_tokens": {"min_tokens": 40, "ignore_eos": False},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {"80": 2.0},
        "allowed_token_ids": list(range(50, 300)),
        "bad_words": ["a", "the b"],
        "min_tokens": 10,
    },
}
REQUESTS = [{**DRAWN, "seed": 5, **fields} for fields in FIELDS.values()]
REQUESTS += [{**each, "temperature": 0} for each in REQUESTS]
PARAMS = [SamplingParams(**each) for each in REQUESTS]
SMALL_POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "max_num_batched_tokens": 24}


def generate(**options: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of all requests in one batch, and the number of preemptions."""
    with LLM(TINY, device="cpu", dtype="float32", max_model_len=148, **options) as llm:
        outputs = llm.generate([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], llm.stats().num_preemptions


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of each request when it runs alone."""
    with LLM(TINY, device="cpu", dtype="float32", max_model_len=148, run_ahead=False) as llm:
        return [llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids for params in PARAMS]


def test_each_changes_what_is_generated(expected: list[list[int]]) -> None:
    drawn = dict(zip(FIELDS, expected, strict=False))
    greedy = dict(zip(FIELDS, expected[len(FIELDS) :], strict=True))
    for tokens in (drawn, greedy):
        assert all(tokens[name] != tokens["none"] for name in FIELDS if name not in ("none", "min_tokens"))
        assert set(tokens["allowed"]) <= set(range(60, 100))
        assert 225 not in tokens["bias"]
        assert len(set(tokens["frequency"])) < len(set(tokens["none"])) <= len(set(tokens["presence"]))
        assert len(tokens["min_tokens"]) >= 40


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("is_short", [False, True], ids=["all at once", "preempted"])
def test_mixed_in_one_batch(run_ahead: bool, is_short: bool, expected: list[list[int]]) -> None:
    tokens, num_preemptions = generate(executor="uni", run_ahead=run_ahead, **(SMALL_POOL if is_short else {}))
    assert tokens == expected
    assert (num_preemptions > 0) == is_short


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"executor": "mp"}, id="mp"),
        pytest.param({"tensor_parallel_size": 2}, id="TP 2", marks=pytest.mark.ranks),
        pytest.param({"pipeline_parallel_size": 2}, id="PP 2", marks=pytest.mark.ranks),
    ],
)
def test_in_processes_of_their_own(options: dict[str, Any], expected: list[list[int]]) -> None:
    assert generate(**options)[0] == expected


# --- the thinking budget --------------------------------------------------------------------------------------------

START, END = 0, 2
"""Ids of the tiny model's special tokens that get the names of thinking markers."""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinker")
    for file in TINY.iterdir():
        if file.suffix in (".json", ".jinja"):
            text = file.read_text().replace("<|pad|>", "<think>").replace("<|system|>", "</think>")
            (path / file.name).write_text(text)
        else:
            (path / file.name).symlink_to(file.resolve())
    return path


@pytest.mark.parametrize("run_ahead", [False, True])
def test_thinking_ends_where_its_budget_does(thinker: Path, run_ahead: bool) -> None:
    """In the prompt and in the output. The bias makes the model think again and again."""
    thoughts: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 1,
        "max_tokens": 20,
        "ignore_eos": True,
        "logit_bias": {END: -100.0},
    }
    unlimited = SamplingParams(**thoughts)
    budgets = [SamplingParams(**thoughts, thinking_token_budget=budget) for budget in (0, 5, 7, 50)]
    again = {**thoughts, "logit_bias": {START: 100.0, END: -100.0}}
    with LLM(thinker, device="cpu", dtype="float32", run_ahead=run_ahead) as llm:
        prompts = ["3 + 4 =<think>a b", "3 + 4 =", *["3 + 4 =<think>"] * 4, "3 + 4 ="]
        params = [budgets[1], budgets[1], *budgets, SamplingParams(**again, thinking_token_budget=2)]
        outputs = llm.generate([*prompts, "3 + 4 =<think>"], [*params, unlimited], use_tqdm=False)
    begun, none, *in_output, repeated, free = [output.outputs[0].token_ids for output in outputs]
    assert begun.index(END) == 5 - (len(outputs[0].prompt_token_ids) - len(outputs[2].prompt_token_ids))
    assert END not in none
    assert END not in free
    for tokens, budget in zip(in_output, (0, 5, 7), strict=False):
        assert tokens.index(END) == budget
        assert tokens[:budget] == free[:budget]
        assert tokens.count(END) == 1
    assert in_output[-1] == free
    assert repeated == [START, START, START, END] * 5


# --- through the queue ----------------------------------------------------------------------------------------------


def submit_all(client: Client) -> list[str]:
    requests = [GenerationRequest(prompt=PROMPT, sampling=params, stream=True) for params in PARAMS]
    return list(client.submit_many(requests))


def tokens_of(client: Client, job_ids: list[str]) -> list[list[int]]:
    return [client.wait(job_id, LIMIT_S).outputs[0].token_ids for job_id in job_ids]


def test_through_the_queue(start_engine: StartEngine, client: Client, expected: list[list[int]]) -> None:
    start_engine()
    job_ids = submit_all(client)
    ended = client.submit(prompt="3 + 4 =", temperature=0, stop="7", include_stop_str_in_output=True)
    cut = client.submit(prompt=PROMPT, truncate_prompt_tokens=4, temperature=0)
    outside = client.submit(prompt=PROMPT, logit_bias={99_999: 1.0})
    thoughtless = client.submit(prompt=PROMPT, thinking_token_budget=3)
    assert tokens_of(client, job_ids) == expected
    assert client.wait(ended, LIMIT_S).text == " 7"
    usage = client.wait(cut, LIMIT_S).usage
    assert usage is not None
    assert usage.prompt_tokens == 4
    for job_id, field in ((outside, "logit_bias"), (thoughtless, "thinking_token_budget")):
        error = client.wait(job_id, LIMIT_S).error
        assert error is not None
        assert (error.kind, error.field) == ("invalid_request", field)


@pytest.mark.faults
def test_after_the_worker_is_killed(start_engine: StartEngine, client: Client, expected: list[list[int]]) -> None:
    engine = start_engine()
    job_ids = submit_all(client)
    next(iter(client.stream(job_ids[0])))
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    assert tokens_of(client, job_ids) == expected
    assert engine.text().count("restarting the workers") == 1


@pytest.mark.faults
def test_after_the_engine_is_killed_and_another_takes_over(
    start_engine: StartEngine, client: Client, expected: list[list[int]]
) -> None:
    engine = start_engine()
    job_ids = submit_all(client)
    next(iter(client.stream(job_ids[0])))
    engine.kill()
    start_engine()
    assert tokens_of(client, job_ids) == expected
