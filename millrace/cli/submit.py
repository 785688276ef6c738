"""`millrace submit`: submit one prompt, or a file with one job per line; wait, stream, or print the ids."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

from millrace.cli.exits import INVALID, OK, CommandError
from millrace.cli.jobs import follow
from millrace.cli.known_jobs import report_known
from millrace.cli.options import Verbs, add_json, add_verb, command_line, open_reconnecting_client
from millrace.cli.output import print_fields, stdin
from millrace.cli.values import (
    TO_CONTEXT,
    integer,
    job_id,
    json_list,
    json_list_or_stdin,
    json_object,
    json_text,
    max_tokens,
    moment,
    not_empty,
    number,
    text_file,
    tool_choice,
)
from millrace.cli.wait import add_timeout, wait_for_job
from millrace.cli.wait_report import resumable, warn_if_never_served

_Option = tuple[str, Callable[[str], Any] | bool, str, str]
"""Name, type, name of the value and help. A bool is what the option, which has no value, sets."""

_SAMPLING: tuple[_Option, ...] = (
    ("--max-tokens", max_tokens, "N", "generate at most N tokens (default: 16); none: up to the length of the context"),
    ("--min-tokens", integer, "N", "generate at least N tokens"),
    ("--temperature", number, "T", "randomness of the choice of tokens; 0: the likeliest token (default: 1.0)"),
    ("--top-p", number, "P", "sample from the likeliest tokens whose probabilities add up to P"),
    ("--top-k", integer, "K", "sample from the K likeliest tokens"),
    ("--n", integer, "N", "generate N texts, the candidates of the job"),
    ("--min-p", number, "P", "drop tokens less likely than P times the likeliest token"),
    ("--seed", integer, "N", "the same seed gives the same text"),
    ("--presence-penalty", number, "X", "make tokens that the text has less likely, -2 to 2"),
    ("--frequency-penalty", number, "X", "the same, for each time that the text has them"),
    ("--repetition-penalty", number, "X", "divide the logits of tokens that the prompt or the text has (1: off)"),
    ("--logit-bias", json_object, "JSON", "numbers to add to the logits of token ids, such as '{\"42\": -100}'"),
    ("--thinking-token-budget", integer, "N", "end the model's thinking after N tokens"),
    ("--truncate-prompt-tokens", integer, "N", "keep the last N tokens of the prompt; -1: what fits the context"),
    ("--logprobs", integer, "N", "for get --json: log-probabilities of each token and of the N likeliest ones"),
    ("--prompt-logprobs", integer, "N", "the same for the tokens of the prompt"),
    ("--stop", str, "TEXT", "end before this text; can be repeated"),
    ("--stop-token-ids", integer, "ID", "end at this token; can be repeated"),
    ("--bad-words", str, "TEXT", "do not generate this text; can be repeated"),
    ("--allowed-token-ids", integer, "ID", "generate no other tokens than this one; can be repeated"),
    ("--ignore-eos", True, "", "continue after an end-of-sequence token"),
    ("--include-stop-str-in-output", True, "", "let the text have the stop string that ends it"),
    ("--no-skip-special-tokens", False, "", "let the text have special tokens"),
    ("--no-spaces-between-special-tokens", False, "", "put no spaces between special tokens that follow one another"),
    ("--no-detokenize", False, "", "make no text: get --json shows the token ids"),
)
_REPEATED = {"--stop", "--stop-token-ids", "--bad-words", "--allowed-token-ids", "--choice"}
_QUEUE: tuple[_Option, ...] = (
    ("--tenant", str, "NAME", "the account that the job belongs to"),
    ("--priority", integer, "N", "order within a tenant; lower numbers first"),
    ("--delay-s", number, "SECONDS", "start the job after this delay at the earliest"),
    ("--run-at", moment, "TIME", "start the job then at the earliest: ISO 8601, with Z for UTC, or seconds since 1970"),
    ("--deadline-s", number, "SECONDS", "let the job expire after this time, also while it runs"),
    ("--max-retries", integer, "N", "how often to try again after a temporary failure"),
    ("--cache-salt", str, "TEXT", "share cached prompts only with jobs of the same salt"),
    ("--meta", json_object, "JSON", "a JSON object of your own to keep with the job, such as '{\"customer\": 7}'"),
)
_CHAT: tuple[_Option, ...] = (
    ("--tools", json_list, "JSON", "the functions that the model may call, as a JSON list in OpenAI's form"),
    ("--tool-choice", tool_choice, "CHOICE", "auto (default), none, required, or a function as a JSON object"),
    ("--no-parallel-tool-calls", False, "", "count only the first tool call of an output"),
    ("--no-add-generation-prompt", False, "", "end the prompt after the last message, before the assistant's turn"),
    ("--chat-template-kwargs", json_object, "JSON", "variables for the template, as '{\"enable_thinking\": false}'"),
    ("--continue-final-message", True, "", "continue the text of the last message"),
)
_FORMS: dict[str, _Option] = {
    "json": (
        "--schema",
        json_text,
        "FILE",
        "JSON that the JSON schema in this file accepts; the schema itself works too",
    ),
    "regex": ("--regex", not_empty, "REGEX", "a match of this regular expression"),
    "choice": ("--choice", not_empty, "TEXT", "one of these texts; can be repeated"),
    "grammar": ("--grammar", text_file, "FILE", "a text of the grammar in this file, in llguidance's Lark syntax"),
    "json_object": ("--json-object", True, "", "a JSON object"),
    "structural_tag": (
        "--structural-tag",
        json_text,
        "FILE",
        "text with JSON parts: structural tags, in a file or as JSON",
    ),
}
"""By the field of `structured_outputs`."""


def add_parsers(verbs: Verbs) -> None:
    submit = add_verb(verbs, "submit", run, "submit jobs")
    what = submit.add_mutually_exclusive_group(required=True)
    what.add_argument("prompt", nargs="?", help="the text to continue; - reads it from stdin")
    chat_help = "a chat instead of a prompt: a JSON list of messages with role and content"
    what.add_argument("--messages", type=json_list, metavar="JSON", help=chat_help)
    ids_help = "the tokens of the prompt instead of its text: a JSON list of token ids; - reads it from stdin"
    what.add_argument("--prompt-token-ids", type=json_list_or_stdin, metavar="JSON", help=ids_help)
    file_help = "submit one JSON job per line (- is stdin); options fill the gaps of a line"
    what.add_argument("--file", metavar="JSONL", help=file_help)
    submit.add_argument("--id", type=job_id, help="the job's id, of [A-Za-z0-9._-] (default: a random one)")
    submit.add_argument("--model", metavar="NAME", help="fail the job if the queue serves another model")
    _add_group(submit, "sampling", {_field(option[0]): option for option in _SAMPLING})
    _add_group(submit, "the form of the output, one of", {f"form_{name}": option for name, option in _FORMS.items()})
    _add_group(submit, "a chat", {_field(option[0]): option for option in _CHAT})
    place = _add_group(submit, "the job's place in the queue", {_field(option[0]): option for option in _QUEUE})
    place.add_argument(
        "--batch",
        metavar="NAME",
        help="add the jobs to this batch (with --file the default is a new one); see `millrace batch status`",
    )
    place.add_argument(
        "--durability",
        choices=("memory", "disk", "replica"),
        default="memory",
        help="return when the server has the jobs in memory, in its append-only file, or on a replica (default: memory)",
    )
    after = submit.add_mutually_exclusive_group()
    after.add_argument(
        "--wait", action="store_true", help="wait and print the text (with --file: one JSON object per job)"
    )
    after.add_argument(
        "--stream", action="store_true", help="print the text while it is generated; other candidates follow at the end"
    )
    add_timeout(submit, "with --wait: stop waiting after this time")
    add_json(submit)


def _add_group(parser: argparse.ArgumentParser, title: str, options: dict[str, _Option]) -> Any:
    """Add a group of options, by the name of the field that each one sets."""
    group = parser.add_argument_group(title)
    for dest, (option, kind, metavar, text) in options.items():
        if isinstance(kind, bool):
            action = "store_true" if kind else "store_false"
            group.add_argument(option, dest=dest, action=action, default=None, help=text)
        else:
            action = "append" if option in _REPEATED else "store"
            group.add_argument(option, dest=dest, type=kind, metavar=metavar, action=action, help=text)
    return group


def add_sampling_options(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Add the options that set these fields of a request."""
    known = {_field(option[0]): option for option in _SAMPLING}
    _add_group(parser, "sampling parameters of lines that lack them", {name: known[name] for name in names})


