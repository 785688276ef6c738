"""`millrace submit --file`: read jobs line by line, submit some at a time, and with --wait print results meanwhile.

An invalid line is reported with its number; the other lines are submitted. Memory holds the lines that are sent together,
the ids that lines have, and with --wait the ids of the jobs that have not ended.
"""

from __future__ import annotations

import argparse
import codecs
import math
import os
import select
import sys
import time
import uuid
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, NamedTuple

import msgspec

from millrace.cli.exits import INVALID, OK, CommandError
from millrace.cli.known_jobs import report_known
from millrace.cli.output import Remarks, print_fields, remark, stdin
from millrace.cli.progress import progress_bar
from millrace.cli.reconnecting_client import FULL_QUEUE_INTERVAL_S, ReconnectingClient
from millrace.cli.wait import ResultPrinter
from millrace.cli.wait_report import resumable, resume_with, warn_if_never_served
from millrace.producer import InvalidRequest
from millrace.producer.arguments import new_batch
from millrace.producer.calls import KnownJob
from millrace.producer.options import build_request
from millrace.producer.request import CHAT_FIELDS
from millrace.producer.wire import parse_body, to_submission
from millrace.results.errors import QueueFull, shown
from millrace.results.messages import Submission
from millrace.results.replies import Outcome
from millrace.results.waiting import counted_noun

