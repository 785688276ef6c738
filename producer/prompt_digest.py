"""How the prompt of a job begins, as a number: a claim prefers jobs that begin like one whose keys and values are cached."""

from __future__ import annotations

import re
from zlib import crc32

_MAX_BODY, _NUM_BYTES = 1024, 256
_KEYS = (b'"prompt":', b'"messages":', b'"prompt_token_ids":')
_SALT = re.compile(rb'\{"cache_salt":"[^"]*"')


def prompt_digest(body: bytes) -> str | None:
    """Return 8 hexadecimal digits for the first bytes of the prompt in this JSON, and its salt; None for a short prompt.

    It is a hint: equal prompts have equal digests when their clients write JSON in one way.
    """
    body = body[:_MAX_BODY]
    start = next((body.find(key) + len(key) for key in _KEYS if key in body), len(body))
    if len(body) < start + _NUM_BYTES:
        return None
    salt = _SALT.match(body)
    return f"{crc32(body[start : start + _NUM_BYTES], crc32(salt[0]) if salt else 0):08x}"