def run(args: argparse.Namespace) -> int:
    if args.timeout is not None and not args.wait:
        raise CommandError("--timeout needs --wait", INVALID)
    if args.file is None:
        return _submit_prompt(args)
    if args.stream or args.id:
        raise CommandError(f"--file cannot be combined with {'--stream' if args.stream else '--id'}", INVALID)
    from millrace.cli.submit_file import submit_file

    with open_reconnecting_client(args) as client:
        return submit_file(client, args, given_options(args))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the request that the command line sets."""
    names = ["model", *(_field(option) for option, *_ in (*_SAMPLING, *_CHAT, *_QUEUE))]
    values = {name: getattr(args, name) for name in names}
    forms = {name: getattr(args, f"form_{name}") for name in _FORMS}
    values["structured_outputs"] = {name: value for name, value in forms.items() if value is not None} or None
    if args.continue_final_message:
        values["add_generation_prompt"] = False
    given = {name: value for name, value in values.items() if value is not None}
    return {**given, "max_tokens": None} if args.max_tokens == TO_CONTEXT else given


def _field(option: str) -> str:
    return option.removeprefix("--").removeprefix("no-").replace("-", "_")


def _submit_prompt(args: argparse.Namespace) -> int:
    from millrace.results.server_errors import is_refusal

    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    ids = _read_list() if args.prompt_token_ids == "-" else args.prompt_token_ids
    with open_reconnecting_client(args) as client:
        known = client.look_up([args.id]) if args.id and not args.wait and not args.stream else {}
        options = {"messages": args.messages, "prompt_token_ids": ids, **given_options(args)}
        job_id = args.id or os.urandom(16).hex()
        what, way = f"job {job_id!r} may be in the queue", f"see: {command_line(args, 'get', job_id)}"
        with resumable(
            lambda: (what, way), may_have_begun=lambda error: client.has_connected and not is_refusal(error)
        ):
            client.submit(
                prompt=prompt,
                job_id=job_id,
                stream=args.stream,
                batch=args.batch,
                durability=args.durability,
                **options,
            )
        if args.stream:
            return follow(client, args, job_id)
        if args.wait:
            return wait_for_job(client, args, job_id)
        report_known(args, known, 0)
        warn_if_never_served(client, args.queue)
        try:
            print_fields(id=job_id, as_json=args.json)
            sys.stdout.flush()
        except OSError as error:
            raise CommandError(
                f"job {job_id!r} is in the queue, but stdout can't be written: {error.strerror}"
            ) from error
    return OK


def _read_list() -> list[Any]:
    try:
        return json_list(_read_stdin())
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"stdin: {error}", INVALID) from error


def _read_stdin() -> str:
    try:
        return stdin().read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise CommandError(f"stdin: not valid UTF-8 at byte {error.start}", INVALID) from error
