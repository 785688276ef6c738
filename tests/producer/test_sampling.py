from __future__ import annotations

import math
from typing import Any

import pytest

from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams, StructuredOutputsParams
from millrace.results.errors import shown


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (16, 1.0, 1.0, 0, 0.0)
    assert (params.stop, params.stop_strings, params.stop_token_ids, params.seed) == (None, [], [], None)
    assert params.detokenize
    assert params.skip_special_tokens
    assert not params.ignore_eos
    assert not params.is_greedy


def test_an_unknown_name_is_refused_with_the_one_that_could_be_meant() -> None:
    """Like by `submit`."""
    wrong: dict[str, Any] = {"max_token": 1}
    with pytest.raises(
        InvalidRequest, match=r"^max_token: is not an argument of SamplingParams; did you mean max_tokens\?$"
    ):
        SamplingParams(**wrong)
    wrong = {"max_tokens": 4, "best_of": 1}
    with pytest.raises(InvalidRequest, match=r"^best_of: is not an argument of SamplingParams; leave it out$"):
        SamplingParams(**wrong)
    wrong = {"promt": "x"}
    with pytest.raises(
        InvalidRequest, match=r"^promt: is not an argument of GenerationRequest; did you mean prompt\?$"
    ):
        GenerationRequest(**wrong)
    wrong = {"prompt": "x", "temperature": 0.5}
    with pytest.raises(InvalidRequest, match=r"; did you mean sampling=SamplingParams\(temperature=\.\.\.\)\?$"):
        GenerationRequest(**wrong)
    wrong = {"jason": {}}
    with pytest.raises(InvalidRequest, match=r"^jason: is not an argument of StructuredOutputs; did you mean json\?$"):
        StructuredOutputsParams(**wrong)


def test_one_stop_string_becomes_a_list() -> None:
    assert SamplingParams(stop="end").stop_strings == ["end"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]
    assert SamplingParams(stop=[]) == SamplingParams()


def test_what_means_the_default_becomes_the_default() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop_token_ids=None).stop_token_ids == []  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[5, 3, 5]).stop_token_ids == [5, 3]


def test_too_many_or_too_long_stop_strings_are_refused_with_their_count_and_the_limit() -> None:
    SamplingParams(stop=["a" * 32] * 128)
    with pytest.raises(InvalidRequest, match=r"^stop: has 100000 strings, at most 128 are taken$"):
        SamplingParams(stop=["a"] * 100_000)
    with pytest.raises(InvalidRequest, match=r"^stop: must be a string or a list of strings, got \{\}$"):
        SamplingParams(stop={})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^stop: has 4097 characters, at most 4096 are taken$"):
        SamplingParams(stop=["a" * 4096, "b"])


def test_a_tiny_temperature_is_raised_and_zero_is_greedy(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "raised" in caplog.text
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).temperature == 0.01, "as with vLLM"


