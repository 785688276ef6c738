"""How long readers wait, and why: deadlines, the log, and sentences for people."""

from __future__ import annotations

import logging
import math
import time

from millrace.results import commands, replies
from millrace.results.connection import BLOCK_LIMIT_S
from millrace.results.counts import Position, QueueStats
from millrace.results.errors import WaitTimeout
from millrace.results.job import Job
from millrace.results.keys import QueueKeys
from millrace.results.messages import TERMINAL_STATES
from millrace.results.transport import Call

LOG_INTERVAL_S = 60.0
logger = logging.getLogger("millrace.client")
_logged: dict[str, tuple[str, float]] = {}
"""By queue, what was logged last, and when. Many readers find the same at the same time."""


class Deadline:
    """Limits how long a reader waits."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        self._ends_s = math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def block_ms(self) -> int:
        """Return how long to block now; 0 after the deadline."""
        left_s = min(self._ends_s - time.monotonic(), BLOCK_LIMIT_S)
        return int(left_s * 1000) + 1 if left_s > 0 else 0

    def error(
        self, what: str, reason: str | None, *, has_obstacle: bool, again: str = "wait again", job_id: str | None = None
    ) -> WaitTimeout:
        """Return the error for a wait that has reached the deadline. `what` is what has not happened in time."""
        why = f": {reason}" if reason else ""
        todo = f"Then {again}" if has_obstacle else f"Work continues; {again}"  # the obstacle names its remedy
        return WaitTimeout(f"{what} within {self._timeout_s:g} s{why}. {todo}", job_id)


class JobWait(Deadline):
    """Limits how long a reader waits for one job, and logs each obstacle once: of all readers in this process one does."""

    def __init__(self, keys: QueueKeys, job_id: str, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self._keys = keys
        self._job_id = job_id
        self._obstacle: str | None = None
        """The last one that was noted."""

    def job_error(self, what: str, again: str = "wait again") -> Call[WaitTimeout]:
        """Return the error for a wait that has reached the deadline. It says why the job has not ended."""
        place_reply, stats_reply = yield [commands.position(self._keys, self._job_id), commands.stats(self._keys)]
        queue, stats = self._keys.queue, replies.queue_stats(stats_reply)
        place = replies.position(self._job_id, queue, place_reply)
        reason, has_obstacle = describe_wait(place, stats, queue), stats.obstacle_of(place.state) is not None
        return self.error(what, reason, has_obstacle=has_obstacle, again=again, job_id=self._job_id)

    def note(self, state: str, stats: QueueStats) -> None:
        """Log what keeps the job, which is in this state, from ending, or that nothing does so any more."""
        queue = self._keys.queue
        obstacle = describe_obstacle(stats, queue) if stats.obstacle_of(state) else None
        if obstacle != self._obstacle and state not in TERMINAL_STATES:
            _log(queue, f"jobs wait: {obstacle}" if obstacle else f"engines claim jobs of queue {queue!r} again")
        self._obstacle = obstacle


def _log(queue: str, text: str) -> None:
    """Log this of a queue, unless it was logged last and less than LOG_INTERVAL_S ago."""
    last, at_s = _logged.get(queue, ("", 0.0))
    now_s = time.monotonic()
    if text != last or now_s >= at_s + LOG_INTERVAL_S:
        _logged[queue] = text, now_s
        logger.warning("%s", text)


def describe_wait(place: Position, stats: QueueStats, queue: str) -> str:
    """Return a job's state and why it does not end, such as "queued, 17 jobs ahead, starts in about 40 s"."""
    facts = [place.state]
    if obstacle := describe_job_obstacle(place.state, stats, queue):
        facts.append(obstacle)
    elif place.needs_model:
        facts.append("waits for an engine with the model that began it")
    elif place.num_ahead is not None:
        facts.append(counted_noun(place.num_ahead, "job") + " ahead")
    if place.eta_s is not None and not stats.obstacle:
        facts.append(f"starts in about {duration(place.eta_s)}")
    return ", ".join(facts)


def describe_running(job: Job, stats: QueueStats, queue: str) -> str:
    """Return how far a running job is, such as "running, 53 tokens so far, attempt 1, engine host-17-5c2e", and instead of
    an engine that has died the remedy."""
    where = describe_job_obstacle(job.state, stats, queue) or f"engine {job.engine}"
    return f"running, {counted_noun(job.num_tokens, 'token')} so far, attempt {job.attempt}, {where}"


def describe_job_obstacle(state: str, stats: QueueStats, queue: str) -> str | None:
    """Return what keeps a job in this state from ending, with the remedy; None if nothing does so."""
    obstacle = describe_obstacle(stats, queue) if stats.obstacle_of(state) else None
    return f"{obstacle}, which continues the job" if obstacle and state == "running" else obstacle


def describe_obstacle(stats: QueueStats, queue: str) -> str | None:
    """Return why no job of the queue begins now, with the remedy; None where engines claim jobs."""
    option = "" if queue == "default" else f" --queue {queue}"
    match stats.obstacle:
        case "never_served":
            names = "`millrace queues` lists the queues of the server"
            return f"no engine has ever served queue {queue!r}: {names}, `millrace serve{option}` starts an engine"
        case "no_engine":
            return f"no engine serves queue {queue!r} now: `millrace serve{option}` starts one"
        case "paused":
            return f"queue {queue!r} is paused: `millrace resume{option}` starts its jobs again"
        case "asleep":
            return f"all engines of queue {queue!r} are asleep: `millrace wake{option}` wakes them"
    return None


def duration(seconds: float | None) -> str:
    """Format a duration: "45 s", "12 min", "3.5 h", or "unknown"."""
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
