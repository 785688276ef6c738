"""`millrace sleep`, `wake` and `reset-cache`: what an operator asks of running engines."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from millrace.cli.exits import OK, TIMED_OUT, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import print_fields
from millrace.cli.values import seconds

if TYPE_CHECKING:
    from millrace.producer import Client

_POLL_INTERVAL_S = 0.1


def add_parsers(verbs: Verbs) -> None:
    sleep = add_verb(
        verbs, "sleep", run, "free the device memory of engines; jobs wait, or other engines continue them"
    )
    levels = "1: keep the weights in host memory, 2: drop them and read them again later (default: %(default)s)"
    sleep.add_argument("--level", type=int, choices=(1, 2), default=1, help=levels)
    wake = add_verb(verbs, "wake", run, "wake sleeping engines: they use their devices again and continue")
    wake.set_defaults(level=0)
    reset = add_verb(
        verbs, "reset-cache", run_reset, "let engines forget the cached blocks of prompts; running jobs continue"
    )
    for parser in (sleep, wake, reset):
        parser.add_argument("--engine", metavar="ID", help="one engine, by its id in `millrace stats` (default: all)")
        add_json(parser)
    for parser in (sleep, wake):
        limit = "how long to wait until it is done (default: %(default)g); 0: do not wait"
        parser.add_argument("--timeout", type=seconds, default=300.0, metavar="SECONDS", help=limit)


def run(args: argparse.Namespace) -> int:
    """Notify the engines, wait until they are asleep or awake, and print their ids."""
    with open_client(args) as client:
        ids = client.sleep(args.level, engine_id=args.engine) if args.level else client.wake(engine_id=args.engine)
        if args.timeout > 0:
            _wait(client, ids, args.level, time.monotonic() + args.timeout)
    _print_ids(args, ids)
    return OK


def run_reset(args: argparse.Namespace) -> int:
    """Notify the engines, and print their ids."""
    with open_client(args) as client:
        ids = client.reset_prefix_cache(engine_id=args.engine)
    _print_ids(args, ids)
    return OK


def _print_ids(args: argparse.Namespace, engine_ids: list[str]) -> None:
    for engine_id in engine_ids:
        print_fields(engine=engine_id, as_json=args.json)


def _wait(client: Client, engine_ids: list[str], level: int, deadline_s: float) -> None:
    """Wait until each engine has reached the sleep level, or is gone."""
    while True:
        now = client.stats().sleep_levels
        late = [one for one in engine_ids if one in now and (now[one] < level if level else now[one] > 0)]
        if not late:
            return
        if time.monotonic() > deadline_s:
            done = "asleep" if level else "awake"
            raise CommandError(f"not {done} yet: {', '.join(late)}; wait for them, or see their logs", TIMED_OUT)
        time.sleep(_POLL_INTERVAL_S)
