"""Which grammars the workers have compiled, as far as the engine knows."""

from __future__ import annotations

from collections import OrderedDict

_MAX_KNOWN = 128
"""Half of what a worker keeps, since workers may use grammars in another order."""


class AnnouncedGrammars:
    """Owns the numbers of the grammars that the workers compile. They do it in the order of the numbers, which are never
    reused."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """By grammar, the one used last at the end."""
        self._unsent: list[tuple[int, str]] = []
        self._last_number = 0
        self.last_compiled = 0

    def number(self, grammar: str) -> int:
        """Return the number of a grammar. One that is not known gets a new one, and is announced with the next `take`."""
        if grammar not in self._numbers:
            self._last_number += 1
            self._numbers[grammar] = self._last_number
            self._unsent.append((self._last_number, grammar))
            if len(self._numbers) > _MAX_KNOWN:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(grammar)
        return self._numbers[grammar]

    def take(self) -> list[tuple[int, str]]:
        """Return the grammars that are to be announced, with their numbers."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def forget(self) -> None:
        """Begin with workers that have compiled nothing."""
        self._numbers.clear()
        self._unsent.clear()
        self.last_compiled = self._last_number
