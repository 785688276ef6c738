from __future__ import annotations

import math
from typing import Any

import pytest

from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (16, 1.0, 1.0, 0, 0.0)
    assert (params.stop, params.stop_strings, params.stop_token_ids, params.seed) == (None, [], [], None)
    assert params.detokenize
    assert params.skip_special_tokens
    assert not params.ignore_eos
    assert not params.is_greedy


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
    with pytest.raises(InvalidRequest, match=r"^stop: has 4097 characters, at most 4096 are taken$"):
        SamplingParams(stop=["a" * 4096, "b"])


def test_a_tiny_temperature_is_raised_and_zero_is_greedy(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "raised" in caplog.text
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy


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
    ):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 2**31, 2**63, 10**4000, 1.0, "5", True, math.nan)],
        *[("min_tokens", value) for value in (-1, 17, None, 1.5)],
        *[("temperature", value) for value in (-0.1, 2.01, math.nan, math.inf, 10**400, -(10**400), "hot", None, True)],
        *[("top_p", value) for value in (0, 1.01, -1, math.nan, None)],
        *[("top_k", value) for value in (-2, 1.0, None, 2**40)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 1.5, True, "5", 2**31, [1])],
        *[("n", value) for value in (0, -1, 65, 2**31, 1.0, "2", True, None)],
        *[("repetition_penalty", value) for value in (0, math.inf, math.nan, 10**400)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, "1", 1.0)],
        *[("stop", value) for value in ("", [""], [1], 5, ["a", None], ["\ud800"])],
        *[("stop_token_ids", value) for value in ([-1], [2**31], ["1"], [True], (1,), "1")],
        *[(name, "yes") for name in ("ignore_eos", "detokenize", "skip_special_tokens")],
    ],
    ids=lambda value: repr(value)[:40] if value != 10**4000 else "too large to print",
)
def test_a_value_out_of_its_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("presence_penalty", 0.5, 2.1),
        ("frequency_penalty", -0.5, math.nan),
        ("repetition_penalty", 1.1, 0.0),
        ("include_stop_str_in_output", True, 1),
        ("spaces_between_special_tokens", False, 0),
        ("logit_bias", {"5": 1.0}, [1]),
        ("allowed_token_ids", [1, 2], [-1]),
        ("bad_words", ["x"], [""]),
        ("structured_outputs", {"regex": "a"}, "regex"),
        ("thinking_token_budget", 100, -1),
    ],
)
def test_what_does_not_work_yet_is_checked_and_refused(field: str, value: Any, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: not supported yet; leave it out"):
        SamplingParams(**{field: value})
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as caught:
        SamplingParams(**{field: wrong})
    assert "not supported" not in str(caught.value)


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: .* more than max_tokens"):
        SamplingParams(min_tokens=20)
    with pytest.raises(InvalidRequest, match=r"stop: .*detokenize"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6])
def test_several_texts_of_greedy_sampling_are_refused_by_the_name_of_n(temperature: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^n: is 2, but at temperature 0 all texts are the same"):
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
