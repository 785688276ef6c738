"""The search of a growing text against one of the whole text."""

from __future__ import annotations

import random

from millrace.engine_service.stop_strings import Found, find_stop

NUM_CASES = 20_000


def plain_search(strings: list[str], pieces: list[str], min_pieces: int) -> Found | None:
    """Which string is complete first behind `min_pieces` pieces: vLLM's rule."""
    text, first = "".join(pieces), len("".join(pieces[:min_pieces]))
    for end in range(first + 1, len(text) + 1):
        for string in strings:
            if text.endswith(string, 0, end):
                return Found(end - len(string), string)
    return None


def search(strings: list[str], pieces: list[str], min_pieces: int) -> Found | None:
    text = ""
    for number, piece in enumerate(pieces):
        start = len(text)
        text += piece
        found = find_stop(strings, text, start)
        if found is not None and number >= min_pieces:
            return found
    return None


def test_it_finds_what_a_search_of_the_whole_text_finds() -> None:
    source = random.Random(1)
    for _ in range(NUM_CASES):
        letters = "abc"[: source.randint(1, 3)]
        strings = ["".join(source.choices(letters, k=source.randint(1, 6))) for _ in range(source.randint(1, 8))]
        pieces = ["".join(source.choices("abc", k=source.randint(0, 5))) for _ in range(source.randint(0, 12))]
        case = strings, pieces, source.choice([0, 0, 1, 5])
        assert search(*case) == plain_search(*case), case
