"""What the verbs print: results on stdout, remarks on stderr, JSON as one object a line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millrace.cli.exits import OK, OTHER

if TYPE_CHECKING:
    from rich.progress import Progress

    from millrace.results.messages import Job


def print_json(value: Any) -> None:
    """One object on one line, passed on at once: someone may read it through a pipe."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """A stretch of an answer, as it comes. What the terminal's encoding lacks is escaped, not an error."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def remark(sentence: str) -> None:
    print(f"millrace: {sentence}", file=sys.stderr, flush=True)


def duration(seconds: float | None) -> str:
    """For a person: "45 s", "12 min", "3.5 h", or "unknown"."""
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns on a terminal, else lines of tab-separated fields without headings."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


def end_of(job: Job) -> int:
    """The exit status of a job that has ended; says on stderr why it did not finish."""
    if job.state == "finished":
        return OK
    remark(f"{job.id}: {job.state}" + (f": {job.error.message}" if job.error else ""))
    return OTHER


def progress_bar() -> Progress:
    """A bar on stderr, for a person whose stdout goes elsewhere; on one terminal the lines themselves show progress."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        *columns, console=console, disable=not console.is_terminal or sys.stdout.isatty(), redirect_stdout=False
    )