def test_the_edges_of_every_range_are_taken() -> None:
    for fields in (
        {"max_tokens": None},
        {"max_tokens": 1},
        {"max_tokens": 2**31 - 1},
        {"min_tokens": 16},
        {"temperature": 2},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"n": 64},
        {"n": 2, "temperature": 1e-5},
        {"n": 1, "temperature": 0},
        {"n": 1, "logprobs": None, "prompt_logprobs": -1, "presence_penalty": 0, "repetition_penalty": 1},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e-9},
        {"repetition_penalty": 1e9},
        {"logit_bias": dict.fromkeys(range(1024), 100000000.0)},
        {"logit_bias": {"0": -1e8, str(2**31 - 1): 0}},
        {"allowed_token_ids": list(range(1024))},
        {"bad_words": ["a" * 32] * 128},
        {"thinking_token_budget": 0},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 1},
    ):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 2**31, 2**63, 10**4000, 1.0, "5", True, math.nan)],
        *[("min_tokens", value) for value in (-1, 17, 1.5)],
        *[("temperature", value) for value in (-0.1, 2.01, math.nan, math.inf, 10**400, -(10**400), "hot", True)],
        *[("top_p", value) for value in (0, 1.01, -1, math.nan)],
        *[("top_k", value) for value in (-2, 1.0, 2**40)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 1.5, True, "5", 2**31, [1])],
        *[("n", value) for value in (0, -1, 65, 2**31, 1.0, "2", True)],
        *[("presence_penalty", value) for value in (-2.01, 2.01, math.nan, "1", True)],
        *[("frequency_penalty", value) for value in (-2.01, 2.01, math.inf)],
        *[("repetition_penalty", value) for value in (0, -1, 1e-300, 1e300, math.inf, math.nan, 10**400)],
        *[("logit_bias", value) for value in ([1], "5", {"x": 1}, {"05": 1}, {"-1": 1}, {-1: 1}, {2**31: 1}, {1.0: 1})],
        *[
            ("logit_bias", value)
            for value in ({10**5000: 1}, {True: 1}, {5: "1"}, {5: None}, {5: math.nan}, {5: 1.1e8})
        ],
        *[("logit_bias", value) for value in ({5: 1, "5": 2}, dict.fromkeys(range(1025), 1.0))],
        *[("allowed_token_ids", value) for value in ([], [-1], [2**31], ["1"], [True], (1,), list(range(1025)))],
        *[
            ("bad_words", value)
            for value in ([""], [" "], ["a", "\t"], "a", [1], ["\ud800"], ["a"] * 129, ["a" * 4097])
        ],
        *[("thinking_token_budget", value) for value in (-2, 1.0, "1", True, 2**31)],
        *[("truncate_prompt_tokens", value) for value in (0, -2, 1.0, "1", True, 2**31)],
        *[("include_stop_str_in_output", value) for value in (1, "yes")],
        *[("spaces_between_special_tokens", value) for value in (0, 1)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, "1", 1.0)],
        *[("stop", value) for value in ("", [""], [1], 5, ["a", None], ["\ud800"])],
        *[("stop_token_ids", value) for value in ([-1], [2**31], ["1"], [True], (1,), "1")],
        *[(name, "yes") for name in ("ignore_eos", "detokenize", "skip_special_tokens")],
    ],
    ids=lambda value: shown(value)[:40],
)
def test_a_value_out_of_its_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 250


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: .* more than max_tokens"):
        SamplingParams(min_tokens=20)
    with pytest.raises(InvalidRequest, match=r"stop: .*detokenize"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20


def test_values_with_one_meaning_have_one_form() -> None:
    assert SamplingParams(logit_bias={7: 1, "3": 2.5}).logit_bias == {"7": 1.0, "3": 2.5}
    assert SamplingParams(allowed_token_ids=[3, 1, 3]).allowed_token_ids == [3, 1]
    assert SamplingParams(bad_words=["a", "b", "a"]).bad_words == ["a", "b"]
    nothing = SamplingParams(logit_bias={}, bad_words=[], thinking_token_budget=-1)
    assert nothing == SamplingParams()


@pytest.mark.parametrize("temperature", [0, 0.0])
def test_several_texts_of_greedy_sampling_are_refused_by_the_name_of_n(temperature: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^n: is 2, but at temperature 0 all texts are the same; raise the temp"):
        SamplingParams(n=2, temperature=temperature)


def test_a_field_that_is_set_is_checked_like_one_that_is_given() -> None:
    params = SamplingParams(temperature=0)
    params.max_tokens, params.stop = 20, "end"
    assert params == SamplingParams(temperature=0, max_tokens=20, stop=["end"])
    with pytest.raises(InvalidRequest, match=r"^max_tokens: must be an integer from 1 to .*, got 0$"):
        params.max_tokens = 0
    with pytest.raises(InvalidRequest, match=r"^min_tokens: is 30, more than max_tokens, 20$"):
        params.min_tokens = 30
    assert params == SamplingParams(temperature=0, max_tokens=20, stop=["end"])
    assert GenerationRequest(prompt="a").sampling == SamplingParams()
