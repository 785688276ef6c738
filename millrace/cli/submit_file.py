"""`millrace submit --file`: read jobs line by line, submit them in batches, and wait for them with --wait.

An invalid line is reported with its number; the other lines are submitted. Memory holds one batch, the ids of known jobs,
and with --wait all ids.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, NamedTuple

import msgspec

from millrace.cli.exits import INVALID, OK, CommandError
from millrace.cli.known_jobs import report_known
from millrace.cli.output import print_id, progress_bar, remark, stdin
from millrace.cli.reconnecting_client import ReconnectingClient
from millrace.cli.values import BYTE_ORDER_MARK
from millrace.cli.wait import wait_for_jobs
from millrace.cli.wait_report import resumable, resume_with, warn_if_never_served
from millrace.producer import InvalidRequest
from millrace.producer.calls import KnownJob
from millrace.producer.options import build_request
from millrace.producer.request import CHAT_FIELDS
from millrace.producer.wire import parse_body, to_submission
from millrace.results.errors import QueueFull
from millrace.results.messages import Submission
from millrace.results.replies import Outcome
from millrace.results.waiting import counted_noun

_BATCH_LINES = 500
_PAUSE_S, _MOST_WAIT_S, _BLOCK_BYTES = 0.1, 1.0, 1 << 20


class Line(NamedTuple):
    number: int
    """From 1, as an editor counts."""
    job: Submission
    has_own_id: bool


def submit_file(
    client: ReconnectingClient, args: argparse.Namespace, options: dict[str, Any], call_options: dict[str, Any]
) -> int:
    """Submit every valid line of --file. Print the ids, or with --wait each result as soon as its job ends.

    `call_options` are further arguments of `submit_many`. Raises InvalidRequest for invalid `options` or `call_options`.
    """
    check_options(options)
    client.submit_many([], **call_options)  # checks call_options
    submission = _Submission(client, options, call_options)
    with resumable(submission.hint), _open(args.file) as file, progress_bar() as bar:
        task = bar.add_task("submitted", total=_count_lines(file))
        ids: list[str] = []
        for job_id in submission.submit(_lines(file)):
            bar.advance(task)
            if args.wait:
                ids.append(job_id)
            else:
                print_id(job_id, as_json=args.json)
        sys.stdout.flush()
    if not submission.num_submitted + submission.num_refused:
        raise CommandError(f"{'stdin' if args.file == '-' else args.file}: the file has no lines", INVALID)
    report_known(args, submission.known, submission.num_submitted - len(submission.known))
    status = OK
    if args.wait:
        how_to_resume = resume_with(args, "wait", "--batch", args.batch) if args.batch else submission.hint()[1]
        status = wait_for_jobs(client, args, ids, how_to_resume)
    else:
        warn_if_never_served(client, args.queue)
    if submission.num_refused:
        remark(f"jobs submitted: {submission.num_submitted}, lines refused: {submission.num_refused}")
        return INVALID
    return status


def check_options(options: dict[str, Any]) -> None:
    """Raise InvalidRequest for options with which no line can be a request."""
    is_chat = options.keys() & CHAT_FIELDS
    any_chat = {"messages": [{"role": "user", "content": "any"}]} if is_chat else {}
    fields: Any = {"max_tokens": None, **any_chat, **options}  # a line may set max_tokens
    build_request(None if is_chat else "any", fields)


class _Submission:
    """Submits one file, and owns the counts of its lines."""

    def __init__(self, client: ReconnectingClient, options: dict[str, Any], call_options: dict[str, Any]) -> None:
        self._client = client
        self._batch, self._durability = call_options.get("batch"), call_options.get("durability", "memory")
        self._options = options
        self.known: dict[str, KnownJob] = {}
        """The submitted jobs that the queue has had before."""
        self.num_submitted = 0
        self.num_refused = 0
        self._last_line = 0
        """Number of the last line that was sent."""
        self._can_repeat = True
        """Whether all lines that were sent have ids of their own, so that the same file can be submitted again."""

    def hint(self) -> tuple[str, str]:
        """Return what is submitted after an interruption, and how to submit the rest."""
        what = f"{counted_noun(self.num_submitted, 'job')} submitted, up to line {self._last_line}"
        if self._can_repeat:
            return what, "the same command resumes"
        return what, "some lines have no id, so the same command would submit them twice: `millrace ls` shows the jobs"

    def submit(self, texts: Iterable[bytes | None]) -> Iterator[str]:
        """Yield the ids of the jobs in the queue. At a limit, raise CommandError with the lines that are not submitted."""
        lines = self._requests(texts)
        while batch := list(islice(_until_pause(lines), _BATCH_LINES)):
            self._can_repeat = self._can_repeat and all(line.has_own_id for line in batch)
            known = self._client.look_up(line.job.job_id for line in batch if line.has_own_id)
            job_ids, left, full = self._submit_batch(batch)
            self.num_submitted += len(job_ids)  # before an id is printed: printing may be interrupted
            self.known |= {job_id: known[job_id] for job_id in job_ids if job_id in known}
            yield from job_ids
            if full:
                if left[-1] < self._last_line:  # only then read on: a pipe may block
                    left += [line.number for line in islice(filter(None, lines), 1)]
                raise CommandError(f"not submitted: {_not_submitted(left, self._last_line)}: {full}")

    def _requests(self, texts: Iterable[bytes | None]) -> Iterator[Line | None]:
        """Yield the valid lines, and None for each pause of a pipe."""
        number = 0
        for text in texts:
            if text is None:
                yield None
                continue
            number += 1
            text = text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text
            if text.strip():
                try:
                    request = parse_body(self._filled(text))
                    yield Line(number, to_submission(request, batch=self._batch), request.id is not None)
                except InvalidRequest as error:
                    self._refuse(number, error)

    def _filled(self, text: bytes) -> bytes:
        """Add the options that the line leaves out, or has as null: but for max_tokens, this means the same. The rest of its
        text stays unchanged, for error messages."""
        try:
            own = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return text
        nulls = {name for name in own.keys() & self._options.keys() - {"max_tokens"} if bytes(own[name]) == b"null"}
        if nulls:
            own = {name: value for name, value in own.items() if name not in nulls}
            text = msgspec.json.encode(own)
        gaps = {name: value for name, value in self._options.items() if name not in own}
        if not gaps:
            return text
        return msgspec.json.encode(gaps)[:-1] + (b"," if own else b"") + text.lstrip()[1:]

    def _submit_batch(self, batch: list[Line]) -> tuple[list[str], list[int], QueueFull | None]:
        """Return the ids of the jobs in the queue, the numbers of the lines that a limit has kept out, and its error."""
        job_ids: list[str] = []
        left: list[int] = []
        full = None
        ends = self._client.submit_each([line.job for line in batch], self._durability)
        for line, end in zip(batch, ends, strict=True):
            if isinstance(end, QueueFull):
                left.append(line.number)
                full = end
                continue
            self._last_line = line.number
            if isinstance(end, Outcome):
                job_ids.append(line.job.job_id)
            else:
                self._refuse(line.number, end)
        return job_ids, left, full

    def _refuse(self, number: int, error: Exception) -> None:
        self.num_refused += 1
        remark(f"line {number}: {error}")


def _not_submitted(left: list[int], last_sent: int) -> str:
    """Name the lines that the user has to submit again. All lines after the last one sent are named by the first of them."""
    in_between = [f"line {number}" for number in left if number < last_sent]
    rest = [f"all from line {number} on" for number in left if number > last_sent]
    return ", ".join([*in_between, *rest[:1]])


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a file. Of a pipe also None, when it pauses and once a second, so that no job waits for others."""
    if file.seekable():
        yield from file
        return
    rest, last_s = b"", time.monotonic()
    while True:
        if not select.select([file], [], [], _PAUSE_S)[0] or time.monotonic() > last_s + _MOST_WAIT_S:
            yield None
            last_s = time.monotonic()
        if not (block := os.read(file.fileno(), _BLOCK_BYTES)):
            break
        *lines, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _until_pause(lines: Iterator[Line | None]) -> Iterator[Line]:
    """Yield lines up to the next pause, but at least one."""
    has_any = False
    for line in lines:
        if line is not None:
            has_any = True
            yield line
        elif has_any:
            return


def _count_lines(file: IO[bytes]) -> int | None:
    """Return the number of lines of a file, for the progress bar; None for a pipe."""
    if not file.seekable():
        return None
    num_lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    file.seek(0)
    return num_lines


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield stdin()
    else:
        with open(path, "rb") as file:
            yield file
