"""`millrace submit`: one prompt, or a file with a job on each line; waits, streams, or leaves the ids and goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from millrace.cli.exits import INVALID, OK, CommandError
from millrace.cli.jobs import follow
from millrace.cli.options import Verbs, add_json, add_verb, open_client
from millrace.cli.output import end_of, print_json, print_text
from millrace.cli.values import integer, json_object, moment, number, seconds

_Option = tuple[str, Callable[[str], Any], str, str]

_SAMPLING: tuple[_Option, ...] = (
    ("--max-tokens", integer, "N", "end after so many tokens"),
    ("--min-tokens", integer, "N", "do not end before so many tokens"),
    ("--temperature", number, "T", "0 takes the likeliest token"),
    ("--top-p", number, "P", "draw from the likeliest tokens that have this share together"),
    ("--top-k", integer, "K", "draw from the K likeliest tokens"),
    ("--min-p", number, "P", "drop tokens below this share of the likeliest one's probability"),
    ("--seed", integer, "N", "the same seed draws the same text"),
)
_QUEUE: tuple[_Option, ...] = (
    ("--tenant", str, "NAME", "on whose account the job runs"),
    ("--priority", integer, "N", "within a tenant; lower first"),
    ("--delay-s", number, "SECONDS", "not before so many seconds from now"),
    (
        "--run-at",
        moment,
        "TIME",
        "not before this time: ISO 8601 (Z is UTC; without a zone it is this machine's time), or seconds since the epoch",
    ),
    ("--deadline-s", number, "SECONDS", "end it as expired after so many seconds from now, wherever it is"),
    ("--max-retries", integer, "N", "how often a failure that may pass is tried again"),
    ("--meta", json_object, "JSON", "an object of yours that is kept with the job, as '{\"customer\": 7}'"),
)
_LISTS: tuple[_Option, ...] = (
    ("--stop", str, "TEXT", "end before this text; may be given more than once"),
    ("--stop-token-ids", integer, "ID", "end at this token; may be given more than once"),
)


def add_parsers(verbs: Verbs) -> None:
    submit = add_verb(verbs, "submit", "put jobs into the queue")
    what = submit.add_mutually_exclusive_group(required=True)
    what.add_argument("prompt", nargs="?", help="the text to go on with; - reads it from stdin")
    what.add_argument(
        "--file", metavar="JSONL", help="a job in JSON on each line; - reads stdin; options fill its gaps"
    )
    submit.add_argument("--id", help="the job's id, [A-Za-z0-9._-] (default: a new one)")
    submit.add_argument("--model", metavar="NAME", help="refuse an engine that serves another model")
    sampling = submit.add_argument_group("sampling (what is left out has the client's default)")
    for option, kind, metavar, text in _SAMPLING:
        sampling.add_argument(option, type=kind, metavar=metavar, help=text)
    for option, kind, metavar, text in _LISTS:
        sampling.add_argument(option, type=kind, metavar=metavar, action="append", help=text)
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's own end")
    place = submit.add_argument_group("the job's place in the queue")
    for option, kind, metavar, text in _QUEUE:
        place.add_argument(option, type=kind, metavar=metavar, help=text)
    place.add_argument(
        "--batch", metavar="NAME", help="put the jobs into this batch, new or not; see `batch status`, `cancel`"
    )
    place.add_argument(
        "--durability",
        choices=("memory", "disk", "replica"),
        default="memory",
        help="return when the server has the jobs in memory, in its append-only file, or on a replica (default: memory)",
    )
    after = submit.add_mutually_exclusive_group()
    after.add_argument(
        "--wait", action="store_true", help="wait and print the answer (with --file: a job a line, JSON)"
    )
    after.add_argument("--stream", action="store_true", help="print the answer while it is generated")
    submit.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="with --wait: give up waiting for the job after so long (a server that is silent is given up after 20 s)",
    )
    add_json(submit)
    submit.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.timeout is not None and not args.wait:
        raise CommandError("--timeout is how long to --wait: give both", INVALID)
    if args.file is None:
        return _submit_prompt(args)
    if args.stream or args.id:
        raise CommandError(f"--file does not go with {'--stream' if args.stream else '--id'}", INVALID)
    from millrace.cli.submit_file import submit_file

    with open_client(args) as client:
        return submit_file(
            client, args.file, given_options(args), _how(args), has_to_wait=args.wait, timeout_s=args.timeout
        )


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The request's fields that the command line states, under their names on the wire."""
    options = [option.removeprefix("--").replace("-", "_") for option, *_ in (*_SAMPLING, *_LISTS, *_QUEUE)]
    values = {name: getattr(args, name) for name in ("model", *options, "ignore_eos")}
    return {name: value for name, value in values.items() if value is not None}


def _how(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the client's `submit` and `submit_many` that are no fields of a request."""
    return {"batch": args.batch, "durability": args.durability}


def _submit_prompt(args: argparse.Namespace) -> int:
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    with open_client(args) as client:
        job_id = client.submit(prompt=prompt, job_id=args.id, stream=args.stream, **_how(args), **given_options(args))
        if args.stream:
            return follow(client, job_id, as_json=args.json)
        if not args.wait:
            print_json({"id": job_id}) if args.json else print(job_id)
            return OK
        job = client.wait(job_id, timeout_s=args.timeout)
    print_json(job) if args.json else print_text(job.text + "\n")
    return end_of(job)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise CommandError(f"stdin: not valid UTF-8 at byte {error.start}", INVALID) from error
