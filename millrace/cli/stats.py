"""`millrace stats`: the counts of one queue."""

from __future__ import annotations

import argparse

from millrace.cli.exits import OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, counted, open_client
from millrace.cli.output import print_json, print_table


def add_parsers(verbs: Verbs) -> None:
    stats = add_verb(verbs, "stats", "count a queue's jobs, engines and generated tokens")
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
        rows = [(name.replace("_", " "), str(getattr(counts, name))) for name in counts.__struct_fields__]
        print_table(("what", "count"), rows)
    if args.min_engines and counts.engines < args.min_engines:
        raise CommandError(f"queue {args.queue}: {counts.engines} engines have a heartbeat, not {args.min_engines}")
    return OK
