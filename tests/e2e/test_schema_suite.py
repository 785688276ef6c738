"""The public JSON Schema test suite, as jsonschema's source distribution has it, against the grammars of its schemas."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.matchers import accepts_value, checked, matcher_for
from tests.package_index import download
from tests.processes import ROOT

pytestmark = pytest.mark.slow

DOCUMENT = ROOT / "docs" / "structured-output.md"
DRAFT = "json/tests/draft2020-12"
NOT_CHECKED = {"format", "refRemote", "vocabulary", "unknown"}
"""Files of the suite where formats are remarks, or with schemas in other documents."""
REMARKS = {
    *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
    *("uri-reference", "uri-template", "ecmascript-regex"),
}
"""Formats without effect, by file of the suite."""
DEPARTURES = {
    "date": "29 days in February|leap year",
    "date-time": "leap second",
    "time": "leap second",
    "email": "quoted string|IPv6-address-literal",
    "ipv6": "ipv4|mixed format|a long valid",
}
"""Tests by file that come out differently: dates that the calendar lacks, and rare forms of addresses."""


class Case(NamedTuple):
    file: str
    schema: Any
    tests: list[dict[str, Any]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("suite")
    name = f"jsonschema-{version('jsonschema')}"
    with tarfile.open(download("jsonschema", f"{name}.tar.gz", folder)) as files:
        members = [member for member in files if member.name.startswith(f"{name}/{DRAFT}")]
        files.extractall(folder, members, filter="data")
    return list(_cases(folder / name / DRAFT))


def _cases(folder: Path) -> Iterator[Case]:
    for path in sorted([*folder.glob("*.json"), *folder.glob("optional/format/*.json")]):
        if path.stem not in NOT_CHECKED | (REMARKS if path.parent.name == "format" else set()):
            for case in json.loads(path.read_text()):
                yield Case(path.stem, case["schema"], case["tests"])


def documented(heading: str) -> set[str]:
    """Return the names in code font of a section of the document."""
    section = DOCUMENT.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`([$\w-]+)`", section))


def test_instances_are_accepted_exactly_if_they_are_valid(cases: list[Case]) -> None:
    num_checked, wrong = 0, []
    for case in cases:
        if checked(case.schema).error:
            continue
        matcher = matcher_for(case.schema)
        for test in case.tests:
            num_checked += 1
            is_known = re.search(DEPARTURES.get(case.file, "$^"), test["description"])
            if accepts_value(matcher, test["data"]) != test["valid"] and not is_known:
                wrong.append((case.file, test["description"], case.schema, test["data"]))
    assert wrong == []
    assert num_checked > 800


def test_what_is_refused_is_named_and_documented(cases: list[Case]) -> None:
    supported, unsupported = documented("Supported keywords"), documented("Unsupported keywords")
    assert supported and unsupported and not supported & unsupported
    for case in cases:
        if error := checked(case.schema).error:
            names = set(re.findall(r'"([$\w]+)"', error.partition("keys: ")[2]))
            names |= set(re.findall(r"Unknown format: ([\w-]+)", error))
            assert names <= unsupported, error
            reasons = "|".join(REASONS)
            assert names or re.search(reasons, error), error
        elif isinstance(case.schema, dict):
            found = {
                name for name in unsupported & case.schema.keys() if (name, case.schema[name]) not in SUPPORTED_VALUES
            }
            assert not found, case


SUPPORTED_VALUES: list[tuple[str, Any]] = [
    *(("uniqueItems", False), ("unevaluatedItems", True), ("unevaluatedProperties", True)),
    *(("propertyNames", names) for names in ({"pattern": "^a+$"}, {"const": "foo"}, {"enum": ["foo", "bar"]})),
]
"""Of keywords that are refused with other values."""
REASONS = (
    "schema is false",
    "oneOf is supported only where",
    "are not disjoint",
    "Expected positive integer for .*, got [0-9]+.0",
    "has too many digits",
    "only references within the schema",
)
"""Errors that name no keyword: a schema that nothing satisfies, and what the document says of single keywords."""
