"""Shows the progress of verbs that take long: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from millrace.cli.output import remark

if TYPE_CHECKING:
    from rich.progress import Progress

REPORT_INTERVAL_S = 10.0


class ProgressReport:
    """Shows how many of some things are done. A context."""

    def __init__(self, total: int, what: str, done: str, num_before: int = 0, *, is_shown: bool | None = None) -> None:
        """what, done: such as "jobs" and "ended". `is_shown`: whether there is a bar, see `progress_bar`."""
        self._total, self._what, self._done, self._num_before = total, what, done, num_before
        self._began_s = self._reported_s = time.monotonic()
        self._bar = progress_bar(is_shown=is_shown)
        self._task = self._bar.add_task(done, total=total, completed=num_before)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, num_done: int) -> None:
        from millrace.results.waiting import duration

        self._bar.update(self._task, completed=num_done)
        now_s = time.monotonic()
        if now_s >= self._reported_s + REPORT_INTERVAL_S and not sys.stderr.isatty():
            self._reported_s = now_s
            rate = (num_done - self._num_before) / (now_s - self._began_s)
            left = duration((self._total - num_done) / rate) if rate else "unknown"
            remark(
                f"{num_done:,} of {self._total:,} {self._what} {self._done}, {rate:,.2f} {self._what}/s, time left: {left}"
            )


def progress_bar(*, is_shown: bool | None = None) -> Progress:
    """Return a progress bar on stderr. By default it is shown on a terminal, but not if stdout is one too, where printed
    lines show the progress."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    def rate(task: Task) -> float:
        # rich's own takes the time since the first advance: far too much where many end together
        before = task.fields.setdefault("completed_before", task.completed)
        return (task.completed - before) / task.elapsed if task.elapsed else 0.0

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{rate(task):,.1f}/s")

    class TimeLeftColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            left = "-:--:--"
            if task.remaining is not None and (per_s := rate(task)):
                left = str(timedelta(seconds=round(task.remaining / per_s)))
            return Text(f"left: {left}")

    console = Console(stderr=True)
    if is_shown is None:
        is_shown = console.is_terminal and not sys.stdout.isatty()
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn()),
        *(TimeElapsedColumn(), TimeLeftColumn()),
    )
    return Progress(*columns, console=console, disable=not is_shown, redirect_stdout=False)
