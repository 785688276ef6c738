"""What a request costs before it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.text import Tokenizer
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import MAX_RECORD_BYTES, LogitsSettings, ModelFacts, ThinkingLimit, record_bytes
from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams
from tests.engine_service.chat.models import WEATHER, model_with_template, source_of

TINY = Path(__file__).resolve().parents[3] / "examples" / "tiny_model"
FACTS = ModelFacts(
    architecture="stub",
    vocab_size=512,
    max_model_len=1000,
    dtype="float32",
    device="cpu",
    attention="reference",
    weight_bytes=4,
    kv_bytes_per_block=64,
    kv_layout=KVLayout(16),
)


@pytest.fixture
def admission() -> Admission:
    return Admission(FACTS, Tokenizer(TINY), [])


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        ("prompt", "a" * 1_000_000),
        ("messages", [{"role": "user", "content": "a" * 1_000_000}]),
    ],
)
def test_a_prompt_that_is_far_too_long_is_refused(admission: Admission, field: str, prompt: Any) -> None:
    kwargs: dict[str, Any] = {field: prompt}
    with pytest.raises(InvalidRequest, match=rf"^{field}: has 100000\d tokens, and the context of 1000 must hold"):
        admission.prompt_token_ids(GenerationRequest(**kwargs))


def test_a_prompt_is_judged_by_its_tokens(admission: Admission) -> None:
    assert len(admission.prompt_token_ids(GenerationRequest(prompt="is " * 600))) == 601
    with pytest.raises(InvalidRequest, match=r"^prompt: has 1000 tokens, and the context of 1000 must hold"):
        admission.prompt_token_ids(GenerationRequest(prompt="a" * 1000))


def test_too_many_token_ids_are_refused_before_each_is_looked_at(admission: Admission) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_token_ids: has 100000 tokens"):
        admission.prompt_token_ids(GenerationRequest(prompt_token_ids=[5] * 99_999 + [10**9]))


def test_a_text_with_a_token_that_the_model_lacks_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(msgspec.structs.replace(FACTS, vocab_size=400), Tokenizer(TINY), [])
    assert "the tokenizer has 512 tokens and the model 400: prompts with the others are refused" in caplog.text
    plain = [each for each in ("a", "fox", "The", "was", "the") if max(Tokenizer(TINY).encode(each)) < 400]
    assert plain and admission.prompt_token_ids(GenerationRequest(prompt=plain[0]))
    text = Tokenizer(TINY).decode([450], skip_special_tokens=False)
    for field, value in (("prompt", text), ("messages", [{"role": "user", "content": text}])):
        given: dict[str, Any] = {field: value}
        rule = rf"^{field}: .* is token 4\d\d of the tokenizer, and the model has only 400; leave it out"
        with pytest.raises(InvalidRequest, match=rule):
            admission.prompt_token_ids(GenerationRequest(**given))


def test_log_probabilities_of_prompts_are_refused_where_the_model_has_none() -> None:
    admission = Admission(msgspec.structs.replace(FACTS, scores_prompts=False), None, [])
    assert admission.admit([1], SamplingParams(logprobs=2), drawn_seed=0)
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs: stub has none in this version; leave it out"):
        admission.admit([1], SamplingParams(prompt_logprobs=2), drawn_seed=0)


def test_an_eos_token_outside_the_vocabulary_is_ignored() -> None:
    """The worker would have to mask its logit for `min_tokens`, and there is none."""
    admission = Admission(FACTS, None, [2, 512, -1])
    (generation,) = admission.admit([1], SamplingParams(min_tokens=3), drawn_seed=0)
    assert generation.sequence.sampling.end_token_ids == [2]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_token_that_could_end_a_text_is_sampled_before_min_tokens(ignore_eos: bool) -> None:
    """As with vLLM, where `ignore_eos` does not end that either."""
    admission = Admission(FACTS, None, [2])
    params = SamplingParams(min_tokens=3, stop_token_ids=[7], ignore_eos=ignore_eos)
    (generation,) = admission.admit([1], params, drawn_seed=0)
    assert generation.sequence.sampling.end_token_ids == [2, 7]
    assert generation.sequence.stop_rules.end_token_ids == ({7} if ignore_eos else {2, 7})


# --- what changes the logits ---------------------------------------------------------------------------------------


def settings_of(admission: Admission, **fields: Any) -> LogitsSettings | None:
    (generation,) = admission.admit([1], SamplingParams(**fields), drawn_seed=0)
    return generation.sequence.sampling.processors


@pytest.fixture
def thinking(tmp_path: Path) -> Admission:
    """With a tokenizer that has `<think>` as 512 and `</think>` as 513."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(tmp_path)
    return Admission(msgspec.structs.replace(FACTS, vocab_size=514), Tokenizer(tmp_path), [])


def test_a_request_that_changes_no_logits_has_no_settings(admission: Admission) -> None:
    assert settings_of(admission, min_tokens=2, repetition_penalty=1, frequency_penalty=0, logit_bias={}) is None


def test_the_settings_have_token_ids(admission: Admission) -> None:
    settings = settings_of(admission, presence_penalty=1, logit_bias={"5": 2}, allowed_token_ids=[5, 6, 5])
    assert settings == LogitsSettings(presence_penalty=1.0, logit_bias={5: 2.0}, allowed_token_ids=[5, 6])


