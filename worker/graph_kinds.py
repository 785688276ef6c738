"""Which graphs there are: for how many rows, tokens and positions, and what they compute.

Shapes: as in `graphs.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from millrace.worker.attention.triton import CHUNK

LEAST_CHUNKS = 16
"""Least space for chunks of the longest row. A graph with less would not be faster."""
LEAST_TOKENS = 32
"""Least tokens of a graph with prompts."""


class Kind(NamedTuple):
    """The steps that a graph can run."""

    num_rows: int
    num_chunks: int
    """Chunks of the keys of the longest row: the block tables have space for them."""
    draws: bool
    """Whether it yields token ids [B], which are kept for the next step. If not, it yields hidden states [B, H] of the
    tokens whose logits are needed; on a pipeline stage before the last one those of all tokens [N, H]."""
    has_limits: bool = False
    """Whether it draws with top_k and top_p too."""
    num_tokens: int = 0
    """0: all rows are decode rows."""

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 0

    def serves(self, wanted: Kind) -> bool:
        """Whether this graph can run the steps of another one, and is not much slower."""
        is_large_enough = self.num_rows >= wanted.num_rows and self.num_chunks >= wanted.num_chunks
        has_tokens = wanted.num_tokens <= self.num_tokens <= 2 * wanted.num_tokens
        return is_large_enough and has_tokens and self.draws == wanted.draws and self.has_limits >= wanted.has_limits


def size_for(num_rows: int) -> int:
    """Return the rows of the graph for a step, if that many are possible: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, ... A row of
    padding costs much less than a capture."""
    power = 1 << (num_rows - 1).bit_length()
    step = power // 4 if num_rows > 8 else power
    return -(-num_rows // step) * step


def tokens_for(num_tokens: int) -> int:
    """Return the tokens of the graph for a step that has not only decode rows: 32, 64, 128, 256, 512, 768, ..."""
    return max(LEAST_TOKENS, 1 << (num_tokens - 1).bit_length()) if num_tokens <= 256 else -(-num_tokens // 256) * 256


def chunks_for(kv_len: int) -> int:
    """Return the chunks of its longest row that a graph has space for: 16, 64, 256, ..."""
    power: int = 4 ** -(-((kv_len - 1) // CHUNK).bit_length() // 2)
    return max(LEAST_CHUNKS, power)


def likely_kinds(max_num_seqs: int, most_tokens: int) -> list[Kind]:
    """Return the graphs of rows without processors that are not very long: first the one with the largest buffers."""
    sizes = {min(size_for(count), max_num_seqs) for count in range(1, max_num_seqs + 1)}
    token_counts = {tokens_for(count) for count in range(1, most_tokens + 1)}
    decodes = [Kind(size, LEAST_CHUNKS, True, has_limits) for size in sizes for has_limits in (True, False)]
    prompts = [Kind(max_num_seqs, LEAST_CHUNKS, False, False, count) for count in token_counts]
    largest, *others = sorted(prompts, reverse=True) or [max(decodes)]
    return [largest, *sorted(decodes, reverse=True), *others]
