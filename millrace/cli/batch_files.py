"""The input and the output of `millrace run-batch`.

Beside the output stands `<output>.state` while the run is not complete: the id of the run, and a digest of the input. It is
empty until a line is written, or jobs may be in a queue that outlives the command; a command that ends before that removes
both files. The jobs of a run have the ids `run-<run>-<line number>`, and so have its lines in the output. So the same
command, started again after its end by whatever cause, submits only what the output lacks, and finds the jobs that are in
the queue. A complete output is in the order of the input. It has no state beside it, but the id of its run ends with a
digest of the input and the options: so the same command knows its output.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import gzip
import hashlib
import os
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterator
from io import BufferedReader
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import msgspec

from millrace.cli.exits import INVALID, NO_REDIS, CommandError

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Longer lines are refused. They are not read into memory."""

INCOMPLETE = NO_REDIS
"""Exit status of a run that has ended early, for whatever reason: the same command continues."""

_CHUNK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_MISSING = -1


class InputLine(NamedTuple):
    number: int
    """From 1, as an editor counts."""
    text: bytes | None
    """None: the line is longer than MAX_LINE_BYTES."""


class _CustomId(msgspec.Struct):
    custom_id: str | None = None


class _LineId(msgspec.Struct):
    id: str


class _State(msgspec.Struct):
    run: str
    input_digest: str
    options: dict[str, Any] = {}


class Input(NamedTuple):
    """What the first reading of the input has found."""

    path: Path
    digest: str
    last_number: int
    hashes: array[int]
    """Of the lines that are not empty."""

    @property
    def num_lines(self) -> int:
        """Number of lines that are not empty."""
        return len(self.hashes)

    def lines(self) -> Iterator[InputLine]:
        """Read the lines that are not empty. Raises CommandError at the first that differs from the first reading."""
        with _open_input(self.path) as file:
            for line, first_hash in zip_longest(_lines(file), self.hashes):
                if line is None or hash(line) != first_hash:
                    remedy = "put the earlier content back, and the same command continues; or name another output"
                    reason = f"has changed since this command began to read it; {remedy}"
                    raise CommandError(f"{self.path}: {reason}", INVALID)
                yield line