_BATCH_LINES = 500
_NO_UTF_8 = (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")
"""How a file of gzip, and one in UTF-16, begins."""
_PAUSE_S, _MOST_WAIT_S, _BLOCK_BYTES = 0.1, 1.0, 1 << 20
_LOOK_S = 0.5
"""How long to wait for results while a pipe pauses: its next line waits that long."""


class Line(NamedTuple):
    number: int
    """From 1, as an editor counts."""
    job: Submission
    has_own_id: bool


def submit_file(client: ReconnectingClient, args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Submit every valid line of --file. Print the ids, or with --wait each result as soon as its job ends.

    `options` fill the gaps of a line. Raises InvalidRequest for invalid ones, and for an invalid --batch.
    """
    check_options(options)
    new_batch(args.batch)
    printer = ResultPrinter(client, args) if args.wait else None
    submission = _Submission(client, args, options, printer)
    status = OK
    with resumable(submission.hint), _open(args.file) as file:
        if printer:
            printer.progress.total = _count_lines(file)
            with printer:
                for _ in submission.submit(_lines(file)):
                    pass
                submission.report()
                status = printer.finish()
        else:
            with progress_bar() as bar:
                task = bar.add_task("submitted", total=_count_lines(file))
                for job_id in submission.submit(_lines(file)):
                    bar.advance(task)
                    print_fields(id=job_id, as_json=args.json)
                sys.stdout.flush()
            submission.report()
            warn_if_never_served(client, args.queue)
    if num_refused := submission.refused.count:
        submission.refused.end()
        remark(f"jobs submitted: {submission.num_submitted}, lines refused: {num_refused}")
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

    def __init__(
        self,
        client: ReconnectingClient,
        args: argparse.Namespace,
        options: dict[str, Any],
        printer: ResultPrinter | None = None,
    ) -> None:
        """`printer`: of the results, with --wait."""
        self._client, self._args, self._options, self._printer = client, args, options, printer
        self._batch = args.batch or f"submit-{uuid.uuid4().hex[:12]}"
        most_wait_s = (math.inf if args.timeout is None else args.timeout) if args.wait else 0.0
        self._waits_until_s, self._has_waited = time.monotonic() + most_wait_s, False  # for space in a full queue
        self.known: dict[str, KnownJob] = {}
        """The submitted jobs that the queue has had before."""
        self._own_ids: set[str] = set()
        """Ids that lines of jobs in the queue have."""
        self.num_submitted = 0
        """Jobs in the queue."""
        self._num_repeated = 0
        """Lines whose job another line has submitted."""
        self.refused = Remarks("lines are refused")
        self._last_line = 0
        """Number of the last line that was sent."""
        self._has_all = False
        """Whether every line was sent."""
        self._can_repeat = True
        """Whether all lines that were sent have ids of their own, so that the same file can be submitted again."""

    def hint(self) -> tuple[str, str]:
        """Return what is done at an interruption, and how to get the rest."""
        what = f"{counted_noun(self.num_submitted, 'job')} submitted, up to line {self._last_line}"
        if self._printer:
            what = self._printer.written() if self._has_all else f"{what}, {self._printer.num_written} results written"
        how = resume_with(self._args, "wait", "--batch", self._batch)
        is_all_in_batch = self._has_all and all(job.batch == self._batch for job in self.known.values())
        if self._printer and is_all_in_batch:
            return what, how
        if self._can_repeat:
            return what, "the same command resumes"
        return what, f"some lines have no id, so the same command would submit them twice; {how}"

    def report(self) -> None:
        """Report after the last line how many jobs are new, and what became of the others. Raises CommandError if there was
        no line."""
        self._has_all = True
        if not self.num_submitted + self.refused.count:
            raise CommandError(
                f"{'stdin' if self._args.file == '-' else self._args.file}: the file has no lines", INVALID
            )
        report_known(self._args, self.known, self._num_new)
        if self._num_repeated:
            remark(f"lines that repeat an id, and so are no jobs of their own: {self._num_repeated:,}")

    @property
    def _num_new(self) -> int:
        return self.num_submitted - len(self.known)

    def submit(self, texts: Iterable[bytes | None]) -> Iterator[str]:
        """Yield the ids of the jobs in the queue, one for each line. Print results meanwhile. Raises what `_wait_for_space`
        raises."""
        lines = self._requests(texts)
        for batch in _until_pauses(lines):
            if self._printer:
                self._printer.print_ended(0 if batch else _LOOK_S)
            self._can_repeat = self._can_repeat and all(line.has_own_id for line in batch)
            own_ids = {line.job.job_id for line in batch if line.has_own_id}
            known = self._client.look_up(own_ids)
            while batch:
                job_ids, batch, full = self._submit_batch(batch)
                self._note(job_ids, own_ids, known)  # before an id is printed: printing may be interrupted
                yield from job_ids
                if full:
                    self._wait_for_space(full, batch, lines)

    def _note(self, job_ids: list[str], own_ids: Container[str], known: dict[str, KnownJob]) -> None:
        """Note the jobs of lines that were submitted. `own_ids`: those that lines have. `known`: those that were in the
        queue before."""
        is_first = self._num_new == 0
        new = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in self._own_ids]
        self._num_repeated += len(job_ids) - len(new)
        self.known |= {job_id: known[job_id] for job_id in new if job_id in known}
        self._own_ids.update(job_id for job_id in new if job_id in own_ids)
        self.num_submitted += len(new)
        if self._printer:
            self._printer.add(new)
        if is_first and self._num_new and not self._args.batch:
            remark(f"new jobs are in batch {self._batch}")

    def _wait_for_space(self, full: QueueFull, left: list[Line], lines: Iterator[Line | None]) -> None:
        """Pause before another attempt. After the longest time to wait, raise CommandError with the lines that are left."""
        if self._printer and time.monotonic() < self._waits_until_s:
            if not self._has_waited:
                remark(f"no space in the queue ({full.limit} {full.value}): waiting until jobs have ended")
            self._has_waited = True
            again_s = time.monotonic() + FULL_QUEUE_INTERVAL_S
            while (left_s := again_s - time.monotonic()) > 0:
                self._printer.print_ended(left_s)
            return
        numbers = [line.number for line in left]
        if numbers[-1] < self._last_line:  # only then read on: a pipe may block
            numbers += [line.number for line in islice(filter(None, lines), 1)]
        before = QueueFull(full.limit, full.value, [], [])  # without the jobs of its call, which is a part of the file
        remedy = "some lines have no id, so submit a file of only the lines that are named here"
        if self._can_repeat:
            remedy = "the same command resumes"
        raise CommandError(
            f"not submitted: {_not_submitted(numbers, self._last_line)}: {before}; "
            f"{self.num_submitted} jobs of the file are in the queue: {remedy}"
        )

    def _requests(self, texts: Iterable[bytes | None]) -> Iterator[Line | None]:
        """Yield the valid lines, and None for each pause of a pipe."""
        number = 0
        for text in texts:
            if text is None:
                yield None
                continue
            number += 1
            if number == 1:
                if text.startswith(_NO_UTF_8):
                    remedy = "unpack or convert it first, such as with: gunzip -c FILE | millrace submit --file -"
                    raise CommandError(f"--file: is compressed, or no text in UTF-8; {remedy}", INVALID)
                text = text.removeprefix(codecs.BOM_UTF8)  # which some editors write
            if text.strip():
                try:
                    request = parse_body(self._filled(text))
                    yield Line(number, to_submission(request, batch=self._batch), request.id is not None)
                except InvalidRequest as error:
                    is_object = text.lstrip().startswith(b"{")
                    self._refuse(number, error if is_object else _no_object(text))

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

    def _submit_batch(self, batch: list[Line]) -> tuple[list[str], list[Line], QueueFull | None]:
        """Return the ids of the jobs in the queue, the lines that a limit has kept out, and its error."""
        job_ids: list[str] = []
        left: list[Line] = []
        full = None
        ends = self._client.submit_each([line.job for line in batch], self._args.durability)
        for line, end in zip(batch, ends, strict=True):
            if isinstance(end, QueueFull):
                left.append(line)
                full = end
                continue
            self._last_line = line.number
            if isinstance(end, Outcome):
                job_ids.append(line.job.job_id)
            else:
                self._refuse(line.number, end)
        return job_ids, left, full

    def _refuse(self, number: int, error: Exception | str) -> None:
        self.refused.add(f"line {number}: {error}")


def _no_object(text: bytes) -> str:
    begin = shown(text[:60].decode(errors="replace").strip())
    return f'body: must be a JSON object on one line, such as {{"prompt": "3 + 4 ="}}, got {begin}'


def _not_submitted(left: list[int], last_sent: int) -> str:
    """Name the lines that the user has to submit again. All lines after the last one sent are named by the first of them."""
    in_between = [f"line {number}" for number in left if number < last_sent]
    rest = [f"all from line {number} on" for number in left if number > last_sent]
    return ", ".join([*in_between, *rest[:1]])


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a file. Of a pipe also None, while it pauses and once a second, so that no job waits for others."""
    if file.seekable():
        yield from file
        return
    rest, last_s = b"", time.monotonic()
    while True:
        has_more = bool(select.select([file], [], [], _PAUSE_S)[0])
        if not has_more or time.monotonic() > last_s + _MOST_WAIT_S:
            yield None
            last_s = time.monotonic()
        if not has_more:
            continue
        if not (block := os.read(file.fileno(), _BLOCK_BYTES)):
            break
        *lines, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _until_pauses(lines: Iterable[Line | None]) -> Iterator[list[Line]]:
    """Yield the lines up to each pause, but at most _BATCH_LINES together."""
    batch: list[Line] = []
    for line in lines:
        batch += [line] if line else []
        if not line or len(batch) == _BATCH_LINES:
            yield batch
            batch = []
    if batch:
        yield batch


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