def test_a_bad_word_is_excluded_at_the_beginning_of_a_text_and_within_it(admission: Admission) -> None:
    tokenizer = Tokenizer(TINY)
    settings = settings_of(admission, bad_words=["the", " fox"])
    assert settings is not None
    plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("the", " the"))
    assert settings.bad_words[0] == plain
    assert (spaced in settings.bad_words) == (spaced[0] != plain[0] and len(spaced) == len(plain))
    assert tokenizer.encode("fox", add_special_tokens=False) in settings.bad_words


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {512: 1}}, r"^logit_bias: token id 512 is outside the vocabulary of 512"),
        ({"allowed_token_ids": [1, 10**6]}, r"^allowed_token_ids: token id 1000000 is outside the vocabulary"),
        ({"thinking_token_budget": 5}, r"^thinking_token_budget: .*model has no tokens that mark thinking"),
        ({"min_tokens": 1, "stop_token_ids": [7], "allowed_token_ids": [7]}, r"^allowed_token_ids: leaves no token"),
        ({"bad_words": ["a"], "allowed_token_ids": ["a"]}, r"^allowed_token_ids: leaves no token"),
    ],
)
def test_what_the_model_can_not_do_is_refused_by_name(
    admission: Admission, fields: dict[str, Any], message: str
) -> None:
    if fields.get("allowed_token_ids") == ["a"]:
        fields = fields | {"allowed_token_ids": Tokenizer(TINY).encode("a", add_special_tokens=False)}
    with pytest.raises(InvalidRequest, match=message):
        settings_of(admission, **fields)


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match=r"^bad_words: the engine's model has no tokenizer; use logit_bias"):
        settings_of(Admission(FACTS, None, []), bad_words=["a"])


def test_a_thinking_budget_has_the_markers_of_the_tokenizer(thinking: Admission) -> None:
    assert settings_of(thinking, thinking_token_budget=5) == LogitsSettings(thinking=ThinkingLimit(5, 512, 513))


# --- prompts that are cut off ---------------------------------------------------------------------------------------


def test_the_last_tokens_of_a_prompt_are_kept_and_the_special_tokens_before_it(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    begin = tokenizer.all_special_tokens[0]
    special_tokens = [(begin, tokenizer.convert_tokens_to_ids(begin))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=special_tokens)
    tokenizer.save_pretrained(tmp_path)
    admission, request = Admission(FACTS, Tokenizer(tmp_path), []), GenerationRequest(prompt="one two three")
    whole = admission.prompt_token_ids(request)
    assert whole[0] == special_tokens[0][1]
    assert admission.prompt_token_ids(request, 4) == [whole[0], *whole[-3:]]
    assert admission.prompt_token_ids(request, 100) == admission.prompt_token_ids(request, -1) == whole
    assert admission.prompt_token_ids(request, 1) == [whole[0]]


def test_the_last_tokens_of_ids_and_of_a_chat_are_kept(admission: Admission) -> None:
    assert admission.prompt_token_ids(GenerationRequest(prompt_token_ids=[4, 5, 6]), 2) == [5, 6]
    long_one = GenerationRequest(prompt_token_ids=[5] * 5000)
    assert len(admission.prompt_token_ids(long_one, -1)) == 999
    chat = GenerationRequest(messages=[{"role": "user", "content": "Hello"}])
    assert admission.prompt_token_ids(chat, 3) == admission.prompt_token_ids(chat)[-3:]


def test_a_chat_that_must_not_call_tools_has_them_in_its_prompt_as_with_vllm(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", source_of("hermes"))
    admission = Admission(FACTS, Tokenizer(model), [])
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
    allowed, forbidden = (GenerationRequest(**fields, tool_choice=choice) for choice in ("auto", "none"))
    assert admission.prompt_token_ids(forbidden) == admission.prompt_token_ids(allowed)


def test_tools_that_must_fit_are_refused_where_outputs_are_plain_text(admission: Admission) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for fields in ({"tools": [strict]}, {"tools": [WEATHER], "tool_choice": "required"}):
        chat = GenerationRequest(messages=[{"role": "user", "content": "Hi"}], **fields)
        with pytest.raises(InvalidRequest, match=r"^tools: strict tools and a required call need a queue"):
            admission.with_form(chat.sampling, chat, [1])
    plain = GenerationRequest(messages=[{"role": "user", "content": "Hi"}], tools=[WEATHER])
    assert admission.with_form(plain.sampling, plain, [1]) is plain.sampling


def test_a_truncation_to_more_than_the_context_is_refused(admission: Admission) -> None:
    with pytest.raises(InvalidRequest, match=r"^truncate_prompt_tokens: is 1000, but the context holds 999 prompt"):
        admission.prompt_token_ids(GenerationRequest(prompt="a"), 1000)


def test_a_finished_checkpoint_without_the_prompts_log_probabilities_computes_its_last_token_again(
    admission: Admission,
) -> None:
    params = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0, n=2)
    known = [[b"a", b"b", b"c"], [b"d", b"e", b"f"]]
    first, second = admission.admit([1, 2, 3], params, drawn_seed=1, outputs=[[4, 5, 6], [7, 8, 9]], logprobs=known)
    assert (first.finish_reason, first.token_ids) == (None, [4, 5])
    assert first.logprobs_between(0, 2) == [b"a", b"b"]
    assert (second.finish_reason, second.token_ids) == ("length", [7, 8, 9])
    assert second.logprobs_between(1, 3) == [b"e", b"f"]
    assert (first.sequence.must_score_prompt, second.sequence.must_score_prompt) == (True, False)


def test_log_probabilities_of_a_token_that_exceed_a_reply_are_refused() -> None:
    largest = MAX_RECORD_BYTES // record_bytes(0) - 1
    admission = Admission(msgspec.structs.replace(FACTS, vocab_size=2 * largest), None, [], max_logprobs=-1)
    admission.admit([1, 2, 3], SamplingParams(logprobs=largest), drawn_seed=1)
    for params in (SamplingParams(logprobs=-1), SamplingParams(prompt_logprobs=-1)):
        with pytest.raises(InvalidRequest, match=f"logprobs.*at most {largest}"):
            admission.admit([1, 2, 3], params, drawn_seed=1)
