"""How the prompt of a job begins: a text for people, and a number for claims, which prefer jobs with a cached prompt."""

from __future__ import annotations

import json
import re
from zlib import crc32

MAX_CHARS = 200
_MAX_BODY = 1024
_NUM_BYTES = 256
_values = json.JSONDecoder(strict=False)
_SALT = re.compile(rb'{"cache_salt":"[^"]*"')

_CHARACTERS = r'"((?:[^"\\]|\\[^u]|\\u[0-9a-fA-F]{4})*)'
_NAME = re.compile(rf'\s*[{{,]\s*{_CHARACTERS}"\s*:\s*')
_STARTS = {
    "prompt": re.compile(_CHARACTERS),
    "prompt_token_ids": re.compile(r"(\[[0-9,\s]*)"),
    "messages": re.compile(rf'.*?"(?:content|text)"\s*:\s*{_CHARACTERS}', re.DOTALL),
}
"""By the name of a field, what the start of its JSON looks like. A message has a text, or parts with texts."""


def prompt_start(body: bytes) -> str:
    """Return at most MAX_CHARS of the prompt, or of the first text of a chat, in the beginning of a JSON body; "" without
    any, and if it does not begin in this part."""
    text, end = body.decode(errors="ignore"), 0  # the last character may be cut off
    while name := _NAME.match(text, end):
        if name[1] in _STARTS:
            found = _STARTS[name[1]].match(text, name.end())
            start = found[1] if found else ""
            is_list = name[1] == "prompt_token_ids"
            shown = start if is_list else str(json.loads(f'"{start}"', strict=False))
            return shown[:MAX_CHARS].encode(errors="replace").decode()
        try:
            _, end = _values.raw_decode(text, name.end())
        except (ValueError, RecursionError):  # it does not end in this part, or was not checked
            break
    return ""


def prompt_digest(body: bytes) -> str | None:
    """Return 8 hexadecimal digits for the first bytes of the prompt in this JSON, and its salt; None for a short prompt.

    It is a hint: equal prompts have equal digests when their clients write JSON in one way.
    """
    places = (body.find(name, 0, _MAX_BODY) for name in (b'"prompt":', b'"prompt_token_ids":', b'"messages":'))
    field = next((place for place in places if place >= 0), -1)
    if field < 0:
        return None
    start = body.find(b":", field) + 1
    end = start + _NUM_BYTES
    if end > len(body) or end > _MAX_BODY:
        return None
    salt = _SALT.match(body) if body.startswith(b'{"cache_salt"') else None
    return f"{crc32(body[start:end], crc32(salt[0]) if salt else 0):08x}"
