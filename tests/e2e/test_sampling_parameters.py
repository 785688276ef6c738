"""Every sampling parameter: mixed in one batch, the same outputs however the steps are planned and placed."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from millrace import LLM, Client, CompletionOutput, GenerationRequest, SamplingParams
from millrace.results.logprobs import TokenLogprobs
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, TINY, EngineProcess
from tests.e2e.test_metrics import figures

PROMPT = "Tom and Mia and Tom and Mia and Tom"
LENGTH = 60
START, END = 0, 2
"""Ids of the tiny model's special tokens that get the names of thinking markers."""
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "max_tokens": LENGTH}
OF_LOGITS: dict[str, dict[str, Any]] = {
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
MARKS: dict[str, Any] = {"logit_bias": {str(START): 8.0, str(END): 8.0}}
"""Makes special tokens likely. This tokenizer has no spaces between them that could be left out."""
OTHERS: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "temperature": {"temperature": 1.9},
    "top_k": {"top_k": 3, "temperature": 1.9},
    "top_p": {"top_p": 0.2, "temperature": 1.9},
    "min_p": {"min_p": 0.3, "temperature": 1.9},
    "seed": {"seed": 77},
    "stop": {"stop": [" a", "4"]},
    "stop, included": {"stop": [" a", "4"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [225, 21]},
    "to the context": {"max_tokens": None},
    "logprobs": {"logprobs": 3, "n": 2},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "marks": MARKS,
    "special tokens": {**MARKS, "skip_special_tokens": False},
    "no spaces": {**MARKS, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    "thinking": {"logit_bias": {str(START): 14.0, str(END): -100.0}, "thinking_token_budget": 25},
    "no text": {"detokenize": False},
    "truncated": {"truncate_prompt_tokens": 4},
}
FIELDS = OF_LOGITS | OTHERS
REQUESTS = {name: {**DRAWN, "seed": 5, **fields} for name, fields in FIELDS.items()}
REQUESTS |= {f"{name}, greedy": {**REQUESTS[name], "temperature": 0} for name in OF_LOGITS}
PARAMS = [SamplingParams(**each) for each in REQUESTS.values()]
SMALL_POOL: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "max_num_batched_tokens": 24}
CONTEXT = 148


class Outcome(NamedTuple):
    """What a reader gets."""

    texts: list[tuple[str, list[int], str | None]]
    entries: list[tuple[int, int | None, str | None]]
    """Of the log-probabilities: ids, ranks and texts."""
    values: list[float]


def outcome(outputs: list[CompletionOutput], prompt_logprobs: list[TokenLogprobs | None] | None) -> Outcome:
    scored = [token or {} for token in prompt_logprobs or []]
    scored += [token for output in outputs for token in output.logprobs or []]
    return Outcome(
        [(output.text, output.token_ids, output.finish_reason) for output in outputs],
        [(token_id, one.rank, one.decoded_token) for token in scored for token_id, one in token.items()],
        [one.logprob for token in scored for one in token.values()],
    )


def check(found: list[Outcome], expected: list[Outcome]) -> None:
    for name, one, other in zip(REQUESTS, found, expected, strict=True):
        assert (one.texts, one.entries) == (other.texts, other.entries), name
        assert one.values == pytest.approx(other.values, abs=1e-4), name


def generate(model: Path, **options: Any) -> tuple[list[Outcome], int]:
    """Return the outcome of all requests in one batch, and the number of preemptions."""
    with LLM(model, device="cpu", dtype="float32", max_model_len=CONTEXT, **({"executor": "uni"} | options)) as llm:
        outputs = llm.generate([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False)
        return [outcome(each.outputs, each.prompt_logprobs) for each in outputs], llm.stats().num_preemptions


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


@pytest.fixture(scope="module")
def expected(thinker: Path) -> list[Outcome]:
    """Return the outcome of each request when it runs alone."""
    with LLM(thinker, device="cpu", executor="uni", dtype="float32", max_model_len=CONTEXT) as llm:
        alone = [llm.generate(PROMPT, params, use_tqdm=False)[0] for params in PARAMS]
    return [outcome(each.outputs, each.prompt_logprobs) for each in alone]


def test_these_are_all_parameters() -> None:
    given = {name for fields in REQUESTS.values() for name in fields}
    assert given == set(SamplingParams.__struct_fields__) - {"structured_outputs"}, "its tests are others"


def test_each_changes_what_is_generated(expected: list[Outcome]) -> None:
    by_name = dict(zip(REQUESTS, expected, strict=True))
    for greedy in ("", ", greedy"):
        tokens = {name: by_name[name + greedy].texts[0][1] for name in OF_LOGITS}
        assert all(tokens[name] != tokens["none"] for name in OF_LOGITS if name not in ("none", "min_tokens"))
        assert set(tokens["allowed"]) <= set(range(60, 100))
        assert 225 not in tokens["bias"]
        assert len(set(tokens["frequency"])) < len(set(tokens["none"])) <= len(set(tokens["presence"]))
        assert len(tokens["min_tokens"]) >= 40
    assert all(by_name[name] != by_name["none"] for name in OTHERS)
    for one, other in [
        *(("temperature", name) for name in ("top_k", "top_p", "min_p")),
        ("stop", "stop, included"),
        *itertools.pairwise(["marks", "special tokens", "thinking"]),
    ]:
        assert by_name[one] != by_name[other], f"{one} is as {other}"


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("is_short", [False, True], ids=["all at once", "preempted"])
def test_mixed_in_one_batch(run_ahead: bool, is_short: bool, thinker: Path, expected: list[Outcome]) -> None:
    options = SMALL_POOL if is_short else {}
    found, num_preemptions = generate(thinker, executor="uni", run_ahead=run_ahead, **options)
    check(found, expected)
    assert (num_preemptions > 0) == is_short


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"executor": "mp"}, id="mp"),
        pytest.param({"executor": "mp", "tensor_parallel_size": 2}, id="TP 2", marks=pytest.mark.ranks),
        pytest.param({"executor": "mp", "pipeline_parallel_size": 2}, id="PP 2", marks=pytest.mark.ranks),
    ],
)
def test_in_processes_of_their_own(options: dict[str, Any], thinker: Path, expected: list[Outcome]) -> None:
    check(generate(thinker, **options)[0], expected)


