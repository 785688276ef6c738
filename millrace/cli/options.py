"""Arguments that several verbs share, and what verbs make of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.producer import Client

Verbs = Any
"""What `add_subparsers` returns; argparse keeps the type private."""


def add_verb(verbs: Verbs, name: str, summary: str, **options: Any) -> argparse.ArgumentParser:
    """Add a verb with the options that every verb has."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False, **options
    )
    parser.add_argument("--redis", metavar="URL", help="the Redis or Valkey server; every redis-py URL works")
    parser.add_argument("--queue", default="default", metavar="NAME", help="the queue (default: %(default)s)")
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line, for machines")


def open_client(args: argparse.Namespace) -> Client:
    """The client of the server and queue that the command line names."""
    from millrace import Client

    return Client(args.redis, queue=args.queue)
