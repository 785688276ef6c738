"""The text of a generation up to what ends it, and between special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from millrace.engine_service.core.sequence import Sequence, StopReason, StopRules
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.text import Tokenizer
from millrace.executor.wire.messages import RowSampling, SeqId

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_model"
GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])


def generation(tokenizer: Tokenizer, rules: TextRules) -> Generation:
    sequence = Sequence(SeqId(1), [1], GREEDY, StopRules(max_tokens=99, min_tokens=0, end_token_ids=frozenset()))
    return Generation(sequence, rules, tokenizer)


def run(one: Generation, token_ids: list[int], reason: StopReason | None) -> tuple[str, str]:
    """Feed the tokens one by one, the last one with this reason. Return the events' texts joined, and the final text."""
    shown, num_shown = "", 0
    for number, token_id in enumerate(token_ids, 1):
        one.token_ids.append(token_id)
        if one.advance(reason if number == len(token_ids) else None) is not None:
            break
        num_settled = one.num_settled()
        shown += one.text_between(num_shown, num_settled)
        num_shown = num_settled
    return shown + one.final_text_after(num_shown), one.final_text()


@pytest.mark.parametrize(("include_stop", "text"), [(False, "one "), (True, "one two")])
def test_a_stop_string_is_kept_where_that_was_requested(include_stop: bool, text: str) -> None:
    tokenizer = Tokenizer(TINY)
    one = generation(tokenizer, TextRules(stop=("two", "wo t"), include_stop=include_stop))
    token_ids = tokenizer.encode("one two three", add_special_tokens=False)
    assert run(one, token_ids, "length") == (text, text)
    assert (one.finish_reason, one.stop_reason) == ("stop", "two")


def test_a_text_that_keeps_its_stop_string_is_shown_without_delay() -> None:
    tokenizer = Tokenizer(TINY)
    one = generation(tokenizer, TextRules(stop=("x" * 50,), include_stop=True))
    one.token_ids.extend(tokenizer.encode("one two three", add_special_tokens=False))
    assert one.advance(None) is None
    assert one.text_between(0, one.num_settled()) == "one two three"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("include_stop", [False, True])
def test_the_text_of_a_stop_token_is_kept_where_that_was_requested(include_stop: bool, streams: bool) -> None:
    tokenizer = Tokenizer(TINY)
    token_ids = tokenizer.encode("one two", add_special_tokens=False)
    last = tokenizer.decode(token_ids[-1:], skip_special_tokens=True)
    one = generation(tokenizer, TextRules(stop=("never",) if streams else (), include_stop=include_stop))
    text = "one two" if include_stop else "one two".removesuffix(last)
    assert run(one, token_ids, "stop") == (text, text)


@pytest.fixture
def spaced(tmp_path: Path) -> Tokenizer:
    """A tokenizer that puts a space between all tokens: a, b, and the special ones <x> and <y>."""
    backend = Backend(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    wrapped.add_special_tokens({"additional_special_tokens": ["<x>", "<y>"]})
    wrapped.save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"skip_special_tokens": False}, "a <x> <y> <x> b <y>"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "a <x><y><x> b <y>"),
        ({"spaces_between_special_tokens": False}, "a b"),
    ],
)
def test_spaces_between_special_tokens(
    spaced: Tokenizer, fields: dict[str, Any], text: str, stop: tuple[str, ...]
) -> None:
    one = generation(spaced, TextRules(stop=stop, **fields))
    shown, final = run(one, [0, 3, 4, 3, 1, 4], "length")
    assert final.strip() == shown.strip() == text
