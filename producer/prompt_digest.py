"""How the prompt of a job begins, as a number: a claim prefers jobs that begin like one whose keys and values are cached."""

from __future__ import annotations

import re
from zlib import crc32

_MAX_BODY, _NUM_BYTES = 1024, 256
_KEYS = (b'"prompt":', b'"messages":', b'"prompt_token_ids":')
_SALT_KEY = b'{"cache_salt":"'
_SALT = re.compile(re.escape(_SALT_KEY) + rb'[^"]*"')


def prompt_digest(body: bytes) -> str | None:
    """Return 8 hexadecimal digits for the first bytes of the prompt in this JSON, and its salt; None for a short prompt.

    It is a hint: equal prompts have equal digests when their clients write JSON in one way.
    """
    for key in _KEYS:
        at = body.find(key, 0, _MAX_BODY)
        if at >= 0:
            start = at + len(key)
            break
    else:
        return None
    beginning = body[start : min(start + _NUM_BYTES, _MAX_BODY)]
    if len(beginning) < _NUM_BYTES:
        return None
    salt = _SALT.match(body, 0, _MAX_BODY) if body.startswith(_SALT_KEY) else None
    return crc32(beginning, crc32(salt[0]) if salt else 0).to_bytes(4).hex()
