"""Sentences about why jobs wait, for people."""

from __future__ import annotations

from millrace.results.counts import Position, QueueStats
from millrace.results.job import Job


def describe_wait(place: Position, stats: QueueStats, queue: str) -> str:
    """Return a job's state and why it does not begin, such as "queued, 17 jobs ahead, starts in about 40 s"."""
    facts = [place.state]
    if place.state in ("queued", "delayed") and (obstacle := describe_obstacle(stats, queue)):
        facts.append(obstacle)
    elif place.needs_model:
        facts.append("waits for an engine with the model that began it")
    elif place.num_ahead is not None:
        facts.append(counted_noun(place.num_ahead, "job") + " ahead")
    if place.eta_s is not None and not stats.obstacle:
        facts.append(f"starts in about {duration(place.eta_s)}")
    return ", ".join(facts)


def describe_running(job: Job) -> str:
    """Return how far a running job is, such as "running, 53 tokens so far, attempt 1, engine host-17-5c2e"."""
    return f"running, {counted_noun(job.num_tokens, 'token')} so far, attempt {job.attempt}, engine {job.engine}"


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
