"""`millrace sleep` and `wake`: running engines give their devices back for a while."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from millrace.cli.exits import OK, TIMED_OUT, CommandError
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import print_json
from millrace.cli.values import seconds

if TYPE_CHECKING:
    from millrace.producer import Client

_LOOK_EVERY_S = 0.1


def add_parsers(verbs: Verbs) -> None:
    sleep = add_verb(
        verbs, "sleep", "have running engines give their devices back; the jobs wait, or go to other engines"
    )
    sleep.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="1: keep the weights in host memory, 2: drop them and read them again (default: %(default)s)",
    )
    wake = add_verb(verbs, "wake", "have sleeping engines take their devices back and go on")
    wake.set_defaults(level=0)
    for parser in (sleep, wake):
        parser.add_argument("--engine", metavar="ID", help="one engine, as `millrace stats` names it (default: all)")
        parser.add_argument(
            "--timeout",
            type=seconds,
            default=300.0,
            metavar="SECONDS",
            help="how long to wait until it is done (default: %(default)g); 0: only tell them",
        )
        add_json(parser)
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tell the engines, wait until they have done it, and print who they are."""
    with open_client(args) as client:
        told = client.sleep(args.level, engine_id=args.engine) if args.level else client.wake(engine_id=args.engine)
        if args.timeout > 0:
            _wait(client, told, args.level, time.monotonic() + args.timeout)
    for engine_id in told:
        if args.json:
            print_json({"engine": engine_id})
        else:
            print(engine_id)
    return OK


def _wait(client: Client, engine_ids: list[str], level: int, deadline_s: float) -> None:
    """Until each of them sleeps so deep, or is awake, or has left."""
    while late := _late(client, engine_ids, level):
        if time.monotonic() > deadline_s:
            done = "asleep" if level else "awake"
            raise CommandError(
                f"not {done} yet: {', '.join(late)}; they will be when they can, or their logs say why", TIMED_OUT
            )
        time.sleep(_LOOK_EVERY_S)


def _late(client: Client, engine_ids: list[str], level: int) -> list[str]:
    now = client.stats().sleep_levels
    return [one for one in engine_ids if one in now and (now[one] < level if level else now[one] > 0)]
