from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.text import Detokenizer, Tokenizer
from millrace.executor.wire.messages import SeqId
from tests.engine_service.core.sequences import GREEDY

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_model"
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def generation(
    tokenizer: Tokenizer,
    *,
    stop: tuple[str, ...] = (),
    max_tokens: int = 1000,
    min_tokens: int = 0,
    output: list[int] | None = None,
) -> Generation:
    rules = StopRules(max_tokens=max_tokens, min_tokens=min_tokens, end_token_ids=frozenset())
    sequence = Sequence(SeqId(1), tokenizer.encode("Say:"), GREEDY, rules, output_token_ids=output)
    return Generation(sequence, TextRules(stop=stop), tokenizer)


def feed(one: Generation, token_ids: list[int]) -> str | None:
    """As the engine does it: token by token until something ends it."""
    for token_id in token_ids:
        reason = one.advance(one.sequence.append(token_id))
        if reason is not None:
            return reason
    return None


def published_in_pieces(one: Generation, token_ids: list[int]) -> list[str]:
    pieces, published = [], 0
    for token_id in token_ids:
        if one.advance(one.sequence.append(token_id)) is not None:
            break
        settled = one.num_settled()
        pieces.append(one.text_between(published, settled))
        published = settled
    return [*pieces, one.final_text_after(published)]


def added_text(tokenizer: Tokenizer, token_id: int, before: list[int]) -> str:
    """What a token adds after a letter and the fewest of the tokens before it with which its last character is complete."""
    letter = tokenizer.encode("a")[-1:]
    for count in range(len(before) + 1):
        ids = letter + before[len(before) - count :]
        start = tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd")
        added = tokenizer.decode([*ids, token_id], skip_special_tokens=False).removeprefix(start)
        if not added.endswith("\ufffd"):
            return added
    return ""


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from("aé数👩 "), max_size=4),
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
)
def test_the_texts_of_alternatives_complete_what_is_before_them(
    tokenizer: Tokenizer, text: str, more: list[int], alternatives: list[int]
) -> None:
    ids = tokenizer.encode(text + "数👩", add_special_tokens=False)
    for before in ((ids + more)[-4:], ids[-3:-1], ids[-4:-1]):
        expected = [added_text(tokenizer, each, before) for each in [*alternatives, ids[-1]]]
        assert tokenizer.texts_of([*alternatives, ids[-1]], before) == expected


def test_the_tokens_before_all_alternatives_are_decoded_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    *start, last = tokenizer.encode("数", add_special_tokens=False)
    tokenizer.texts_of([*start, last], [])
    decoded: list[list[int]] = []
    decode = tokenizer.decode

    def counting(ids: list[int], *, skip_special_tokens: bool) -> str:
        decoded.append(ids)
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    tokenizer.texts_of([last] * 20, tokenizer.encode("abcd", add_special_tokens=False))
    assert len(decoded) == 1
    assert tokenizer.texts_of([last] * 20, start) == ["数"] * 20
    assert sum(ids[-1] != last for ids in decoded) == 1 + len(start)


@pytest.mark.parametrize("text", ["plain", "grün und weiß", "数据流", "👩‍🔬 and 🇪🇺", "mixed ✓ κόσμε\n\ttab"])
def test_a_text_comes_back_whole_from_its_pieces(tokenizer: Tokenizer, text: str) -> None:
    pieces = published_in_pieces(generation(tokenizer), tokenizer.encode(text))
    assert "".join(pieces) == text


def test_special_tokens_that_are_skipped_do_not_slow_the_next_ones_down(tokenizer: Tokenizer) -> None:
    text = Detokenizer(tokenizer, [], skip_special_tokens=True)
    special = min(tokenizer.special_token_ids)
    for token_id in [*tokenizer.encode("grü"), *[special] * 1000, *tokenizer.encode("n")]:
        text.feed(token_id)
    assert text.text == text.flush() == "grün"
    assert len(text._context + text._pending) < 20


