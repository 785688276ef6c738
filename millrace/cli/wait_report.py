"""What the verbs that wait report on stderr: why the jobs wait, and how to resume after Ctrl-C or a timeout."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from millrace.cli.exits import NO_REDIS, TIMED_OUT, CommandError
from millrace.cli.options import command_line, open_client
from millrace.cli.output import live_line, remark

if TYPE_CHECKING:
    from millrace.producer import Client
    from millrace.results.errors import QueueError

_INTERVAL_S = 1.0
_REPEAT_S = 30.0
"""After this time a line is printed also when only its numbers have changed."""
_client_log = logging.getLogger("millrace.client")


class WaitReport:
    """Owns a thread that reports why a job has not ended, or with None as its id why no job of the queue begins.

    It has a connection of its own, and starts after a second. On a terminal the report for one job is a line that is
    rewritten, and cleared at the end of the `with` block; otherwise there is a line for each reason.
    """

    def __init__(self, args: argparse.Namespace, job_id: str | None = None) -> None:
        self._args = args
        self._job_id = job_id
        self._is_live = job_id is not None and sys.stderr.isatty()
        self._reason, self._text, self._shown_s = "running", "", 0.0
        self._lock = threading.Lock()
        self._has_ended = threading.Event()

    def __enter__(self) -> Self:
        _client_log.disabled = True  # this says more
        threading.Thread(target=self._run, name="wait report", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        _client_log.disabled = False
        self._has_ended.set()
        self.clear()

    def clear(self) -> None:
        """Clear the line, before a text is printed; later reports are lines of their own."""
        with self._lock:
            live_line.clear()
            self._is_live = False

    def _run(self) -> None:
        from millrace import MillraceError

        while not self._has_ended.wait(_INTERVAL_S):
            # The verb itself reports an outage, and an unknown job.
            with contextlib.suppress(MillraceError), open_client(self._args) as client:
                while not self._has_ended.is_set():
                    self._report(*self._look(client))
                    self._has_ended.wait(_INTERVAL_S)

    def _look(self, client: Client) -> tuple[str, str]:
        """Return the reason, without numbers, and the text to show."""
        from millrace.results.waiting import describe_obstacle, describe_running, describe_wait

        stats = client.stats()
        if self._job_id is None:
            obstacle = describe_obstacle(stats, self._args.queue)
            return stats.obstacle or "running", obstacle or f"engines claim jobs of queue {self._args.queue!r} again"
        place = client.position(self._job_id)
        waits = place.state in ("queued", "delayed")
        reason = stats.obstacle_of(place.state) or (place.state if waits else "running")
        text = describe_wait(place, stats, self._args.queue)
        if place.state == "running":
            text = describe_running(client.get(self._job_id), stats, self._args.queue)
        return reason, f"job {self._job_id!r}: {text}"

    def _report(self, reason: str, text: str) -> None:
        with self._lock:
            if self._has_ended.is_set():
                return
            if self._is_live:
                live_line.show(text)
                return
            is_due = reason != "running" and text != self._text and time.monotonic() - self._shown_s > _REPEAT_S
            if reason != self._reason or is_due:
                self._reason, self._text, self._shown_s = reason, text, time.monotonic()
                remark(text)


@contextlib.contextmanager
def resumable(
    hint: Callable[[], tuple[str, str]], *, may_have_begun: Callable[[QueueError], bool] = lambda _: True
) -> Iterator[None]:
    """Report after Ctrl-C, a timeout, a server that cannot be used, or output that cannot be written, how to resume. `hint`
    returns what continues, and the way to resume it. `may_have_begun`: whether there is something to resume after an error
    of the server."""
    from millrace import MillraceError, RedisUnavailable, ServerUnsuitable, WaitTimeout
    from millrace.results.errors import InvalidRedisURL

    try:
        yield
    except KeyboardInterrupt:
        remark("interrupted: " + "; ".join(hint()))
        raise
    except WaitTimeout as error:
        what = str(error).removesuffix("; wait again").removesuffix(". Then wait again")
        raise CommandError(f"{what}; {hint()[1]}", TIMED_OUT) from error
    except InvalidRedisURL:  # no job is there
        raise
    except (RedisUnavailable, ServerUnsuitable) as error:
        if not may_have_begun(error):
            raise
        raise CommandError(f"{str(error).removesuffix('.')}; {'; '.join(hint())}", NO_REDIS) from error
    except OSError as error:
        # An input that cannot be read has a name, and the reader of a closed pipe has enough.
        if error.filename or isinstance(error, (BrokenPipeError, MillraceError)):
            raise
        raise CommandError(f"the output cannot be written: {error.strerror}; {'; '.join(hint())}") from error


def resume_with(args: argparse.Namespace, *words: str) -> str:
    return f"resume with: {command_line(args, *words)}"


def warn_if_never_served(client: Client, queue: str) -> None:
    """Report a queue that no engine has ever served, since its name may be mistyped."""
    from millrace import MillraceError
    from millrace.results.waiting import describe_obstacle

    with contextlib.suppress(MillraceError):  # the jobs are submitted
        stats = client.stats()
        if not stats.was_served:
            remark(str(describe_obstacle(stats, queue)))
