"""The command line itself: what it offers and what it refuses."""

from __future__ import annotations

import argparse
import re

import pytest

from millrace import GenerationRequest, SamplingParams, StructuredOutputs, __version__
from millrace.cli import build_parser
from tests.millrace.cli.command import python

VERBS = (
    "demo",
    "serve",
    "submit",
    "wait",
    "get",
    "tail",
    "cancel",
    "ls",
    "retry",
    "batch",
    "stats",
    "queues",
    "settings",
    "pause",
    "resume",
    "sleep",
    "wake",
    "reset-cache",
    "gateway",
)


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def test_help_names_every_verb_and_waits_for_no_import() -> None:
    ran = python("-X", "importtime", "-m", "millrace", "--help")
    imported = set(re.findall(r"\| +(\w+)$", ran.err, re.MULTILINE))
    assert "argparse" in imported and not imported & {"torch", "redis", "msgspec", "rich"}
    assert ran.status == 0
    assert all(re.search(rf"\n    {verb}\s", ran.out) for verb in VERBS)


def test_every_verb_takes_a_server_and_a_queue() -> None:
    for name, parser in verbs_of(build_parser()).items():
        if name == "serve":  # its arguments are the engine's own
            continue
        for leaf in verbs_of(parser).values() or [parser]:
            assert {"--redis", "--queue"} <= leaf._option_string_actions.keys(), leaf.prog


def test_serve_shows_the_help_of_the_engine() -> None:
    ran = python("-m", "millrace", "serve", "--help")
    assert ran.status == 0
    assert "--max-num-batched-tokens" in ran.out
    assert "--drain-grace" in ran.out


def test_the_version_is_printed() -> None:
    assert python("-m", "millrace", "--version").out == f"millrace {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("unknown",),
        ("submit",),
        ("submit", "hello", "--file", "jobs.jsonl"),
        ("submit", "hello", "--wait", "--stream"),
        ("submit", "hello", "--max-tokens", "many"),
        ("submit", "--file", "jobs.jsonl", "--stream"),
        ("submit", "--file", "jobs.jsonl", "--id", "a"),
        ("submit", "--file", "/nowhere/jobs.jsonl"),
        ("get",),
        ("cancel",),
        ("cancel", "a", "--batch", "b"),
        ("wait",),
        ("wait", "a", "--batch", "b"),
        ("retry",),
        ("retry", "a", "--all"),
        ("batch",),
        ("batch", "status"),
        ("submit", "hello", "--durability", "forever"),
        ("submit", "hello", "--priority", "1.5"),
        ("submit", "hello", "--wait", "--timeout", "nan"),
        ("submit", "hello", "--timeout", "5"),
        ("sleep", "--timeout", "nan"),
        ("ls", "--state", "sleeping"),
        ("ls", "--limit", "0"),
        ("sleep", "--level", "3"),
        ("sleep", "engine"),
        ("reset-cache", "engine"),
        ("gateway",),
        ("gateway", "rq"),
        ("gateway", "rq", "--queues", ","),
    ],
)
def test_a_wrong_command_line_ends_with_status_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    ran = python("-m", "millrace", *arguments)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("millrace")
    assert len(ran.err.splitlines()) == 1


ODD = "a\nb\x1b[31m\u2028" + "x" * 9000


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "a", ODD),
        ("sub" + ODD,),
        ("submit", "x", "--" + ODD),
        ("submit", "x", "--max-tokens", ODD),
        ("submit", "--file", "/" + ODD),
        ("ls", "--state", ODD),
        ("stats", "--queue", ODD),
        ("stats", "--redis", ODD),
        ("stats", "--redis", f"redis://{ODD}"),
        ("stats", "--redis", f"unix:///{ODD}"),
        ("get", ODD),
    ],
    ids=lambda arguments: repr(arguments)[:40],
)
def test_whatever_the_arguments_are_the_error_is_one_short_line(arguments: tuple[str, ...], redis_url: str) -> None:
    ran = python("-m", "millrace", *arguments, MILLRACE_REDIS_URL=redis_url)
    assert ran.status in (2, 3, 4)
    assert ran.out == ""
    assert ran.err.endswith("\n")
    assert ran.err[:-1].isprintable()
    assert len(ran.err) < 500


WITHOUT_OPTION = {
    "given_as": "says that a form was given as response_format or response_model",
    "response_format": "--schema, --json-object and --structural-tag say the same",
    "sampling": "each of its fields has an option",
    "structured_outputs": "each of its fields has an option",
}
"""Fields of a request that `millrace submit` cannot set, and why."""


def test_each_field_of_a_request_has_an_option_of_submit() -> None:
    dests = {action.dest.removeprefix("form_") for action in verbs_of(build_parser())["submit"]._actions}
    requests = (GenerationRequest, SamplingParams, StructuredOutputs)
    assert {name for kind in requests for name in kind.__struct_fields__} - dests == WITHOUT_OPTION.keys()


@pytest.mark.parametrize("verb", [(), ("serve",), ("submit",), ("gateway", "rq")])
def test_the_help_fits_a_terminal_of_80_columns(verb: tuple[str, ...]) -> None:
    assert max(map(len, python("-m", "millrace", *verb, "--help", COLUMNS="80").out.splitlines())) <= 80
