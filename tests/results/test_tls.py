"""A server behind TLS: every part of ours reaches it by one URL, and a certificate that is not trusted is one error."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from millrace import AsyncClient, Client, RedisUnavailable
from millrace.embedded import EmbeddedServer
from millrace.results.connection import HANDSHAKE_LIMIT_S
from tests.e2e.engines import TINY, EngineProcess
from tests.millrace.cli.command import Command, python
from tests.results.tls_terminator import TlsTerminator

PROMPT = "3 + 4 ="

REMEDY = r"rediss://localhost:\d+/0 has a certificate that is not trusted here: .*\?ssl_ca_certs="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def address(server: EmbeddedServer, folder: Path) -> Iterator[str]:
    """Where the run's server speaks TLS; `folder` has the authority that signed for it, and one that did not."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    with TlsTerminator(server.url, context) as terminator:
        yield f"rediss://localhost:{terminator.port}/0"


@pytest.fixture
def url(address: str, folder: Path) -> str:
    return f"{address}?ssl_ca_certs={folder / 'ca.pem'}"


@pytest.fixture(params=["another authority", "the system's authorities"])
def url_not_trusted(address: str, folder: Path, request: pytest.FixtureRequest) -> str:
    return f"{address}?ssl_ca_certs={folder / 'other.pem'}" if request.param == "another authority" else address


async def test_a_job_goes_all_its_way_behind_tls(url: str, queue_name: str, tmp_path: Path) -> None:
    """Both clients, the command and an engine service have the URL, and nobody another way."""
    with EngineProcess(tmp_path / "engine.log", url, queue_name) as engine:
        with Client(url, queue=queue_name) as client:
            job_id = client.submit(PROMPT, max_tokens=4, temperature=0.0, stream=True)
            assert "".join(event.text for event in client.stream(job_id)) == " 7"
        async with AsyncClient(url, queue=queue_name) as other:
            job_id = await other.submit(PROMPT, max_tokens=4, temperature=0.0)
            assert (await other.wait(job_id, 60.0)).text == " 7"
        options = ("--max-tokens", "4", "--temperature", "0", "--wait")
        assert Command(url, queue_name)("submit", PROMPT, *options) == (0, " 7\n", "")
        engine.wait_until_serving()
        assert engine.terminate() == 0, engine.text()


def test_a_certificate_that_is_not_trusted_is_one_error_of_the_client(url_not_trusted: str) -> None:
    with Client(url_not_trusted) as client, pytest.raises(RedisUnavailable, match=REMEDY):
        client.stats()


async def test_a_certificate_that_is_not_trusted_is_one_error_of_the_async_client(url_not_trusted: str) -> None:
    async with AsyncClient(url_not_trusted) as client:
        with pytest.raises(RedisUnavailable, match=REMEDY):
            await client.stats()


@pytest.mark.parametrize(
    "verb", [("millrace", "stats"), ("millrace.engine_service", "--model", str(TINY))], ids=["command", "engine"]
)
def test_a_certificate_that_is_not_trusted_is_one_line_of_every_process(
    url_not_trusted: str, verb: tuple[str, ...]
) -> None:
    ran = python("-P", "-m", *verb, "--redis", url_not_trusted)
    assert (ran.status, ran.out) == (4, "")
    assert len([line for line in ran.err.splitlines() if "INFO" not in line]) == 1
    assert "?ssl_ca_certs=" in ran.err


async def test_a_port_that_does_not_speak_tls_is_told_after_one_handshake() -> None:
    assert HANDSHAKE_LIMIT_S < 3
    with socket.create_server(("127.0.0.1", 0)) as listener:  # like Redis, it waits for the end of a line
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}/0"
        for call in (Client(url).stats, lambda: Client(url).get("a")):
            with pytest.raises(RedisUnavailable, match=r"does this port speak TLS\?"):
                call()
        with pytest.raises(RedisUnavailable, match=r"does this port speak TLS\?"):
            await AsyncClient(url).stats()
        listener.settimeout(0)
        for _ in range(3):
            listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()
