"""How the prompt of a job begins, as a number: a claim prefers jobs that begin like one whose keys and values are cached."""

from __future__ import annotations

import re
from zlib import crc32

_MAX_BODY = 1024
_BEGINNING = re.compile(rb'"(?:prompt|messages|prompt_token_ids)":(.{256})', re.DOTALL)
_SALT = re.compile(rb'{"cache_salt":"[^"]*"')


def prompt_digest(body: bytes) -> str | None:
    """Return 8 hexadecimal digits for the first bytes of the prompt in this JSON, and its salt; None for a short prompt.

    It is a hint: equal prompts have equal digests when their clients write JSON in one way.
    """
    beginning = _BEGINNING.search(body, 0, _MAX_BODY)
    if beginning is None:
        return None
    salt = _SALT.match(body, 0, _MAX_BODY)
    return crc32(beginning[1], crc32(salt[0]) if salt else 0).to_bytes(4).hex()
