"""Search a growing text for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """Where in the text a stop string begins, and which one it is."""

    begin: int
    string: str


def find_stop(strings: Sequence[str], text: str, start: int) -> Found | None:
    """Return the string that is complete first behind position `start`; None: none is. Of several that end at the same
    place it is the first one of the list, as with vLLM. No string is empty."""
    found, first_end = None, len(text) + 1
    for string in strings:
        # One that is complete before `start` is not found. To search for each from its own place limits the cost: together
        # they read as many old characters as they have.
        begin = text.find(string, max(0, start + 1 - len(string)))
        if begin >= 0 and begin + len(string) < first_end:
            found, first_end = Found(begin, string), begin + len(string)
    return found
