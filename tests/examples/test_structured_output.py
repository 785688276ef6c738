"""The example of structured output shows texts of each form."""

from __future__ import annotations

import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

from jsonschema import validate

from examples.structured_output import PERSON

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "structured_output.py"


def test_each_text_has_its_form() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = {line[:10].strip(): literal_eval(line[10:].strip()) for line in done.stdout.splitlines()}
    validate(found["parsed"], PERSON)
    assert re.fullmatch(r"[0-9]{1,3} (km|miles)", found["regex"])
    assert found["choice"] in ("good", "bad")
    assert re.fullmatch(r"[0-9]{1,2}( \+ [0-9]{1,2}){1,3}", found["grammar"])
