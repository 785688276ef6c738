"""A server with a port, for clients in other languages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from millrace.embedded import EmbeddedServer

LIMIT_S = 120.0
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on this machine: the Node example is not run")


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tcp=True) as running:
        yield running
