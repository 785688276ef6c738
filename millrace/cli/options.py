"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.cli.reconnecting_client import ReconnectingClient
    from millrace.producer import Client

Verbs = Any
"""The result of `add_subparsers`, whose type is private to argparse."""


def add_verb(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    queue: str | None = "default",
    **options: Any,
) -> argparse.ArgumentParser:
    """Add a verb with the options of every verb. `run` does its work and returns the exit status. `queue`: the default of
    --queue; None stands for all queues."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False, **options
    )
    parser.add_argument("--redis", metavar="URL", help="Redis server; see `millrace --help` for the default")
    text = "the queue (default: %(default)s)" if queue else "only this queue (default: all)"
    parser.add_argument("--queue", default=queue, metavar="NAME", help=text)
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")


def open_client(args: argparse.Namespace) -> Client:
    """Return a client for the server and the queue of the command line."""
    from millrace import Client

    return Client(args.redis, queue=args.queue)


def open_reconnecting_client(args: argparse.Namespace) -> ReconnectingClient:
    """Return such a client for a verb that waits."""
    from millrace.cli.reconnecting_client import ReconnectingClient

    return ReconnectingClient(args.redis, queue=args.queue)


def command_line(args: argparse.Namespace, *words: str) -> str:
    """Return a command for the server and the queue of this command line, to be copied into a shell."""
    place = [] if args.queue == "default" else ["--queue", args.queue]
    if args.redis:
        place += ["--redis", "URL" if "@" in args.redis else args.redis]  # it may contain a password
    return shlex.join(["millrace", *words, *place])
