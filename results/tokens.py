"""Token ids as bytes, as a checkpoint stores them: 4 bytes each, unsigned, little-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

_TYPECODE = "I"
assert array(_TYPECODE).itemsize == 4


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    packed = array(_TYPECODE, token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    unpacked = array(_TYPECODE)
    unpacked.frombytes(packed)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
