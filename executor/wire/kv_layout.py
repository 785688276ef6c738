"""How the KV blocks of a sequence belong to the layers of a model, and how many of them a sequence needs.

The layers form groups, such as those with a sliding window and those without one. A block holds the keys and values of
`block_size` tokens in every layer of one group. Any group can take any block. A block table has a column for each
`block_size` positions, and in it one block of each group. For two groups a and b, and 11 tokens in blocks of 4:

    column       0        1        2
    positions    0 .. 3   4 .. 7   8 .. 11
    blocks       a0 b0    a1 b1    a2 b2       the table is the list [a0, b0, a1, b1, a2, b2]

A group with a window needs no block whose positions all lie before the window of the next token. The engine takes it back,
and its entry becomes `NULL_BLOCK`. If b has a window of 4, the table is [a0, 0, a1, 0, a2, b2] before the step that computes
position 11, which attends to 8 .. 11.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec


class KVLayout(msgspec.Struct, frozen=True):
    """The same on every rank."""

    block_size: int
    """Tokens in one block."""
    windows: tuple[int | None, ...] = (None,)
    """One for each group: the last positions that its layers attend to, the token's own included. None: all positions."""
    max_step_tokens: int = 1
    """Most tokens of one sequence in one step."""
    max_model_len: int = 2**31 - 1
    """Most tokens of one sequence."""

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def num_columns(self, num_tokens: int) -> int:
        """Columns of the table of a sequence of this length."""
        return -(-num_tokens // self.block_size)

    def num_tokens_in(self, table: list[int]) -> int:
        """Tokens for which the table has columns."""
        return len(table) // len(self.windows) * self.block_size

    def num_hidden_columns(self, window: int, num_computed: int) -> int:
        """Columns at the beginning of the table that no token from position `num_computed` on attends to."""
        return max(0, num_computed + 1 - window) // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at a time while it grows to this length."""
        columns = self.num_columns(num_tokens)
        if len(self.windows) == 1 and self.windows[0] is None:
            return columns
        return sum(columns if window is None else min(columns, self._most_columns(window)) for window in self.windows)

    def longest_sequence(self, num_blocks: int) -> int:
        """Tokens of the longest sequence for which `num_blocks` are enough."""
        columns = range(1, self.num_columns(self.max_model_len) + 1)
        enough = bisect_right(columns, num_blocks, key=lambda count: self.num_blocks(count * self.block_size))
        return min(enough * self.block_size, self.max_model_len)

    def capacity_tokens(self, num_blocks: int) -> int:
        """Tokens in `num_blocks`, which may be negative, if they hold sequences of the greatest length."""
        columns = self.num_columns(self.max_model_len)
        return num_blocks * columns * self.block_size // self.num_blocks(columns * self.block_size)

    def _most_columns(self, window: int) -> int:
        # A step of n tokens attends to window - 1 + n positions, which may begin and end anywhere in a block.
        return (window + self.max_step_tokens - 3) // self.block_size + 2
