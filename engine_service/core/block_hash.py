"""Hashes of full KV blocks: two blocks with one hash hold the keys and values of the same tokens after the same tokens.

    hash(block i) = blake2b-128(hash(block i - 1) + token ids of block i as little-endian uint32)
    hash(block -1) = blake2b-128("millrace" + salt)

The hash is the same in every process and version, and nobody can make two prompts collide: a tenant who could would read
or replace the cached blocks of another.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

_DIGEST_BYTES = 16
_TOKEN_BYTES = 4


def root_hash(salt: str = "") -> bytes:
    """Return the parent of a first block. Prompts with different salts share no block."""
    return blake2b(b"millrace" + salt.encode(), digest_size=_DIGEST_BYTES).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: list[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids`, the tokens that follow those of `hashes`."""
    # As everything here, for little-endian hosts only; `results/tokens.py` refuses others.
    packed = array("I", token_ids[: len(token_ids) // block_size * block_size])
    data, size = packed.tobytes(), block_size * _TOKEN_BYTES
    parent = hashes[-1] if hashes else root
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
