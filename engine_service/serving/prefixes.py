"""The beginnings of prompts that the engine has in its prefix cache: what its claims prefer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

import msgspec

from millrace.engine_service.core.sequence import Sequence

MAX_CLAIMED = 8
"""Digests that a claim names."""
_MAX_KNOWN = 256
_MAX_BLOCKS = 64
"""Blocks of a prompt that are compared with those of the next prompt."""


class _Prefix(msgspec.Struct):
    """What is known of the prompts with one digest."""

    hashes: list[bytes]
    """Hashes of the first blocks of the last prompt."""
    last_shared: bytes | None
    """The last of them that the prompt before it had too."""


class CachedPrefixes:
    """Owns the digests of the prompts of recent jobs, and which blocks these prompts share. Thread-safe.

    Only beginnings that two prompts shared count: a claim with digests costs the server more than one without.
    """

    def __init__(self, is_cached: Callable[[bytes], bool]) -> None:
        """`is_cached` returns whether the pool has the block with this hash. Any thread calls it."""
        self._is_cached = is_cached
        self._recent: OrderedDict[str, _Prefix] = OrderedDict()
        """By digest, the latest one last."""
        self._lock = threading.Lock()

    def note(self, digest: str, sequence: Sequence, block_size: int) -> None:
        """Take the prompt of a new sequence into account."""
        num_blocks = min(_MAX_BLOCKS, sequence.num_prompt_tokens // block_size)
        hashes = sequence.hash_blocks(block_size)[:num_blocks]
        with self._lock:
            before = self._recent.pop(digest, None)
            pairs = zip(hashes, before.hashes if before else [], strict=False)
            shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            self._recent[digest] = _Prefix(hashes, shared[-1] if shared else None)
            if len(self._recent) > _MAX_KNOWN:
                self._recent.popitem(last=False)

    def current(self) -> list[str]:
        """Return the digests of prompts whose shared blocks are in the pool now, the latest one first."""
        with self._lock:
            known = [(digest, each.last_shared) for digest, each in reversed(self._recent.items()) if each.last_shared]
        return [digest for digest, block in known if block and self._is_cached(block)][:MAX_CLAIMED]
