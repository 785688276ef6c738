"""What the workers of an executor have released to sleep."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.executor.rank.worker import WAKE_TAGS


class SleepState:
    """Owns which of `WAKE_TAGS` the workers have released, and whether the weights have to be read from disk again."""

    new_weights: str | None = None
    """The directory of other weights that are read then; None: those of before."""

    def __init__(self) -> None:
        self._released: set[str] = set()
        self._is_on_disk = False

    @property
    def is_asleep(self) -> bool:
        return bool(self._released)

    def released(self, tags: Iterable[str] | None) -> list[str]:
        """Return those of `tags`, or of all tags, that are released. Raises ValueError for unknown tags."""
        wanted = list(WAKE_TAGS if tags is None else tags)
        if unknown := set(wanted) - set(WAKE_TAGS):
            raise ValueError(f"tags: must be of {', '.join(WAKE_TAGS)}, got {', '.join(sorted(unknown))}")
        return [tag for tag in wanted if tag in self._released]

    def is_reading(self, tags: list[str]) -> bool:
        """Whether waking with these tags reads the weights from disk."""
        return self._is_on_disk and "weights" in tags

    def sleep(self, level: int) -> None:
        self._released.update(WAKE_TAGS)
        self._is_on_disk |= level == 2

    def wake(self, tags: list[str]) -> None:
        self._released.difference_update(tags)
        if "weights" in tags:
            self._is_on_disk, self.new_weights = False, None