def test_no_piece_ever_shows_half_a_character(tokenizer: Tokenizer) -> None:
    pieces = published_in_pieces(generation(tokenizer), tokenizer.encode("a👩‍🔬b数c"))
    assert all("�" not in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(token_ids=st.lists(st.integers(5, VOCAB_SIZE - 1), min_size=1, max_size=40))
def test_any_tokens_give_the_same_text_in_pieces_and_at_once(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    whole = generation(tokenizer)
    feed(whole, token_ids)
    assert "".join(published_in_pieces(generation(tokenizer), token_ids)) == whole.final_text()


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(5, VOCAB_SIZE - 1), min_size=2, max_size=40), data=st.data())
def test_a_resumed_text_stands_where_the_first_one_stood(
    tokenizer: Tokenizer, token_ids: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(token_ids) - 1))
    first = Detokenizer(tokenizer, [7, 8], skip_special_tokens=True)
    for token_id in token_ids:
        first.feed(token_id)
    second = Detokenizer(tokenizer, [7, 8], skip_special_tokens=True)
    for token_id in token_ids[:cut]:
        second.feed(token_id)
    assert second.ends == first.ends[:cut]
    assert first.text.startswith(second.text)


def test_a_stop_string_over_token_borders_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    one = generation(tokenizer, stop=("END",))
    assert feed(one, tokenizer.encode("one two END three")) == "stop"
    assert one.final_text() == "one two "


def test_what_could_become_a_stop_string_is_held_back_until_it_can_not(tokenizer: Tokenizer) -> None:
    one = generation(tokenizer, stop=("<stop>",))
    feed(one, tokenizer.encode("abc<sto"))
    assert one.text_between(0, one.num_settled()) in ("ab", "a", "")
    feed(one, tokenizer.encode("nes and more text"))
    assert "<stones" in one.text_between(0, one.num_settled())


@pytest.mark.parametrize(
    ("stops", "text", "stop_string"),
    [
        (("text", "long", "ong"), "a ", "long"),
        (("text", "ong", "long"), "a l", "ong"),
        (("long text", "on"), "a l", "on"),
    ],
)
def test_the_stop_string_counts_that_is_complete_first_and_of_equals_the_first_one(
    tokenizer: Tokenizer, stops: tuple[str, ...], text: str, stop_string: str
) -> None:
    one = generation(tokenizer, stop=stops)
    assert feed(one, tokenizer.encode("a long text")) == "stop"
    assert (one.final_text(), one.stop_reason) == (text, stop_string)


