"""The output of the demo: a live display on a terminal, otherwise plain lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from millrace.results.counts import QueueStats

_PLAIN_INTERVAL_S = 1.0


class Screen:
    """Owns the live display. `show` updates it; `print_line` prints a line that stays."""

    def __init__(self, num_jobs: int) -> None:
        self._console = Console(markup=False, emoji=False, highlight=False)
        self._num_jobs = num_jobs
        self._live = Live(console=self._console, refresh_per_second=12, transient=True)
        self._shown_s = 0.0
        self._last_line = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def print_line(self, line: str) -> None:
        """Print a line. On a terminal, long lines are wrapped between words."""
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def show(self, counts: QueueStats, tokens_per_s: float, texts: Mapping[str, str]) -> None:
        """Update the display. `texts` are the streamed texts so far, by prompt."""
        if self._console.is_terminal:
            self._live.update(self._picture(counts, tokens_per_s, texts))
        elif time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._shown_s = time.monotonic()
            self._show_line(counts, tokens_per_s, next((text for text in texts.values() if text), ""))

    def _show_line(self, counts: QueueStats, tokens_per_s: float, text: str) -> None:
        line = f"  queued {counts.queued}  running {counts.running}  finished {counts.finished}/{self._num_jobs}"
        line += f"  {tokens_per_s:.0f} tokens/s" if tokens_per_s else ""
        line += f"  ...{text[-48:]!r}" if text else ""
        if line != self._last_line:
            self._last_line = line
            self.print_line(line)

    def _picture(self, counts: QueueStats, tokens_per_s: float, texts: Mapping[str, str]) -> Group:
        bar = ProgressBar(total=self._num_jobs, completed=counts.finished)
        facts = Table.grid(padding=(0, 3))
        facts.add_row("queued", "running", "finished", "tokens/s")
        facts.add_row(
            str(counts.queued), str(counts.running), f"{counts.finished}/{self._num_jobs}", f"{tokens_per_s:.0f}"
        )
        line = Table.grid(expand=True)  # a bar alone does not end its line
        line.add_row(bar)
        return Group(facts, line, *(Panel(Text(text), title=name, title_align="left") for name, text in texts.items()))
