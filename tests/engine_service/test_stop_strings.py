"""The automaton against the plain search."""

from __future__ import annotations

import random

from millrace.engine_service.stop_strings import Found, StopStrings

NUM_CASES = 20_000


def plain_search(strings: list[str], pieces: list[str]) -> tuple[int, Found] | None:
    """After which piece the first string is complete, and which of those it is that are complete by then: vLLM's rule."""
    text = ""
    for number, piece in enumerate(pieces):
        text += piece
        ends = [(at + len(string), place) for place, string in enumerate(strings) if (at := text.find(string)) >= 0]
        if ends:
            end, place = min(ends)
            return number, Found(end - len(strings[place]), strings[place])
    return None


def search(strings: list[str], pieces: list[str]) -> tuple[int, Found] | None:
    automaton, text, state = StopStrings(strings), "", 0
    for number, piece in enumerate(pieces):
        start = len(text)
        text += piece
        found, state = automaton.search(text, start, state)
        if found is not None:
            return number, found
    return None


def test_it_finds_what_a_plain_search_finds_after_the_same_piece() -> None:
    source = random.Random(1)
    for _ in range(NUM_CASES):
        letters = "abc"[: source.randint(1, 3)]
        strings = ["".join(source.choices(letters, k=source.randint(1, 6))) for _ in range(source.randint(1, 8))]
        pieces = ["".join(source.choices("abc", k=source.randint(0, 5))) for _ in range(source.randint(0, 12))]
        assert search(strings, pieces) == plain_search(strings, pieces), (strings, pieces)
