"""Output of the verbs: results on stdout, remarks on stderr, JSON as one object per line."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO

from millrace.cli.exits import INVALID, OK, OTHER, CommandError

if TYPE_CHECKING:
    from millrace.results.job import CompletionOutput, Job, StreamEvent


CUT = "cut at the limit of tokens: max_tokens, or the context of the model"
_CLEAR_LINE = "\r\x1b[K"
_MIN_FOLDED = 12
"""Least characters of a table's last column. A terminal with less space folds whole lines."""
_SHOWN_REMARKS = 20
"""Remarks of one kind that are printed."""
_CONTROLS = [
    *(code for code in range(0x20) if chr(code) not in "\n\t"),  # C0
    *range(0x7F, 0xA0),  # DEL, C1
    *range(0x202A, 0x202F),  # bidirectional: embeddings and overrides
    *range(0x2066, 0x206A),  # isolates
]
_VISIBLE = {code: repr(chr(code))[1:-1] for code in _CONTROLS}
_VISIBLE_IN_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS}


class LiveLine:
    """Owns the line of the terminal that is rewritten. Remarks clear it, so that they begin lines of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shown = False

    def show(self, text: str) -> None:
        with self._lock:
            self._is_shown = True
            self._write(_CLEAR_LINE + text[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        with self._lock:
            if self._is_shown:
                self._is_shown = False
                self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


live_line = LiveLine()


def stdin() -> IO[bytes]:
    """Return the standard input. Raises CommandError if the caller has closed it."""
    if sys.stdin is None:
        raise CommandError("stdin is closed; give the input as a file, or through a pipe", INVALID)
    return sys.stdin.buffer


def print_json(value: Any) -> None:
    """Print one object on one line, and flush: a program may read it through a pipe."""
    import msgspec

    raw = msgspec.json.encode(value)  # UTF-8, whatever the terminal's encoding
    if sys.stdout.isatty():
        raw = raw.decode().translate(_VISIBLE_IN_JSON).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.flush()


def print_fields(*, as_json: bool, **fields: str) -> None:
    """Print one result as JSON, or only its values, with tabs in between."""
    print_json(fields) if as_json else print("\t".join(fields.values()))


def print_job(job: Job, **more: Any) -> None:
    """Print a job as JSON, with `more` fields."""
    print_json({**job.to_dict(), **more})


class OutputPrinter:
    """Prints the output of one candidate as it comes: content, and tool calls as lines of JSON, on stdout; reasoning on
    stderr."""

    def __init__(self) -> None:
        self._is_in_reasoning = False
        self._is_in_line = False
        self._has_calls = False

    def add(self, part: StreamEvent | CompletionOutput) -> None:
        """Print what this part adds."""
        if part.reasoning:
            if not self._is_in_reasoning:
                self._print_reasoning("--- reasoning\n")
            self._is_in_reasoning = True
            self._print_reasoning(part.reasoning)
        if part.content:
            self._end_reasoning("--- answer\n")
            self._print(part.content)
        for call in part.tool_calls:
            self.end(is_finished=False)
            print_json(call)
            self._has_calls = True

    def end(self, *, is_finished: bool) -> None:
        """End the line. The empty content of a finished output is a line too."""
        self._end_reasoning()
        if self._is_in_line or (is_finished and not self._has_calls):
            self._print("\n")
        self._is_in_line = False

    def _end_reasoning(self, heading: str = "") -> None:
        if self._is_in_reasoning:
            self._is_in_reasoning = False
            self._print_reasoning("\n" + heading)

    def _print(self, text: str) -> None:
        self._is_in_line = True
        _write(sys.stdout, text)

    def _print_reasoning(self, text: str) -> None:
        _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    """Write a model's text as it is, or to a terminal with escapes instead of the characters that could control it."""
    stream.write(text.translate(_VISIBLE) if stream.isatty() else text)
    stream.flush()


def print_outputs(job: Job, first: int = 0) -> None:
    """Print the outputs of a job from candidate `first` on, each of several under a heading."""
    for output in job.outputs[first:]:
        if not output.text and (job.state != "finished" or not job.has_result):
            continue
        if len(job.outputs) > 1:
            print(f"--- candidate {output.index}", flush=True)
        printer = OutputPrinter()
        printer.add(output)
        printer.end(is_finished=job.state == "finished")


def remark(message: str) -> None:
    from millrace.results.errors import one_line

    live_line.clear()
    print(f"millrace: {one_line(message, 480)}", file=sys.stderr, flush=True)


class Remarks:
    """Prints the first of many remarks of one kind, and counts them."""

    def __init__(self, what: str) -> None:
        """`what` is said of the others, such as "lines are refused"."""
        self._what = what
        self.count = 0

    def add(self, message: str) -> None:
        self.count += 1
        if self.count <= _SHOWN_REMARKS:
            remark(message)

    def end(self) -> None:
        """Print how many more there were."""
        if self.count > _SHOWN_REMARKS:
            remark(f"and {self.count - _SHOWN_REMARKS:,} more {self._what}")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, must_cut: bool = False) -> None:
    """Print aligned columns on a terminal, otherwise tab-separated lines without headings.

    On a narrow terminal only the last column is folded, or with `must_cut` cut: the ids in the others have to be copied.
    """
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading != headings[-1])
    for *fixed, last in rows:
        table.add_row(*fixed, Text(last, overflow="ellipsis", no_wrap=True) if must_cut else last)
    console = Console(markup=False, emoji=False)
    fixed_columns = list(zip(headings, *rows, strict=True))[:-1]
    console.width = max(console.width, sum(2 + max(map(len, column)) for column in fixed_columns) + _MIN_FOLDED)
    console.print(table, crop=False)


def report_end(job: Job) -> int:
    """Return the exit status for a job that has ended. If it did not finish, or was cut, print why on stderr."""
    if was_cut(job):
        remark(f"{job.id}: {CUT}")
    return report_failure(job)


def was_cut(job: Job) -> bool:
    """Return whether a limit of tokens has ended one of the job's outputs."""
    return any(output.finish_reason == "length" for output in job.outputs)


def remark_on_redrives(num_jobs: int) -> None:
    """Report how many jobs of a batch are left out."""
    if num_jobs:
        remark(f"left out: {num_jobs} jobs that were run again, since their new jobs belong to the batch too")


def remark_on_lost(num_jobs: int, total: int) -> int:
    """Report how many jobs of a batch are unknown. Return the exit status."""
    if not num_jobs:
        return OK
    remark(f"{num_jobs} of {total} jobs of the batch have expired or were deleted")
    return OTHER


def report_failure(job: Job, report: Callable[[str], None] = remark) -> int:
    """Return the exit status for a job that has ended. If it did not finish, report why."""
    if job.state == "finished" and job.has_result:
        return OK
    why = f": {job.error.message}" if job.error else "" if job.has_result else ": its result has expired"
    report(f"{job.id}: {job.state}{why}")
    return OTHER
