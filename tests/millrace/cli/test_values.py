"""What words on the command line mean."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cli import build_parser, main
from millrace.cli.values import counted, integer, json_object, json_text, moment, number, seconds
from tests.millrace.cli.command import Command, python


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "epoch_s"),
    [
        ("2030-01-31T18:00", 1896130800),
        ("2030-01-31 18:00:00", 1896130800),
        ("2030-07-31T18:00", 1911765600),
        ("2030-01-31T18:00Z", 1896112800),
        ("2030-01-31T18:00+02:00", 1896105600),
        ("2030-01-31", 1896066000),
        ("20300131", 1896066000),
        ("1896130800", 1896130800),
        ("1896130800.5", 1896130800.5),
    ],
)
def test_a_time_without_a_zone_is_this_machines(in_new_york: None, text: str, epoch_s: float) -> None:
    assert moment(text) == epoch_s


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *[
            (moment, text)
            for text in ("", "tomorrow", "nan", "inf", "-5", "60", "18:00", "2030-13-01", "0001-01-01", "\udcff")
        ],
        *[(json_object, text) for text in ("", "{", "[1]", "null", "a=7", "[" * 20_000, "\udcff", "9" * 5000)],
        *[(counted, text) for text in ("", "0", "-1", "1.5", "x", "9" * 5000, "٣")],
        *[(integer, text) for text in ("", "1.5", "many", "9" * 5000)],
        *[(number, text) for text in ("", "hot", "1,5")],
        *[(seconds, text) for text in ("", "nan", "inf", "-1", "x", "1e10")],
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, str) else value.__name__,
)
def test_words_that_mean_nothing_are_refused_with_what_would_be_right(kind: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^must be .*, got '") as caught:
        kind(text)
    assert len(str(caught.value)) < 200


def test_a_job_waits_for_its_time_and_keeps_its_meta(millrace: Command) -> None:
    ran = millrace("submit", "x", "--id", "a", "--run-at", "2100-01-01T00:00Z", "--meta", '{"customer": [7, "é"]}')
    assert (ran.status, ran.err) == (0, "")
    (job,) = millrace("get", "a", "--json").json_lines()
    assert (job["state"], job["meta"]) == ("delayed", {"customer": [7, "é"]})
    assert job["timings"]["due_ms"] == 4_102_444_800_000


@pytest.mark.parametrize(
    ("option", "value"), [("--run-at", "tomorrow"), ("--meta", "customer=7"), ("--tools", "nope"), ("--schema", "{a")]
)
def test_the_option_at_fault_is_named(option: str, value: str) -> None:
    ran = python("-m", "millrace", "submit", "x", option, value)
    assert ran.status == 2
    assert ran.err.startswith(f"millrace submit: argument {option}: must be a ")
    assert "content" not in ran.err


def test_an_empty_file_of_a_form_is_named() -> None:
    ran = python("-m", "millrace", "submit", "x", "--schema", "/dev/null")
    assert (ran.status, ran.err.partition(";")[0]) == (2, "millrace submit: argument --schema: '/dev/null' is empty")


def test_a_schema_is_json_or_a_file_of_json(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(' {"type": "object"}\n')
    assert json_text(str(file)) == file.read_text()
    assert json_text(' {"type": "object"}') == ' {"type": "object"}'
    assert build_parser().parse_args(["submit", "x", "--schema", '{"a": 1}']).form_json == '{"a": 1}'
    assert build_parser().parse_args(["submit", "x", "--structural-tag", "{}"]).form_structural_tag == "{}"
    with pytest.raises(ArgumentTypeError, match=r"^must be a JSON object, as .*, got '\{type'$"):
        json_text("{type")
    for text, wrong in (('{"type"', "is not valid JSON: Expecting ':'"), ("[" * 20_000, "is nested too deeply")):
        file.write_text(text)
        with pytest.raises(ArgumentTypeError, match=f"^'.*schema.json' {wrong}"):
            json_text(str(file))


@pytest.mark.parametrize("option", ["--regex", "--choice"])
def test_the_option_of_an_empty_form_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "x", option, ""])
    assert capsys.readouterr().err.startswith(f"millrace submit: argument {option}: must not be empty; see ")


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("--max-token=5", "did you mean --max-tokens?"),
        ("--mesages", "did you mean --messages?"),
        ("--x", "leave it out"),
        ("--guided-json={}", "use --schema"),
        ("--guided-choice=a", "use --choice"),
        ("--guided-regex=a", "use --regex"),
        ("--response-format=a", "use --schema or --json-object"),
        ("--structured-outputs=a", "use --schema or --json-object"),
    ],
)
def test_an_unknown_option_is_named_with_the_one_that_could_be_meant(
    argument: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "x", argument])
    words = f"millrace submit: unrecognized arguments: {argument} ({rule}); see millrace submit --help\n"
    assert capsys.readouterr().err == words
