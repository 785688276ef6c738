"""Log-probabilities of `LLM`: those of a plain forward pass, in every way to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace import LLM, CompletionOutput, InvalidRequest, Logprob, RequestOutput, SamplingParams
from millrace.engine_service.text import Tokenizer
from tests.e2e.engines import TINY

PROMPTS = ["3 + 4 =", "20 + 22 =", "1 + 1 =", "5 + 6 = 11\n7 + 8 ="]


@cache
def transformers_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def forward(token_ids: list[int]) -> Tensor:
    """The log-probabilities [L, V] behind each token, by transformers."""
    with torch.no_grad():
        logprobs: Tensor = transformers_model()(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logprobs


def check_token(found: dict[int, Logprob], token_id: int, expected: Tensor, count: int) -> None:
    assert next(iter(found)) == token_id and count <= len(found) <= count + 1
    likely = expected.topk(count).values.tolist()
    for place, (other_id, one) in enumerate(found.items()):
        assert one.logprob == pytest.approx(float(expected[other_id]), abs=1e-4)
        assert one.rank is not None
        assert (expected > one.logprob + 1e-4).sum() < one.rank <= (expected > one.logprob - 1e-4).sum()
        if place:
            assert one.logprob == pytest.approx(likely[one.rank - 1], abs=1e-4)
    assert {one.rank for one in found.values()} >= set(range(1, count + 1))


def check_output(prompt: list[int], output: CompletionOutput, count: int | None) -> None:
    if count is None:
        assert output.logprobs is None and output.cumulative_logprob is None
        return
    expected = forward(prompt + output.token_ids)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for number, (token_id, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        check_token(found, token_id, expected[len(prompt) + number - 1], count)
    sampled = [found[token_id].logprob for token_id, found in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(sampled))


def check(result: RequestOutput, params: SamplingParams) -> None:
    prompt = result.prompt_token_ids
    for output in result.outputs:
        check_output(prompt, output, params.logprobs)
    if params.prompt_logprobs is None:
        assert result.prompt_logprobs is None
        return
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(prompt)
    assert result.prompt_logprobs[0] is None and result.num_cached_tokens == 0
    expected = forward(prompt)
    for number, found in enumerate(result.prompt_logprobs[1:]):
        assert found is not None
        check_token(found, prompt[number + 1], expected[number], params.prompt_logprobs)


PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=1),
    SamplingParams(temperature=1.5, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=20, prompt_logprobs=0),
    SamplingParams(temperature=1.5, min_tokens=9, seed=4, n=3, max_tokens=12, logprobs=1, prompt_logprobs=2),
]


def mixed() -> tuple[list[str], list[SamplingParams]]:
    return [prompt for prompt in PROMPTS for _ in PARAMS], [params for _ in PROMPTS for params in PARAMS]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"executor": "uni"}, id="uni"),
        pytest.param({"executor": "uni", "run_ahead": True}, id="run-ahead"),
        pytest.param({"executor": "uni", "num_blocks": 10, "block_size": 8, "max_num_seqs": 16}, id="preempted"),
        pytest.param({"executor": "uni", "max_num_batched_tokens": 5}, id="chunks"),
        pytest.param({"executor": "mp"}, id="mp"),
        pytest.param({"executor": "mp", "tensor_parallel_size": 2}, id="TP 2", marks=pytest.mark.ranks),
        pytest.param({"executor": "mp", "pipeline_parallel_size": 2}, id="PP 2", marks=pytest.mark.ranks),
    ],
)
def test_log_probabilities_are_those_of_a_forward_pass(options: dict[str, Any]) -> None:
    prompts, params = mixed()
    defaults: dict[str, Any] = {"executor": "uni", "num_blocks": 200}
    with LLM(TINY, device="cpu", dtype="float32", **(defaults | options)) as llm:
        results = llm.generate(prompts * 2, params * 2, use_tqdm=False)
        assert ("num_blocks" in options) == (llm.stats().num_preemptions > 0)
    for result, each in zip(results, params * 2, strict=True):
        check(result, each)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, device="cpu", dtype="float32", executor="uni", num_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def generate(llm: LLM) -> Callable[..., RequestOutput]:
    def run(prompt: Any, **options: Any) -> RequestOutput:
        params = SamplingParams(**({"temperature": 0, "max_tokens": 8} | options))
        result = llm.generate(prompt, params, use_tqdm=False)[0]
        check(result, params)
        return result

    return run


def test_texts_of_tokens_are_the_text_of_the_output(generate: Callable[..., RequestOutput]) -> None:
    output = generate(PROMPTS[1], logprobs=2, ignore_eos=True, skip_special_tokens=False).outputs[0]
    assert output.logprobs is not None
    texts = [found[token_id].decoded_token for token_id, found in zip(output.token_ids, output.logprobs, strict=True)]
    assert "".join(map(str, texts)) == output.text
    bare = generate(PROMPTS[1], logprobs=2, detokenize=False).outputs[0]
    assert bare.logprobs is not None
    assert {one.decoded_token for found in bare.logprobs for one in found.values()} == {None}


def test_a_stop_string_leaves_one_entry_for_each_token(generate: Callable[..., RequestOutput]) -> None:
    whole = generate(PROMPTS[1], ignore_eos=True).outputs[0].text
    output = generate(PROMPTS[1], ignore_eos=True, stop=whole[2:4], logprobs=1).outputs[0]
    assert output.stop_reason == whole[2:4]


def test_a_cached_prompt_is_computed_again_for_its_log_probabilities(generate: Callable[..., RequestOutput]) -> None:
    prompt = "1 + 2 = 3\n" * 6
    generate(prompt)
    assert generate(prompt).num_cached_tokens > 0
    assert generate(prompt, prompt_logprobs=1).num_cached_tokens == 0
    assert generate(prompt, prompt_logprobs=1, logprobs=1, n=2, temperature=1.0).prompt_logprobs is not None
    assert generate([7], prompt_logprobs=3).prompt_logprobs == [None]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (21, "asks for 21, but the engine gives at most 20; ask for less, or start the engine with max_logprobs 21"),
        (-1, "asks for the whole vocabulary, but the engine gives at most 20"),
        (-2, "must be"),
        (True, "must be"),
        ("5", "must be"),
        (1.0, "must be"),
    ],
)
def test_a_number_of_log_probabilities_that_cannot_be_is_named(llm: LLM, field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: {words}"):
        llm.generate("1", SamplingParams(**{field: value}), use_tqdm=False)


def test_the_whole_vocabulary_where_the_engine_allows_it() -> None:
    with LLM(TINY, device="cpu", dtype="float32", executor="uni", num_blocks=64, max_logprobs=-1) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
        result = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    vocab_size = forward([1]).shape[1]
    check(result, SamplingParams(logprobs=vocab_size, prompt_logprobs=vocab_size))


def test_a_character_of_several_tokens_belongs_to_the_last_one() -> None:
    tokenizer = Tokenizer(TINY)
    text = "3 é 語 🙂 4"
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = [tokenizer.texts_of([token_id], ids[max(0, at - 4) : at])[0] for at, token_id in enumerate(ids)]
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=False)
