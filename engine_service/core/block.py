"""One KV block of the pool, as a link of the list of free blocks."""

from __future__ import annotations


class Block:
    """Owns the state of one block. `PrefixCache` sets its hash."""

    __slots__ = ("block_hash", "block_id", "following", "group", "num_users", "previous")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_users = 0
        """Block tables that hold it."""
        self.block_hash: bytes | None = None
        """Set while the block can be found."""
        self.group = 0
        """The group of layers of which it was cached last."""
        self.previous: Block = self
        self.following: Block = self

    def insert_before(self, link: Block) -> None:
        self.previous, self.following = link.previous, link
        link.previous.following = link.previous = self

    def unlink(self) -> None:
        self.previous.following, self.following.previous = self.following, self.previous
