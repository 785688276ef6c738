"""The text of tokens that are not whole characters is the same for every way to read it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.generation import Generation, TextRules
from millrace.engine_service.logprob_records import MAX_BEFORE
from millrace.engine_service.text import Detokenizer, Tokenizer
from millrace.executor.wire.messages import SeqId
from tests.engine_service.core.sequences import GREEDY

BYTES = [bytes([byte]) for byte in b"\xe4\xbd\xa0\xf0\x9f\x91\xa9\xc3\xef\xbf\x80\xff"]
"""Those of 你, 👩 and U+FFFD, and three that are in none of them."""
WORDS = [each.encode() for each in ("a", "b", " a", " ", "你", "\ufffd")]
BORDERS = [b"\xa0\xe4", b"\xbd\xa0\xe4", b"a\xf0", b"\x9f\x91", b"\xff\xbd\xa0"]
"""Tokens of several bytes that begin or end within a character. Only byte-level tokenizers have such."""
MARK, HIDDEN = "<mark>", "<hidden>"
STOPS = ["你", "a\ufffd", "\ufffd\ufffd", "a你", "b a"]


class Vocabulary(NamedTuple):
    tokenizer: Tokenizer
    bytes_by_id: dict[int, bytes]

    def id_of(self, content: bytes) -> int:
        return next(token_id for token_id, each in self.bytes_by_id.items() if each == content)

    def special_id(self, text: str) -> int:
        token_id = self.tokenizer.special_id(text)
        assert token_id is not None
        return token_id

    def text_of(self, token_ids: list[int]) -> str:
        """The text without special tokens. Each of them ends a character."""
        runs = [b""]
        for token_id in token_ids:
            if (content := self.bytes_by_id.get(token_id)) is None:
                runs.append(b"")
            else:
                runs[-1] += content
        return "".join(run.decode(errors="replace") for run in runs)


def byte_chars() -> Iterator[str]:
    """The characters that stand for the bytes in the vocabularies of byte-level tokenizers."""
    unprintable = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    for byte in range(256):
        yield chr(256 + unprintable.index(byte) if byte in unprintable else byte)


def byte_level() -> tuple[Backend, dict[int, bytes]]:
    chars = list(byte_chars())
    assert set(chars) == set(pre_tokenizers.ByteLevel.alphabet())
    contents = [bytes([byte]) for byte in range(256)] + [each for each in WORDS + BORDERS if len(each) > 1]
    backend = Backend(BPE({"".join(chars[byte] for byte in each): place for place, each in enumerate(contents)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wanted = {*BYTES, *WORDS, *BORDERS}
    return backend, {place: each for place, each in enumerate(contents) if each in wanted}


def byte_fallback() -> tuple[Backend, dict[int, bytes]]:
    words = {word.decode().replace(" ", "▁"): 256 + place for place, word in enumerate(WORDS)}
    backend = Backend(BPE({**{f"<0x{byte:02X}>": byte for byte in range(256)}, **words}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    contents = {256 + place: word for place, word in enumerate(WORDS)}
    return backend, {byte[0]: byte for byte in (*BYTES, b"a", b"\n")} | contents


@pytest.fixture(params=[byte_level, byte_fallback], scope="module")
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    backend, bytes_by_id = request.param()
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (MARK, HIDDEN)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)  # type: ignore[no-untyped-call]
    return Vocabulary(Tokenizer(path), bytes_by_id)


class Reading(NamedTuple):
    shown: str
    """The texts of the events."""
    final: str
    marked: str
    """The texts of the events with the marks."""
    num_tokens: int
    stop_reason: int | str | None


def read(
    vocabulary: Vocabulary,
    prompt: list[int],
    token_ids: list[int],
    rules: TextRules,
    cuts: set[int],
    num_saved: int = 0,
    *,
    was_read: bool = False,
) -> Reading:
    """Read the text with an event at each of the cuts. `num_saved`: tokens of an earlier attempt. `was_read`: they have
    been shown."""
    marks = {vocabulary.special_id(MARK): MARK}
    ends = StopRules(max_tokens=1000, min_tokens=0, end_token_ids=frozenset())
    sequence = Sequence(SeqId(1), prompt, GREEDY, ends, output_token_ids=token_ids[:num_saved])
    one = Generation(sequence, rules, vocabulary.tokenizer)
    num_shown = one.num_settled() if was_read else 0
    shown, marked = one.text_between(0, num_shown), one.marked_text_between(0, num_shown, marks)
    for end in sorted(cuts):
        if one.finish_reason is None and len(one.token_ids) < end < len(token_ids):
            one.token_ids.extend(token_ids[len(one.token_ids) : end])
            if one.advance(None) is None and (num_settled := one.num_settled()) > num_shown:
                shown += one.text_between(num_shown, num_settled)
                marked += one.marked_text_between(num_shown, num_settled, marks)
                num_shown = num_settled
    if one.finish_reason is None:
        one.token_ids.extend(token_ids[len(one.token_ids) :])
        one.advance("length")
    marked += one.marked_final_text_after(num_shown, marks)
    shown += one.final_text_after(num_shown)
    return Reading(shown, one.final_text(), marked, len(one.token_ids), one.stop_reason)


@settings(max_examples=250)
@given(data=st.data())
def test_the_texts_of_tokens_are_the_text(vocabulary: Vocabulary, data: st.DataObject) -> None:
    """Also of tokens that hold a part of a character beside other text."""
    text = data.draw(st.text(st.sampled_from("你👩ab"), min_size=1, max_size=8)).encode()
    token_ids: list[int] = []
    while text:
        fitting = [each for each, content in vocabulary.bytes_by_id.items() if content and text.startswith(content)]
        token_ids.append(data.draw(st.sampled_from(fitting)))
        text = text[len(vocabulary.bytes_by_id[token_ids[-1]]) :]
    tokenizer = vocabulary.tokenizer
    texts = [
        tokenizer.texts_of([each], token_ids[max(0, at - MAX_BEFORE) : at])[0] for at, each in enumerate(token_ids)
    ]
    assert "".join(texts) == vocabulary.text_of(token_ids)


def test_tokens_without_a_text_do_not_pile_up(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids behind the vocabulary have none."""
    tokenizer, longest = vocabulary.tokenizer, 0
    decode = tokenizer.decode

    def measured(token_ids: list[int], *, skip_special_tokens: bool) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", measured)
    detokenizer = Detokenizer(tokenizer, [vocabulary.id_of(b"a")], skip_special_tokens=True)
    for token_id in [vocabulary.id_of(b"b"), *[10**6] * 100, vocabulary.id_of(b" a"), vocabulary.id_of(b"b")]:
        detokenizer.feed(token_id)
    assert detokenizer.flush() == "b ab"
    assert longest < 20