# --- the thinking budget --------------------------------------------------------------------------------------------


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
    with LLM(thinker, device="cpu", executor="uni", dtype="float32", run_ahead=run_ahead) as llm:
        prompts = [
            "3 + 4 =<think>a b",
            "3 + 4 =",
            "Say <think> first. 3 + 4 =<think>",
            *["3 + 4 =<think>"] * 4,
            "3 + 4 =",
        ]
        params = [budgets[1], budgets[1], budgets[1], *budgets, SamplingParams(**again, thinking_token_budget=2)]
        outputs = llm.generate([*prompts, "3 + 4 =<think>"], [*params, unlimited], use_tqdm=False)
    begun, none, last, *in_output, repeated, free = [output.outputs[0].token_ids for output in outputs]
    assert begun.index(END) == 5 - (len(outputs[0].prompt_token_ids) - len(outputs[3].prompt_token_ids))
    assert last.index(END) == 5
    assert END not in none
    assert END not in free
    for tokens, budget in zip(in_output, (0, 5, 7), strict=False):
        assert tokens.index(END) == budget
        assert tokens[:budget] == free[:budget]
        assert tokens.count(END) == 1
    assert in_output[-1] == free
    assert repeated == [START, START, START, END] * 5


# --- through the queue ----------------------------------------------------------------------------------------------


@pytest.fixture
def start_thinker(start_engine: StartEngine, thinker: Path) -> StartEngine:
    def build(**options: Any) -> EngineProcess:
        given = {"max_model_len": CONTEXT, **options}
        texts = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        return start_engine(*texts, model=thinker)

    return build


def submit_all(client: Client) -> list[str]:
    requests = [GenerationRequest(prompt=PROMPT, sampling=params, stream=True) for params in PARAMS]
    return list(client.submit_many(requests))


def outcomes_of(client: Client, job_ids: list[str]) -> list[Outcome]:
    jobs = [client.wait(job_id, LIMIT_S) for job_id in job_ids]
    return [outcome(job.outputs, job.prompt_logprobs) for job in jobs]


@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["all at once", "preempted"])
def test_through_the_queue(
    options: dict[str, Any], start_thinker: StartEngine, client: Client, expected: list[Outcome]
) -> None:
    engine = start_thinker(**options, metrics_port=0)
    job_ids = submit_all(client)
    check(outcomes_of(client, job_ids), expected)
    assert (figures(engine)["millrace_num_preemptions_total"] > 0) == bool(options)


def test_what_the_model_cannot_do_fails_by_name(shared_client: Client) -> None:
    outside = shared_client.submit(prompt=PROMPT, logit_bias={99_999: 1.0})
    thoughtless = shared_client.submit(prompt=PROMPT, thinking_token_budget=3)
    for job_id, field in ((outside, "logit_bias"), (thoughtless, "thinking_token_budget")):
        error = shared_client.wait(job_id, LIMIT_S).error
        assert error is not None
        assert (error.kind, error.field) == ("invalid_request", field)


@pytest.mark.faults
def test_after_the_worker_is_killed(start_thinker: StartEngine, client: Client, expected: list[Outcome]) -> None:
    engine = start_thinker()
    job_ids = submit_all(client)
    next(iter(client.stream(job_ids[0])))
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    check(outcomes_of(client, job_ids), expected)
    assert engine.text().count("restarting the workers") == 1


@pytest.mark.faults
def test_after_the_engine_is_killed_and_another_takes_over(
    start_thinker: StartEngine, client: Client, expected: list[Outcome]
) -> None:
    engine = start_thinker()
    job_ids = submit_all(client)
    next(iter(client.stream(job_ids[0])))
    engine.kill()
    start_thinker()
    check(outcomes_of(client, job_ids), expected)
