"""The `millrace` command: reads the arguments, runs one verb, and turns errors into one sentence and an exit status.

Nothing here or in a verb's module imports more than the standard library before the verb runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from millrace import __version__
from millrace.cli import batch, demo, gateway, jobs, pause, retry, serve, sleep, stats, submit
from millrace.cli.exits import INTERRUPTED, INVALID, OTHER, as_exit

_DESCRIPTION = "Jobs in, tokens out: an LLM generation service on a Redis that you already run."
_EPILOG = """\
The server is --redis, else MILLRACE_REDIS_URL, else REDIS_URL, else redis://localhost:6379/0.

Exit status: 0 all went well, 1 a job or the program failed, 2 the command or a request is not valid,
3 no such job, batch or engine, 4 the Redis server cannot be used, 5 the time was up, 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["serve"]:  # all that follows belongs to the engine, --help too
            return serve.run(arguments[1:])
        args = build_parser().parse_args(arguments)
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `millrace ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OTHER
    except Exception as error:
        status, sentence = as_exit(error)
        print(f"millrace: {sentence}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as every verb does, and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(INVALID, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every verb. `parse_args` gives a namespace whose `run` does the work."""
    parser = _Parser(
        prog="millrace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"millrace {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for module in (demo, serve, submit, jobs, retry, batch, stats, pause, sleep, gateway):
        module.add_parsers(verbs)
    return parser
