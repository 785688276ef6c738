"""How the prompt of a job begins: a text for people, and a number for claims, which prefer jobs with a cached prompt."""

from __future__ import annotations

import json
import re
from zlib import crc32

MAX_CHARS = 200
_MAX_BODY = 1024
_NUM_BYTES = 256
_SALT = re.compile(rb'{"cache_salt":"[^"]*"')

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


def prompt_digest(body: bytes) -> str | None:
    """Return 8 hexadecimal digits for the first bytes of the prompt in this JSON, and its salt; None for a short prompt.

    It is a hint: equal prompts have equal digests when their clients write JSON in one way.
    """
    field = body.find(b'"prompt', 0, _MAX_BODY)  # or prompt_token_ids
    if field < 0:
        field = body.find(b'"messages"', 0, _MAX_BODY)
        if field < 0:
            return None
    start = body.find(b":", field) + 1
    end = start + _NUM_BYTES
    if end > len(body) or end > _MAX_BODY:
        return None
    salt = _SALT.match(body) if body.startswith(b'{"cache_salt"') else None
    return f"{crc32(body[start:end], crc32(salt[0]) if salt else 0):08x}"
