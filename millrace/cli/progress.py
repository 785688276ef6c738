"""Shows the progress of verbs that take long: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from millrace.cli.output import print_fields, remark
from millrace.cli.wait_report import resumable

if TYPE_CHECKING:
    from rich.progress import Progress

    from millrace.producer.calls import Report

REPORT_INTERVAL_S = 10.0
_RECENT_S = 60.0
"""A rate is that of this time, or of a longer one if too little was done in it."""
_MIN_COUNT, _MIN_SHARE = 10, 0.01


class ProgressReport:
    """Shows how many of some things are done. A context."""

    def __init__(
        self, total: int | None, what: str, done: str, num_before: int = 0, *, is_shown: bool | None = None
    ) -> None:
        """`total` None: not known yet. what, done: such as "jobs" and "ended". `is_shown`: whether there is a bar, see
        `progress_bar`."""
        self.total = total
        self._what, self._done = what, done
        self._reported_s = time.monotonic()
        self._reports: deque[tuple[float, int]] = deque()
        """When the last ones were made, and what was done then: the rate is that since the first of them."""
        self._bar = progress_bar(is_shown=is_shown)
        self._task = self._bar.add_task(done, total=total, completed=num_before)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, num_done: int) -> None:
        from millrace.results.waiting import duration

        self._bar.update(self._task, completed=num_done, total=self.total)
        now_s = time.monotonic()
        if now_s < self._reported_s + REPORT_INTERVAL_S or sys.stderr.isatty():
            return
        self._reported_s = now_s
        reports = self._reports
        reports.append((now_s, num_done))
        while (
            len(reports) > 1 and reports[1][0] <= now_s - _RECENT_S and _is_basis(num_done - reports[1][1], self.total)
        ):
            reports.popleft()
        began_s, num_before = reports[0]
        text = f"{num_done:,}{f' of {self.total:,}' if self.total else ''} {self._what} {self._done}"
        if _is_basis(num_done - num_before, self.total):
            rate = (num_done - num_before) / (now_s - began_s)
            text += f", {rate:,.2f} {self._what}/s"
            if self.total:
                text += f", time left: {duration((self.total - num_done) / rate)}"
        remark(text)


@contextlib.contextmanager
def reporting(args: argparse.Namespace, total: int | None, field: str = "outcome") -> Iterator[Report]:
    """Yield a function that prints what has become of some jobs, and shows the progress. After Ctrl-C report how many jobs
    that are. `field` is the name of what the function gets by id: the outcome, or `redriven_as`."""
    from millrace import JobNotFound
    from millrace.results.waiting import counted_noun

    counts: Counter[str] = Counter()

    def report(outcomes: dict[str, str]) -> None:
        for job_id, outcome in outcomes.items():
            counts[outcome if field == "outcome" else "run again"] += 1
            if outcome == "unknown" and args.ids:
                remark(str(JobNotFound(job_id, args.queue)))
            else:
                print_fields(as_json=args.json, **{"id": job_id, field: outcome})
        sys.stdout.flush()
        progress.show(counts.total())

    def hint() -> tuple[str, str]:
        done = [f"{counted_noun(count, 'job')} {what}" for what, count in counts.items()]
        return f"{', '.join(done) or 'no job changed'} so far", "the same command continues"

    with resumable(hint), ProgressReport(total, "jobs", "done") as progress:
        yield report


def _is_basis(count: int, total: int | None) -> bool:
    """Return whether this number of things is enough to estimate the rate."""
    return count >= max(_MIN_COUNT, (total or 0) * _MIN_SHARE)


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
            num_done = round(task.completed - task.fields.get("completed_before", task.completed))
            if task.remaining is not None and _is_basis(num_done, round(task.total or 0)) and (per_s := rate(task)):
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
