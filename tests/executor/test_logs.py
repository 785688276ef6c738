"""The lines of the log."""

from __future__ import annotations

import json
import logging
import re
import sys

from millrace.executor.logs import JsonFormatter, TextFormatter

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


def record(*arguments: object, **extra: object) -> logging.LogRecord:
    try:
        raise ValueError("a\nb")
    except ValueError:
        made = logging.LogRecord("millrace.engine", logging.WARNING, "x.py", 1, "%s jobs", arguments, sys.exc_info())
    made.__dict__.update(extra)
    return made


def test_a_text_line_has_the_time_zone() -> None:
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s").format(record(3))
    assert re.fullmatch(f"{TIME} WARNING millrace.engine: 3 jobs", text.splitlines()[0])


def test_a_json_line_is_one_object_with_the_fields_of_the_call_and_the_traceback() -> None:
    text = JsonFormatter().format(record('"\n', fields={"running": 2}))
    assert "\n" not in text
    line = json.loads(text)
    assert re.fullmatch(TIME, line.pop("time"))
    assert line.pop("exception").startswith("Traceback")
    assert line == {"level": "WARNING", "logger": "millrace.engine", "message": '"\n jobs', "running": 2}
