"""The `millrace` command: parse the arguments, run one verb, and turn errors into one line and an exit status.

Neither this module nor the verbs' modules import more than the standard library before a verb runs. The verbs are imported
where Ctrl-C is handled already.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from millrace import __version__
from millrace.cli.exits import CLOSED_PIPE, INTERRUPTED, INVALID, CommandError, as_exit

_DESCRIPTION = "Turn a Redis that you already run into an LLM generation service."
_EPILOG = """\
The server is the first of: --redis, MILLRACE_REDIS_URL, the text of the file
that MILLRACE_REDIS_URL_FILE names, REDIS_URL, redis://localhost:6379/0.

Exit status: 0 success, 1 a job or the program failed, 2 the command or a
request is not valid, 3 no such job, batch or engine, 4 the Redis server cannot
be used, 5 timed out, 130 interrupted, 141 stdout was closed by its reader."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escape what the terminal's encoding lacks
    try:
        if arguments[:1] == ["serve"]:  # the engine parses the rest, --help too
            from millrace.cli import serve

            return serve.run(arguments[1:])
        if sys.stdout is None:
            raise CommandError("stdout is closed; to print nothing, redirect it to /dev/null", INVALID)
        args = build_parser().parse_args(arguments)
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as in `millrace ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        status, message = as_exit(error)
        print(f"millrace: {message}", file=sys.stderr)
    return status


_FORM_OPTIONS = {
    **dict.fromkeys(("--guided-json", "--json-schema", "--response-model", "--format"), "--schema"),
    **dict.fromkeys(("--response-format", "--structured-outputs"), "--schema or --json-object"),
    "--guided-choice": "--choice",
    "--guided-regex": "--regex",
    "--guided-grammar": "--grammar",
}
"""Options that ask for a form of the output, by vLLM's names and those of requests, and ours."""


class _Parser(argparse.ArgumentParser):
    """Prints an error as one line, as every verb does, and the usage only for --help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Raises for the first unknown argument, so that the verb's own parser knows what could be meant."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from millrace.producer.checks import remedy

            option = unknown[0].partition("=")[0]
            rule = remedy(option, self._option_string_actions)
            if (instead := _FORM_OPTIONS.get(option)) and instead.split()[0] in self._option_string_actions:
                rule = f"use {instead}"
            self.error(f"unrecognized arguments: {' '.join(unknown)} ({rule})")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        from millrace.results.errors import one_line

        self.exit(INVALID, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs. The `run` of a parsed namespace does the work."""
    from millrace.cli import demo, engines, gateway, jobs, queue, retry, run_batch, serve, submit, wait

    parser = _Parser(
        prog="millrace",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"millrace {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for module in (demo, serve, submit, run_batch, wait, jobs, retry, queue, engines, gateway):
        module.add_parsers(verbs)
    return parser
