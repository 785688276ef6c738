"""`millrace stats`, `batch`, `pause` and `resume`: the counts of a queue, of a batch, and whether jobs start."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from millrace.cli.exits import OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import print_json, print_table
from millrace.cli.values import counted

if TYPE_CHECKING:
    from millrace.results.messages import QueueStats

_SLEEP_STATES = ("awake", "asleep, weights in host memory", "asleep, weights dropped")
"""By sleep level."""
_QUEUE_COUNTS = ("engines", "queued", "delayed", "running", "finished", "failed")
_BATCH_COUNTS = ("queued", "delayed", "running", "finished", "failed", "cancelled", "expired", "total")


def add_parsers(verbs: Verbs) -> None:
    stats = add_verb(verbs, "stats", "show the job and token counts of a queue, and its engines")
    stats.add_argument(
        "--min-engines", type=counted, metavar="N", help="fail if fewer engines have a heartbeat, for health checks"
    )
    add_json(stats)
    stats.set_defaults(run=run_stats)

    queues = add_verb(
        verbs, "queues", "list the queues of the server, with their counts and why their jobs do not start"
    )
    add_json(queues)
    queues.set_defaults(run=run_queues)

    batch = verbs.add_parser("batch", help="show a batch of jobs", description="Show a batch of jobs.")
    whats = batch.add_subparsers(metavar="WHAT", required=True)
    status = add_verb(whats, "status", "count the jobs of a batch by state")
    status.add_argument("batch")
    add_json(status)
    status.set_defaults(run=run_batch_status)

    pause = add_verb(verbs, "pause", "stop starting jobs; running jobs finish, and new jobs are accepted")
    pause.set_defaults(run=run_pause, is_paused=True)
    resume = add_verb(verbs, "resume", "start the jobs of a paused queue again")
    resume.set_defaults(run=run_pause, is_paused=False)


def run_stats(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        counts = client.stats()
    if args.json:
        print_json(_with_obstacle(counts))
    else:
        names = [name for name in counts.__struct_fields__ if type(getattr(counts, name)) is int]
        rows = [(name.replace("_", " "), str(getattr(counts, name))) for name in names]
        rows.append(("paused", "yes" if counts.is_paused else "no"))
        rows += [(f"engine {engine_id}", _SLEEP_STATES[at]) for engine_id, at in sorted(counts.sleep_levels.items())]
        print_table(("name", "value"), rows)
    if args.min_engines and counts.engines < args.min_engines:
        from millrace.results.waiting import counted_noun

        verb = "has" if counts.engines == 1 else "have"
        found = counted_noun(counts.engines, "engine")
        raise CommandError(f"queue {args.queue}: {found} {verb} a heartbeat, {args.min_engines} required")
    return OK


def run_queues(args: argparse.Namespace) -> int:
    from millrace.results.queue import find_queues

    rows = []
    for name, stats in find_queues(args.redis):
        if args.json:
            print_json({"queue": name, **_with_obstacle(stats)})
        counts = [str(getattr(stats, field)) for field in _QUEUE_COUNTS]
        rows.append((name, *counts, (stats.obstacle or "").replace("_", " ")))
    if not args.json:
        print_table(("queue", *_QUEUE_COUNTS, "obstacle"), rows)
    return OK


def _with_obstacle(stats: QueueStats) -> dict[str, Any]:
    import msgspec

    return {**msgspec.structs.asdict(stats), "obstacle": stats.obstacle}


def run_batch_status(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        status = client.batch_status(args.batch)
    if args.json:
        print_json(status)
        return OK
    rows = [(name, str(getattr(status, name))) for name in _BATCH_COUNTS]
    if status.num_open:
        from millrace.results.waiting import duration

        rows.append(("time left", duration(status.eta_s)))
    print_table(("jobs", "count"), rows)
    return OK


def run_pause(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        client.pause() if args.is_paused else client.resume()
    return OK
