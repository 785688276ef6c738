"""`millrace stats`, `batch`, `pause` and `resume`: the counts of a queue, of a batch, and whether jobs start."""

from __future__ import annotations

import argparse

from millrace.cli.exits import OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import counted_noun, duration, print_json, print_table
from millrace.cli.values import counted

_SLEEP_STATES = ("awake", "asleep, weights in host memory", "asleep, weights dropped")
"""By sleep level."""
_BATCH_COUNTS = ("queued", "delayed", "running", "finished", "failed", "cancelled", "expired", "total")


def add_parsers(verbs: Verbs) -> None:
    stats = add_verb(verbs, "stats", "show the job and token counts of a queue, and its engines")
    stats.add_argument(
        "--min-engines", type=counted, metavar="N", help="fail if fewer engines have a heartbeat, for health checks"
    )
    add_json(stats)
    stats.set_defaults(run=run_stats)

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
        print_json(counts)
    else:
        names = [name for name in counts.__struct_fields__ if name not in ("is_paused", "sleep_levels")]
        rows = [(name.replace("_", " "), str(getattr(counts, name))) for name in names]
        rows.append(("paused", "yes" if counts.is_paused else "no"))
        rows += [(f"engine {engine_id}", _SLEEP_STATES[at]) for engine_id, at in sorted(counts.sleep_levels.items())]
        print_table(("name", "value"), rows)
    if args.min_engines and counts.engines < args.min_engines:
        verb = "has" if counts.engines == 1 else "have"
        found = counted_noun(counts.engines, "engine")
        raise CommandError(f"queue {args.queue}: {found} {verb} a heartbeat, {args.min_engines} required")
    return OK


def run_batch_status(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        status = client.batch_status(args.batch)
    if args.json:
        print_json(status)
        return OK
    rows = [(name, str(getattr(status, name))) for name in _BATCH_COUNTS]
    if status.num_open:
        rows.append(("time left", duration(status.eta_s)))
    print_table(("jobs", "count"), rows)
    return OK


def run_pause(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        client.pause() if args.is_paused else client.resume()
    return OK
