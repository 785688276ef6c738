"""What both clients say where a server cannot be used."""

from __future__ import annotations

import pytest

from millrace import AsyncClient, Client, RedisUnavailable


async def check_unavailable(url: str, expected: str) -> None:
    """Both clients raise `RedisUnavailable` with this text, a regular expression."""
    with Client(url) as client, pytest.raises(RedisUnavailable, match=expected):
        client.stats()
    async with AsyncClient(url) as async_client:
        with pytest.raises(RedisUnavailable, match=expected):
            await async_client.stats()
