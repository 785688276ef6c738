"""Types of command-line values, for argparse. Their errors say what is valid."""

from __future__ import annotations

import contextlib
import json
import re
from argparse import ArgumentTypeError
from datetime import datetime
from pathlib import Path
from typing import Any


def counted(text: str) -> int:
    """An integer of at least 1."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise ArgumentTypeError(f"must be an integer of at least 1, got {text[:60]!r}")
    return int(text)


def integer(text: str) -> int:
    """Any integer. The request checks its range."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"must be an integer, got {text[:60]!r}") from None


def job_id(text: str) -> str:
    """The id of a new job."""
    from millrace.producer.request import ID_PATTERN

    if not re.fullmatch(ID_PATTERN, text):
        raise ArgumentTypeError(f"must match {ID_PATTERN}, got {text[:60]!r}")
    return text


TO_CONTEXT = "none"
"""`--max-tokens` for the field's value None, as many tokens as the context holds: None is an option that is not given."""


def max_tokens(text: str) -> int | str:
    """An integer, or TO_CONTEXT."""
    return TO_CONTEXT if text == TO_CONTEXT else integer(text)


def number(text: str) -> float:
    """Any number. The request checks its range."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a number, got {text[:60]!r}") from None


def seconds(text: str) -> float:
    """A time to wait, in seconds."""
    wait_s = number(text)
    if not 0 <= wait_s <= 1e9:
        raise ArgumentTypeError(f"must be from 0 to 1e9, got {text[:60]!r}")
    return wait_s


def moment(text: str) -> float:
    """A time, as seconds since the epoch. Fewer than 9 digits are read as a date."""
    try:
        return float(text) if re.fullmatch(r"[0-9]{9,}(\.[0-9]*)?", text) else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        forms = "2030-01-31T18:00 or 2030-01-31T18:00Z, or seconds since the epoch"
        raise ArgumentTypeError(f"must be a time in ISO 8601, as {forms}, got {text[:60]!r}") from error


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. The request checks its content."""
    value: dict[str, Any] = _json(text, dict, """object, as '{"name": 7}'""")
    return value


def json_list(text: str) -> list[Any]:
    """A JSON list. The request checks its content."""
    value: list[Any] = _json(text, list, """list, as '[1, 2]' or '[{"name": 7}]'""")
    return value


def json_list_or_stdin(text: str) -> list[Any] | str:
    """A JSON list, or "-": it is on stdin."""
    return text if text == "-" else json_list(text)


def tool_choice(text: str) -> str | dict[str, Any]:
    """A word, or the function to call as a JSON object. The request checks it."""
    return json_object(text) if text.startswith("{") else text


def text_file(path: str) -> str:
    """The text of a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ArgumentTypeError(f"cannot read {path[:200]!r}: {why}") from error
    if not text.strip():
        raise ArgumentTypeError(f"{path[:200]!r} is empty")
    return text


def not_empty(text: str) -> str:
    """A text that is not empty."""
    if not text:
        raise ArgumentTypeError("must not be empty")
    return text


def json_text(text: str) -> str:
    """A JSON object, or the text of a file with JSON. The request checks its content."""
    if text.lstrip().startswith("{"):
        json_object(text)
        return text
    found = text_file(text)
    try:
        json.loads(found)
    except ValueError as error:
        raise ArgumentTypeError(f"{text[:200]!r} is not valid JSON: {error}") from error
    except RecursionError:
        raise ArgumentTypeError(f"{text[:200]!r} is nested too deeply") from None
    return found


def _json(text: str, kind: type, what: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        if type(value := json.loads(text)) is kind:
            return value
    raise ArgumentTypeError(f"must be a JSON {what}, got {text[:60]!r}")
