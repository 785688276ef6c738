"""`millrace stats`: the counts of a queue, and its engines."""

from __future__ import annotations

import argparse

from millrace.cli.exits import OK, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import counted_noun, print_json, print_table
from millrace.cli.values import counted

_STATES = ("awake", "asleep, weights in host memory", "asleep, weights dropped")
"""By sleep level."""


def add_parsers(verbs: Verbs) -> None:
    stats = add_verb(verbs, "stats", "show the job and token counts of a queue, and its engines")
    stats.add_argument(
        "--min-engines", type=counted, metavar="N", help="fail if fewer engines have a heartbeat, for health checks"
    )
    add_json(stats)
    stats.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        counts = client.stats()
    if args.json:
        print_json(counts)
    else:
        names = [name for name in counts.__struct_fields__ if name not in ("is_paused", "sleep_levels")]
        rows = [(name.replace("_", " "), str(getattr(counts, name))) for name in names]
        rows.append(("paused", "yes" if counts.is_paused else "no"))
        rows += [(f"engine {engine_id}", _STATES[level]) for engine_id, level in sorted(counts.sleep_levels.items())]
        print_table(("name", "value"), rows)
    if args.min_engines and counts.engines < args.min_engines:
        verb = "has" if counts.engines == 1 else "have"
        found = counted_noun(counts.engines, "engine")
        raise CommandError(f"queue {args.queue}: {found} {verb} a heartbeat, {args.min_engines} required")
    return OK
