"""Token ids as bytes, as a checkpoint stores them: 4 bytes each, unsigned, little-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

_TYPECODE = "I"
assert array(_TYPECODE).itemsize == 4 and sys.byteorder == "little"


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return array(_TYPECODE, token_ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    unpacked = array(_TYPECODE)
    unpacked.frombytes(packed)
    return unpacked.tolist()
