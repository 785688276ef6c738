"""How the prompt of a job begins, as a number: a claim prefers jobs that begin like one whose keys and values are cached."""

from __future__ import annotations

import re
from zlib import crc32

_MAX_BODY = 1024
_NUM_BYTES = 256
_SALT = re.compile(rb'{"cache_salt":"[^"]*"')


def prompt_digest(body: bytes) -> str | None:
    """Return 8 hexadecimal digits for the first bytes of the prompt in this JSON, and its salt; None for a short prompt.

    It is a hint: equal prompts have equal digests when their clients write JSON in one way.
    """
    field = body.find(b'"prompt', 0, _MAX_BODY)  # or prompt_token_ids
    if field < 0:
        field = body.find(b'"messages"', 0, _MAX_BODY)
    start = body.find(b":", field) + 1
    if field < 0 or min(len(body), _MAX_BODY) < start + _NUM_BYTES:
        return None
    salt = _SALT.match(body) if body.startswith(b'{"cache_salt"') else None
    return crc32(body[start : start + _NUM_BYTES], crc32(salt[0]) if salt else 0).to_bytes(4).hex()
