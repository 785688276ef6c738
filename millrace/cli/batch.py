"""`millrace batch`: the state of the jobs of a batch."""

from __future__ import annotations

import argparse

from millrace.cli.exits import OK
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import duration, print_json, print_table

_COUNTS = ("queued", "delayed", "running", "finished", "failed", "cancelled", "expired", "total")


def add_parsers(verbs: Verbs) -> None:
    batch = verbs.add_parser("batch", help="show a batch of jobs", description="Show a batch of jobs.")
    status = add_verb(
        batch.add_subparsers(metavar="WHAT", required=True), "status", "count the jobs of a batch by state"
    )
    status.add_argument("batch")
    add_json(status)
    status.set_defaults(run=run_status)


def run_status(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        status = client.batch_status(args.batch)
    if args.json:
        print_json(status)
        return OK
    rows = [(name, str(getattr(status, name))) for name in _COUNTS]
    if status.num_open:
        rows.append(("time left", duration(status.eta_s)))
    print_table(("jobs", "count"), rows)
    return OK
