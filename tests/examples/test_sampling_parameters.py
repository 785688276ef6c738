"""The example of sampling parameters shows what they do."""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "sampling_parameters.py"


def test_each_parameter_changes_the_text() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    texts = {line[:20].strip(): str(literal_eval(line[20:].strip())) for line in done.stdout.splitlines()}
    assert len(texts) == 8
    assert all(text != texts["plain"] for name, text in texts.items() if name != "plain"), texts
    assert "snowy" not in texts["bad_words"]
    assert texts["allowed_token_ids"].isdigit()
    assert texts["stop, included"].endswith("fox")