def read_input(path: Path) -> Input:
    """Read the input for the first time. Raises CommandError if no line has a custom_id, or two have the same one."""
    if str(path) == "-":
        raise CommandError("-i -: the input is read twice, so it cannot be stdin; save it to a file", INVALID)
    digest, last_number = hashlib.sha256(), 0
    hashes = array("q")  # of 64 bits: the text of millions of lines needs much memory, and so do their ids
    number_by_id: dict[int, int] = {}
    first_text = b""
    with _open_input(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        file.seek(0)
        for line in _lines(file):
            number, text = line
            if not hashes:
                first_text = text or b""
            hashes.append(hash(line))
            last_number = number
            custom_id = custom_id_of(text)
            if custom_id is None:
                continue
            first = number_by_id.setdefault(hash(custom_id), number)
            if first != number:
                raise CommandError(
                    f"{path}: custom_id {custom_id[:80]!r} is in line {first} and in line {number}", INVALID
                )
    if not hashes:
        raise CommandError(f"{path}: the file has no lines", INVALID)
    if not number_by_id and not _is_text(first_text):
        remedy = "convert it first, such as with: iconv -f UTF-16 -t UTF-8 FILE > NEW"
        raise CommandError(f"{path}: is no text in UTF-8; {remedy}", INVALID)
    if not number_by_id:
        example = '{"custom_id": "q1", "method": "POST", "url": "/v1/completions", "body": {...}}'
        raise CommandError(f"{path}: no line has a custom_id; a line has to be such as {example}", INVALID)
    return Input(path, digest.hexdigest(), last_number, hashes)


def _is_text(line: bytes) -> bool:
    """Return whether a line is UTF-8 without NUL."""
    with contextlib.suppress(UnicodeDecodeError):
        return "\0" not in line.decode()
    return False


@contextlib.contextmanager
def _open_input(path: Path) -> Iterator[IO[bytes]]:
    """Open the input; one that gzip has compressed is unpacked. Raises CommandError if it is a pipe, or damaged."""
    with path.open("rb") as file:
        if not file.seekable():
            raise CommandError(f"{path}: is a pipe, and the input is read twice; save it to a file", INVALID)
        if not file.peek(len(_GZIP)).startswith(_GZIP):
            yield file
            return
        try:
            with BufferedReader(gzip.GzipFile(fileobj=file)) as unpacked:
                yield unpacked
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CommandError(f"{path}: is damaged, so gzip cannot unpack it: {error}", INVALID) from error


def custom_id_of(text: bytes | None) -> str | None:
    """Return the custom_id of a line, or None if it has none that can be read."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None if text is None else msgspec.json.decode(text, type=_CustomId).custom_id
    return None


def _lines(file: IO[bytes]) -> Iterator[InputLine]:
    number = 0
    while text := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(text) > MAX_LINE_BYTES and not text.endswith(b"\n"):
            while text and not text.endswith(b"\n"):
                text = file.readline(_CHUNK_BYTES)
            yield InputLine(number, None)
            continue
        if number == 1:
            text = text.removeprefix(codecs.BOM_UTF8)  # which some editors write
        if text.strip():
            yield InputLine(number, text)


class OutputFile:
    """Owns the output and the state of a run, inside a `with` block. No other process can open them meanwhile."""

    def __init__(self, path: Path, source: Input, options: dict[str, Any]) -> None:
        """Open a new run, or continue one. `options`: of its jobs. Raises CommandError if the output is that of another run,
        or of one that runs."""
        self._path, self._source, self._options = path, source, options
        self._state_path = path.with_name(path.name + ".state")
        self._check_paths()
        self._lock = self._state_path.open("a+b", buffering=0)
        self.has_begun = False
        """Whether the state is in its file, so that only the same input continues the run."""
        try:
            self._state = self._open_state()
            self._file = path.open("r+b" if path.exists() else "x+b", buffering=0)
        except BaseException:
            self._lock.close()
            raise
        self._read()
        if self.num_written:
            self.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if not self.has_begun:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._state_path.unlink()  # last: an output without it is refused
        self._file.close()
        self._lock.close()

    @property
    def batch(self) -> str:
        """The batch of the run's jobs."""
        return f"run-{self._state.run}"

    def id_of(self, number: int) -> str:
        """Return the id of a line of the input, which is that of its job."""
        return f"{self.batch}-{number}"

    def has(self, number: int) -> bool:
        """Return whether the output has the answer to this line of the input."""
        return self._begins[number] != _MISSING

    def begin(self) -> None:
        """Write the state. Call it before a job is submitted to a queue that outlives this process. Raises CommandError."""
        if not self.has_begun:
            self._save_state()
            self.has_begun = True

    def _save_state(self) -> None:
        try:
            self._lock.truncate(0)
            _write(self._lock, msgspec.json.encode(self._state))
            os.fsync(self._lock.fileno())
        except OSError as error:
            self._lock.truncate(0)
            raise CommandError(f"{self._state_path}: {error.strerror}", INCOMPLETE) from error

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Raises CommandError, for example when the disk is full: then the line may be written in part."""
        self.begin()
        text = msgspec.json.encode(line) + b"\n"
        try:
            _write(self._file, text)
        except OSError as error:
            raise CommandError(f"{self._path}: {error.strerror}", INCOMPLETE) from error
        self._note(line, len(text))

    def retry_failed(self) -> None:
        """Take the lines that have failed out of a complete output, so that they are answered again, by new jobs."""
        if self.num_written < self._source.num_lines or not self.num_failed:
            return
        self._state.run = _new_run(self._state)
        self._save_state()
        self._rewrite(lambda text: not _has_failed(msgspec.json.decode(text)))
        self._file.close()
        self._file = self._path.open("r+b", buffering=0)
        self._read()

    def complete(self) -> None:
        """Bring the output to the disk in the order of the input, and remove the state."""
        assert self.num_written == self._source.num_lines
        begins = [begin for begin in self._begins if begin != _MISSING]
        if begins == sorted(begins):
            os.fsync(self._file.fileno())
        else:
            self._rewrite(lambda text: True)
        self._state_path.unlink()

    def _rewrite(self, is_kept: Callable[[bytes], bool]) -> None:
        """Replace the file with one that has these lines, in the order of the input."""
        new_path = self._path.with_name(self._path.name + ".new")
        try:
            with self._path.open("rb") as old, new_path.open("wb") as new:
                for begin in self._begins:
                    if begin != _MISSING:
                        old.seek(begin)
                        text = old.readline()
                        if is_kept(text):
                            new.write(text)
                new.flush()
                os.fsync(new.fileno())
            new_path.replace(self._path)
        except OSError as error:
            new_path.unlink(missing_ok=True)
            raise CommandError(f"{new_path}: {error.strerror}", INCOMPLETE) from error

    def _check_paths(self) -> None:
        path, state_path = self._path, self._state_path
        if not _can_be_regular(path):
            reason = "the output has to be a regular file, since a run continues from it; name one, such as out.jsonl"
            raise CommandError(f"{path}: {reason}", INVALID)
        if path.exists() and path.samefile(self._source.path):
            raise CommandError(f"{path}: is the input; name another file for the output", INVALID)
        if path.exists() and not state_path.exists() and self._run_of_output() is None:
            reason = "exists already, and is not the output of this input with these options; name another file"
            raise CommandError(f"{path}: {reason}", INVALID)
        if not path.parent.is_dir():
            raise CommandError(f"{path}: there is no directory {path.parent}; create it, or name another file", INVALID)

    def _open_state(self) -> _State:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None
        if not _is_file_at(self._lock, self._state_path):  # its run-batch has removed it between our open and our lock
            raise self._in_use()
        self._lock.seek(0)
        text = self._lock.read()
        if not text:
            state = _State("", self._source.digest, self._options)
            run = self._run_of_output() if self._path.exists() and self._path.stat().st_size else _new_run(state)
            if run is not None:
                state.run = run
                return state
        self.has_begun = True
        try:
            state = msgspec.json.decode(text, type=_State)
        except msgspec.MsgspecError:
            raise CommandError(f"{self._state_path}: is damaged; remove it and {self._path}", INVALID) from None
        if state.input_digest != self._source.digest:
            remedy = "put that back, or name another file for the output"
            reason = f"was begun with another input than {self._source.path} is now; {remedy}"
            raise CommandError(f"{self._path}: {reason}", INVALID)
        if state.options != self._options:
            options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in state.options.items())
            reason = f"was begun with {options or 'no options for all lines'}; continue it with the same"
            raise CommandError(f"{self._path}: {reason}", INVALID)
        return state

    def _in_use(self) -> CommandError:
        return CommandError(f"{self._path}: another run-batch writes it now", INVALID)

    def _run_of_output(self) -> str | None:
        """Return the run whose output the file is, by its first line. None if it is not that of this input and options."""
        unreadable = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
        with contextlib.suppress(*unreadable), self._path.open("rb") as file:
            line_id = msgspec.json.decode(file.readline(), type=_LineId).id
            run = line_id.removeprefix("run-").rpartition("-")[0]
            if run.endswith(_mark(_State(run, self._source.digest, self._options))):
                return run
        return None

    def _read(self) -> None:
        """Note the lines that an earlier process has written. Cut off the last one if it is not complete."""
        self.num_written = self.num_failed = self.num_cut = 0
        self.first_failed: tuple[int, str] | None = None
        """The first line of the input that was refused or has failed: its number and the reason."""
        self._begins = array("q", [_MISSING]) * (self._source.last_number + 1)
        """By line number of the input: where in the output its line begins."""
        self._end = 0
        with self._path.open("rb") as file:
            for text in file:
                if not text.endswith(b"\n"):
                    break
                try:
                    self._note(msgspec.json.decode(text), len(text))
                except (msgspec.MsgspecError, ValueError, KeyError, TypeError, IndexError):
                    reason = f"line {self.num_written + 1} is not of this run; remove the file"
                    raise CommandError(f"{self._path}: {reason}", INVALID) from None
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def _note(self, line: dict[str, Any], num_bytes: int) -> None:
        """Note that the output has a line at its end."""
        number = int(line["id"].rpartition("-")[2])
        self._begins[number] = self._end
        self._end += num_bytes
        self.num_written += 1
        if _has_failed(line):
            self.num_failed += 1
            if self.first_failed is None or number < self.first_failed[0]:
                self.first_failed = number, _reason(line)
        self.num_cut += not _has_failed(line) and _was_cut(line)


def _mark(state: _State) -> str:
    """Return the end of the ids of all runs with this input and these options."""
    text = msgspec.json.encode([state.input_digest, state.options], order="sorted")
    return hashlib.sha256(text).hexdigest()[:8]


def _new_run(state: _State) -> str:
    return uuid.uuid4().hex[:8] + _mark(state)


def _can_be_regular(path: Path) -> bool:
    """Return whether the path is that of a regular file, or of none yet. "-" and /dev/stdout never are: a redirection to a
    file does not make them the file of a run."""
    folder = path.parent.resolve()
    if str(path) == "-" or folder == Path("/dev") or folder.is_relative_to("/proc"):
        return False
    return path.is_file() or not path.exists()


def _is_file_at(file: IO[bytes], path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _write(file: IO[bytes], data: bytes) -> None:
    """Write all: where space ends, a file without a buffer takes a part, and only the next part fails."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _has_failed(line: dict[str, Any]) -> bool:
    return line["response"] is None or line["response"]["status_code"] != 200


def _reason(line: dict[str, Any]) -> str:
    """Return why a line has failed."""
    error = line["error"] if line["response"] is None else line["response"]["body"]["error"]
    return str(error["message"])


def _was_cut(line: dict[str, Any]) -> bool:
    return any(choice["finish_reason"] == "length" for choice in line["response"]["body"]["choices"])
