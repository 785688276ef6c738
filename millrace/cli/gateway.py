"""`millrace gateway rq`: run jobs that were enqueued with RQ, and return their results to RQ."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec

from millrace.cli.exits import OK, CommandError
from millrace.cli.options import Verbs, add_verb
from millrace.cli.values import counted

DEFAULT_MAX_IN_FLIGHT = 1024
"""Enough for a few engines of 256 sequences each. More jobs wait in RQ's queue."""


def add_parsers(verbs: Verbs) -> None:
    gateway = verbs.add_parser("gateway", help="run the jobs of another queue system")
    kinds = gateway.add_subparsers(title="kinds", metavar="KIND", required=True)
    summary = "run jobs from RQ queues and return their results to RQ"
    rq = add_verb(kinds, "rq", run_rq, summary)
    rq.add_argument("--queues", required=True, type=_names, metavar="A,B", help="RQ queues, the most important first")
    name = "another name of --queue: the Millrace queue that runs the jobs"
    rq.add_argument("--to-queue", dest="queue", default=argparse.SUPPRESS, metavar="NAME", help=name)
    most = "hold at most N RQ jobs at a time (default: %(default)s)"
    rq.add_argument("--max-in-flight", type=counted, default=DEFAULT_MAX_IN_FLIGHT, metavar="N", help=most)
    rq.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="text lines, or one JSON object a line"
    )
    rq.add_argument("--check", action="store_true", help="exit with 0 if such a gateway runs on this host, else with 1")


def run_rq(args: argparse.Namespace) -> int:
    if find_spec("rq") is None:
        raise CommandError("the RQ gateway needs rq; run in the checkout: pip install '.[gateway]'")
    from millrace.executor.logs import FORMAT_VARIABLE, set_up_logs
    from millrace.producer.rq.gateway import is_running_here, serve

    if not args.check:
        os.environ[FORMAT_VARIABLE] = args.log_format
        set_up_logs("INFO")
        serve(args.redis, args.queues, args.queue, args.max_in_flight)
    elif not is_running_here(args.redis, args.queues, args.queue):
        raise CommandError("no gateway on this host serves these queues")
    return OK


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("must name at least one queue")
    return names
