"""The keyword arguments of `submit`."""

from __future__ import annotations

import pytest

from millrace.producer.errors import InvalidRequest
from millrace.producer.options import SubmitOptions, build_request
from millrace.producer.request import GenerationRequest
from millrace.producer.sampling import SamplingParams

REQUEST = set(GenerationRequest.__struct_fields__)
SAMPLING = set(SamplingParams.__struct_fields__)


def test_editors_know_every_field_that_works() -> None:
    assert set(SubmitOptions.__annotations__) == (REQUEST - {"id", "prompt"}) | {"job_id", "response_model"} | SAMPLING


def test_options_make_the_request_that_their_fields_would() -> None:
    made = build_request("x", {"job_id": "a", "tenant": "t", "deadline_s": 5, "temperature": 0.5, "stop": "."})
    sampling = SamplingParams(temperature=0.5, stop=".")
    assert made == GenerationRequest(prompt="x", id="a", tenant="t", deadline_s=5, sampling=sampling)
    assert build_request("x", {"sampling": sampling}).sampling == sampling
    assert build_request("x", {"tool_choice": None}) == GenerationRequest(prompt="x", tool_choice=None)
    assert build_request(None, {"prompt_token_ids": [1]}) == GenerationRequest(prompt_token_ids=[1])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"promt": "x"}, "promt"),
        ({"id": "a"}, "id"),
        ({"sampling": SamplingParams(), "top_k": 1}, "top_k"),
        ({"temperature": 3.0}, "temperature"),
        ({"n": 65}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
    ],
)
def test_what_is_not_an_option_is_named(options: SubmitOptions, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request("x", options)
    assert caught.value.field == field
