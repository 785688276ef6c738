"""What a request costs before it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.engine_service.serving.admission import Admission
from millrace.engine_service.text import Tokenizer
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import ModelFacts
from millrace.producer import GenerationRequest, InvalidRequest, SamplingParams

TINY = Path(__file__).resolve().parents[3] / "examples" / "tiny_model"
FACTS = ModelFacts(
    architecture="stub",
    vocab_size=512,
    max_model_len=1000,
    dtype="float32",
    device="cpu",
    attention="reference",
    num_parameters=1,
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
def test_a_prompt_that_can_not_fit_is_refused_without_tokenizing(
    admission: Admission, field: str, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    kwargs: dict[str, Any] = {field: prompt}
    with pytest.raises(
        InvalidRequest, match=rf"^{field}: has at least 769\d\d tokens, and the context of 1000 must hold"
    ):
        admission.prompt_token_ids(GenerationRequest(**kwargs))


def test_a_prompt_that_might_fit_is_judged_by_its_tokens(admission: Admission) -> None:
    assert len(admission.prompt_token_ids(GenerationRequest(prompt="is " * 600))) == 601
    with pytest.raises(InvalidRequest, match=r"^prompt: has 1000 tokens, and the context of 1000 must hold"):
        admission.prompt_token_ids(GenerationRequest(prompt="a" * 1000))


def test_too_many_token_ids_are_refused_before_each_is_looked_at(admission: Admission) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_token_ids: has 100000 tokens"):
        admission.prompt_token_ids(GenerationRequest(prompt_token_ids=[5] * 99_999 + [10**9]))


def test_an_eos_token_outside_the_vocabulary_is_ignored() -> None:
    """The worker would have to mask its logit for `min_tokens`, and there is none."""
    admission = Admission(FACTS, None, [2, 512, -1])
    (generation,) = admission.admit([1], SamplingParams(min_tokens=3), drawn_seed=0)
    assert generation.sequence.sampling.end_token_ids == [2]
