"""What both clients say where a server cannot be used."""

from __future__ import annotations

import pytest

from millrace import AsyncClient, Client, RedisUnavailable


async def check_unavailable(url: str, expected: str, *, is_outage: bool) -> None:
    """Both clients raise `RedisUnavailable` with this text, a regular expression."""
    with Client(url) as client, pytest.raises(RedisUnavailable, match=expected) as of_client:
        client.stats()
    async with AsyncClient(url) as async_client:
        with pytest.raises(RedisUnavailable, match=expected) as of_async_client:
            await async_client.stats()
    assert of_client.value.is_outage == of_async_client.value.is_outage == is_outage
