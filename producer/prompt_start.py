"""How the prompt of a job begins, for people who look at a queue."""

from __future__ import annotations

import json
import re

MAX_CHARS = 200

_TEXT = re.compile(
    rb'"(?:prompt|content|prompt_token_ids)"\s*:\s*(?:"((?:[^"\\]|\\[^u]|\\u[0-9a-fA-F]{4})*)|(\[[0-9,\s]*))'
)


def prompt_start(body: bytes) -> str:
    """Return at most MAX_CHARS of the prompt, or of the first message, in the beginning of a JSON body; "" without any."""
    found = _TEXT.search(body)
    if found is None:
        return ""
    if found[2] is not None:
        return found[2].decode()[:MAX_CHARS]
    text = found[1].decode(errors="ignore")  # the last character may be cut off
    return str(json.loads(f'"{text}"', strict=False))[:MAX_CHARS].encode(errors="replace").decode()
