"""The automaton against the plain search."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine_service.stop_strings import StopStrings

STRINGS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=8)
PIECES = st.lists(st.text("abc", max_size=5), max_size=12)


def plain_search(strings: list[str], pieces: list[str]) -> tuple[int, int] | None:
    """After which piece the first string is complete, and where the earliest of those begins that are complete by then."""
    text = ""
    for number, piece in enumerate(pieces):
        text += piece
        found = [position for string in strings if (position := text.find(string)) >= 0]
        if found:
            return number, min(found)
    return None


def search(strings: list[str], pieces: list[str]) -> tuple[int, int] | None:
    automaton, text, state = StopStrings(strings), "", 0
    for number, piece in enumerate(pieces):
        start = len(text)
        text += piece
        found, state = automaton.search(text, start, state)
        if found is not None:
            return number, found
    return None


@settings(max_examples=1000, deadline=None)
@given(STRINGS, PIECES)
def test_it_finds_what_a_plain_search_finds_after_the_same_piece(strings: list[str], pieces: list[str]) -> None:
    assert search(strings, pieces) == plain_search(strings, pieces)