def plain_search(
    tokenizer: Tokenizer, token_ids: list[int], stops: list[str], min_tokens: int
) -> tuple[int, str] | None:
    """How many tokens there are when a stop string is complete, and the text before it: vLLM's rule."""
    text = Detokenizer(tokenizer, tokenizer.encode("Say:"), skip_special_tokens=True)
    for token_id in token_ids:
        start = len(text.text)
        text.feed(token_id)
        if len(text.ends) <= min_tokens:
            continue
        found = []
        for place, stop in enumerate(stops):
            if (at := text.text.find(stop, max(0, start + 1 - len(stop)))) >= 0:
                found.append((at + len(stop), place))
        if found:
            end, place = min(found)
            return len(text.ends), text.text[: end - len(stops[place])]
    return None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abX ü", min_size=1, max_size=40),
    stops=st.lists(st.text("abX ü", min_size=1, max_size=5), min_size=1, max_size=6),
    min_tokens=st.integers(0, 10),
    data=st.data(),
)
def test_stop_strings_end_a_text_where_a_plain_search_finds_them(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    token_ids = tokenizer.encode(text)
    expected = plain_search(tokenizer, token_ids, stops, min_tokens)
    one = generation(tokenizer, stop=tuple(stops), min_tokens=min_tokens)
    assert "".join(published_in_pieces(one, token_ids)) == (text if expected is None else expected[1])
    assert (len(one.token_ids), one.finish_reason) == (
        (len(token_ids), None) if expected is None else (expected[0], "stop")
    )
    num_saved = data.draw(st.integers(0, len(one.token_ids)))
    resumed = generation(tokenizer, stop=tuple(stops), min_tokens=min_tokens, output=token_ids[:num_saved])
    if resumed.finish_reason is None:
        feed(resumed, token_ids[num_saved:])
    assert (resumed.final_text(), resumed.token_ids) == (one.final_text(), one.token_ids)


def test_a_stop_string_does_not_count_within_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("x END y END z")
    early = len(tokenizer.encode("x END"))
    for min_tokens, text in ((early - 1, "x "), (early, "x END y ")):
        one = generation(tokenizer, stop=("END",), min_tokens=min_tokens)
        assert feed(one, token_ids) == "stop"
        assert one.final_text() == text


def test_a_stop_string_goes_before_the_limit_reached_with_the_same_token(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one END")
    one = generation(tokenizer, stop=("END",), max_tokens=len(token_ids))
    assert feed(one, token_ids) == "stop"


def test_stop_strings_are_found_again_in_the_tokens_of_an_earlier_attempt(tokenizer: Tokenizer) -> None:
    rules = StopRules(max_tokens=100, min_tokens=0, end_token_ids=frozenset())
    output = tokenizer.encode("one END")
    sequence = Sequence(SeqId(1), [7], GREEDY, rules, output_token_ids=output)
    assert Generation(sequence, TextRules(stop=("END",)), tokenizer).finish_reason == "stop"


def test_the_token_that_ends_a_sequence_is_no_text(tokenizer: Tokenizer) -> None:
    word, end = tokenizer.encode("word"), tokenizer.encode("!")
    rules = StopRules(max_tokens=100, min_tokens=0, end_token_ids=frozenset(end))
    one = Generation(Sequence(SeqId(1), [7], GREEDY, rules), TextRules(), tokenizer)
    assert feed(one, word + end) == "stop"
    assert one.final_text() == "word"
    assert one.token_ids == word + end


def test_the_last_event_and_a_chats_parts_need_one_decoding(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = generation(tokenizer)
    feed(one, tokenizer.encode("some words"))
    decoded: list[list[int]] = []
    decode = Tokenizer.decode_output

    def counted(self: Tokenizer, prompt: list[int], output: list[int], **options: bool) -> str:
        decoded.append(output)
        return decode(self, prompt, output, **options)

    monkeypatch.setattr(Tokenizer, "decode_output", counted)
    assert (
        one.final_text_after(0)
        == one.marked_final_text_after(0, {511: "<|im_end|>"})
        == one.final_text()
        == "some words"
    )
    assert len(decoded) == 1


def test_a_tokenizer_that_panics_when_it_is_loaded_is_named(tmp_path: Path) -> None:
    content = json.loads((TINY / "tokenizer.json").read_bytes())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=r"^tokenizer: .*/tokenizer.json cannot be used \("):
        Tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    remedy = "name a local directory with a tokenizer.json; AutoTokenizer.from_pretrained"
    with pytest.raises(ConfigurationError, match=f"^tokenizer: {tmp_path} has no tokenizer.json; {remedy}"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere", "organization/name", TINY / "tokenizer.json", "x" * 300])
def test_what_is_no_directory_is_named_without_the_hubs_text(name: str | Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        Tokenizer(Path(name))
    assert str(error.value) == f"tokenizer: {name} is not a directory; name a local directory with a tokenizer.json"


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    before = sys.getswitchinterval()
    started, has_run = threading.Event(), threading.Event()
    go = threading.Semaphore(0)

    def run() -> None:
        started.set()
        go.acquire()
        has_run.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    sys.setswitchinterval(60)  # nobody takes the GIL from a thread that does not give it up
    try:
        go.release()
        tokenizer.encode("a" * 1_000_000)
        assert has_run.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()
