"""The example of sampling parameters shows what they do."""

from __future__ import annotations

import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

from millrace import SamplingParams

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "sampling_parameters.py"


def test_each_parameter_changes_the_text() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        found.setdefault(line[:22].strip(), []).append(literal_eval(line[23:]))
    first, second = found.pop("n")
    assert first == found["random"][0] != second
    ids, logprobs = found.pop("detokenize")[0], found.pop("prompt_logprobs")[0]
    assert ids and len(logprobs) > 1
    texts = {name: str(text) for name, (text,) in found.items()}
    assert len(texts) == 21
    assert all(text != texts["greedy"] for name, text in texts.items() if name != "greedy")
    assert all(text != texts["random"] for name, text in texts.items() if name != "random")
    assert len({texts[name] for name in ("min_tokens", "ignore_eos", "skip_special_tokens")}) == 3
    assert "snowy" not in texts["bad_words"]
    assert texts["allowed_token_ids"].isdigit()
    assert texts["stop, included"] == texts["stop"] + "fox"


def test_every_parameter_has_an_example() -> None:
    examples = "".join(path.read_text() for path in SCRIPT.parent.glob("*.py"))
    missing = [name for name in SamplingParams.__struct_fields__ if not re.search(rf'"{name}"|\b{name}=', examples)]
    assert not missing
