"""A prompt that can't fit is refused by a bound, so the bound must never be above the truth."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from millrace.engine_service.token_bound import TokenBound

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_model" / "tokenizer.json"
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def tiny(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(TINY))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def falling_back() -> Tokenizer:
    """As those of Llama 2 and Gemma: words with a sign for the space, and bytes for what is unknown."""
    vocabulary = {**BYTES, "<unk>": 256, "▁": 257, "a": 258, "▁a": 259, "aa": 260, "▁aaa": 261}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, [("▁", "a"), ("a", "a"), ("▁a", "aa")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = {
    "byte level": tiny(),
    "composing": tiny(normalizers.NFC()),
    "composing by form": tiny(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "falling back on bytes": falling_back(),
}


def unbounded() -> dict[str, Tokenizer]:
    stripping, cleaning, splitting, swallowing = tiny(normalizers.Strip()), tiny(), tiny(), tiny()
    cleaning.normalizer = normalizers.Replace("aa", "")
    splitting.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    swallowing.add_special_tokens([AddedToken("<|wide|>", lstrip=True)])
    unknown = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    dropping = Tokenizer(models.BPE({"a": 0}, []))
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    return {
        "stripping": stripping,
        "cleaning": cleaning,
        "splitting": splitting,
        "swallowing": swallowing,
        "unknown": unknown,
        "dropping": dropping,
        "pieces": pieces,
    }


UNBOUNDED = unbounded()
TEXTS = st.text(st.one_of(st.characters(), st.sampled_from("aaa  ...\u0301\u0308\u0345ཱ가ᄀ")), max_size=60)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_bound(name: str, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    num_tokens = len(BOUNDED[name].encode(text).ids)
    assert TokenBound(BOUNDED[name]).min_num_tokens(text) <= num_tokens


def test_a_long_text_has_a_bound_that_is_worth_something() -> None:
    assert TokenBound(tiny()).min_num_tokens("a" * 1_000_000) == 1_000_000 // 13 + 1
    assert TokenBound(tiny(normalizers.NFC())).min_num_tokens("ä" * 1_000_000) == 1_000_000 // (4 * 13) + 1


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_may_shorten_a_text_has_no_bound(name: str) -> None:
    assert TokenBound(UNBOUNDED[name]).min_num_tokens("a" * 1_000_000) == 0


def test_no_character_is_composed_of_more_than_four() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000)) == 4