@settings(max_examples=250)
@given(data=st.data())
def test_a_text_depends_on_the_tokens_alone(vocabulary: Vocabulary, data: st.DataObject) -> None:
    special = [vocabulary.special_id(MARK), vocabulary.special_id(HIDDEN)]
    characters = [[vocabulary.id_of(bytes([byte])) for byte in char.encode()] for char in "你👩\ufffd"]
    piece = st.sampled_from([*([each] for each in [*vocabulary.bytes_by_id, *special]), *characters])
    token_ids = list(chain(*data.draw(st.lists(piece, min_size=1, max_size=12))))
    letter, byte = vocabulary.id_of(b"a"), vocabulary.id_of(b"\xe4")
    prompt = data.draw(st.sampled_from([[letter], [letter, byte], special]))
    stop = tuple(data.draw(st.lists(st.sampled_from(STOPS), max_size=2)))
    skips, includes_stop = data.draw(st.booleans()), data.draw(st.booleans())
    rules = TextRules(stop=stop, include_stop=includes_stop, skip_special_tokens=skips)

    first = read(vocabulary, prompt, token_ids, rules, set())
    assert first.shown == first.final == (first.marked.replace(MARK, "") if skips else first.marked)
    if skips and not stop and prompt != special:  # some decoders strip the first space of a text
        assert first.final == vocabulary.text_of(token_ids)
    some = data.draw(st.sets(st.integers(1, len(token_ids)), max_size=3))
    for cuts in (some, set(range(1, len(token_ids)))):
        assert read(vocabulary, prompt, token_ids, rules, cuts) == first
    num_saved = data.draw(st.integers(0, first.num_tokens - 1))
    for cuts, was_read in ((set[int](), False), (some, False), (some, True)):
        assert read(vocabulary, prompt, token_ids, rules, cuts, num_saved, was_read=was_read) == first


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ([b"\xe4", b"\xbd", b"\xa0", b"\xe4", b"\xbd"], "你\ufffd"),
        ([b"\xe4", b"\xbd", b"\xa0", b"\xff", b"\xe4", b"\xbd", b"\xa0"], "你\ufffd你"),
        ([b"\xe4", b"\xe4", b"\xbd", b"\xa0", b"\xbd", b"a"], "\ufffd你\ufffda"),
        ([b"\xef", b"\xbf", b"\xbd"] * 9 + [b"\xe4"], "\ufffd" * 10),
    ],
)
def test_invalid_bytes_leave_the_characters_beside_them(
    vocabulary: Vocabulary, contents: list[bytes], text: str
) -> None:
    token_ids = [vocabulary.id_of(each) for each in contents]
    prompt = [vocabulary.id_of(b"a")]
    assert vocabulary.tokenizer.decode_output(prompt, token_ids, skip_special_tokens=True) == text


def test_a_mark_behind_an_incomplete_character_stays_there(vocabulary: Vocabulary) -> None:
    token_ids = [vocabulary.id_of(b"a"), vocabulary.id_of(b"\xe4"), vocabulary.special_id(MARK), vocabulary.id_of(b"b")]
    for cuts in (set[int](), {1, 2, 3}):
        reading = read(vocabulary, token_ids[:1], token_ids, TextRules(), cuts)
        assert (reading.final, reading.marked) == ("a\ufffdb", f"a\ufffd{MARK}b")


def test_a_long_run_of_invalid_bytes_is_not_decoded_again_with_each_token(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Detokenizer(vocabulary.tokenizer, [vocabulary.id_of(b"a")], skip_special_tokens=True)
    num_decoded = 0
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(self, token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    for _ in range(1000):
        text.feed(vocabulary.id_of(b"\xe4"))
    assert text.flush() == "\ufffd" * 1000
    assert len(text.text) > 990
    assert num_decoded < 10_000
