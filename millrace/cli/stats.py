"""`millrace stats`: the counts of one queue, and who drains it."""

from __future__ import annotations

import argparse

from millrace.cli.exits import OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import print_json, print_table
from millrace.cli.values import counted

_STATES = ("awake", "asleep, weights in host memory", "asleep, weights dropped")
"""By sleep level."""


def add_parsers(verbs: Verbs) -> None:
    stats = add_verb(verbs, "stats", "count a queue's jobs and generated tokens, and name its engines")
    stats.add_argument(
        "--min-engines", type=counted, metavar="N", help="fail when fewer engines have a heartbeat, for health checks"
    )
    add_json(stats)
    stats.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        counts = client.stats()
    if args.json:
        print_json(counts)
    else:
        names = [name for name in counts.__struct_fields__ if name != "sleep_levels"]
        rows = [(name.replace("_", " "), str(getattr(counts, name))) for name in names]
        rows += [(f"engine {engine_id}", _STATES[level]) for engine_id, level in sorted(counts.sleep_levels.items())]
        print_table(("what", "count"), rows)
    if args.min_engines and counts.engines < args.min_engines:
        raise CommandError(f"queue {args.queue}: {counts.engines} engines have a heartbeat, not {args.min_engines}")
    return OK
