"""A server behind TLS: every part of ours reaches it by one URL, and a certificate that is not trusted is one error."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
import trustme

from millrace import AsyncClient, Client, RedisUnavailable
from millrace.embedded import EmbeddedServer
from millrace.results.connection import HANDSHAKE_LIMIT_S, connect, connect_async
from millrace.results.errors import InvalidRedisURL
from tests.e2e.engines import TINY, EngineProcess
from tests.millrace.cli.command import Command, python, run_main
from tests.results.refused import check_unavailable
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


@pytest.mark.parametrize(
    ("host", "kind"), [("127.0.0.1", "IP address mismatch"), ("localhost.localdomain", "Hostname mismatch")]
)
async def test_a_certificate_for_another_name_is_told_from_one_that_is_not_trusted(
    url: str, host: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo("127.0.0.1", urlparse(url).port, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    url = url.replace("localhost", host)
    expected = rf"{host}:\d+/0 has a certificate for another name: .* or add ssl_check_hostname=false .*{kind}"
    await check_unavailable(url, expected, is_outage=False)
    with Client(f"{url}&ssl_check_hostname=false") as client:
        client.stats()


async def test_a_url_without_tls_for_a_port_with_it_is_asked_about(address: str) -> None:
    url = address.replace("rediss://", "redis://")
    hint = r"whether the port expects TLS \(rediss://\), and maxclients"
    await check_unavailable(url, hint, is_outage=True)


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ssl_ca_certs=/nope/ca.pem", "ssl_ca_certs=/nope/ca.pem cannot be read: no such file or directory"),
        ("ssl_certfile=/nope/c.pem", "ssl_certfile=/nope/c.pem cannot be read: no such file or directory"),
        ("ssl_keyfile=/nope/k.pem", "ssl_keyfile=/nope/k.pem cannot be read: no such file or directory"),
        ("ssl_ca_certs={}", "ssl_ca_certs={} cannot be read: is a directory"),
        ("ssl_ca_certs={}/text", "ssl_ca_certs={}/text contains no valid PEM certificate"),
        ("ssl_keyfile={}/text", "ssl_keyfile={}/text needs its certificate: add ssl_certfile="),
        ("ssl_certfile={}/text", "ssl_certfile={}/text (no ssl_keyfile is given) cannot be used: a PEM certificate"),
        ("ssl_certfile={}/ca.pem&ssl_keyfile={}/text", "ssl_certfile={}/ca.pem and ssl_keyfile={}/text cannot be used"),
        ("ssl_cert_reqs=foo", "ssl_cert_reqs must be none, optional or required, not 'foo'"),
    ],
)
def test_a_tls_option_that_cannot_be_used_is_named_with_its_file(
    address: str, folder: Path, scheme: str, options: str, message: str
) -> None:
    (folder / "text").write_text("no certificate")
    url = f"{address.replace('rediss', scheme)}?{options.replace('{}', str(folder))}"
    for opener in (connect, connect_async):
        with pytest.raises(InvalidRedisURL) as caught:
            opener(url)
        assert str(caught.value).startswith(f"the URL's {message.replace('{}', str(folder))}")


def test_a_wrong_tls_option_ends_a_verb_with_status_2(address: str) -> None:
    ran = run_main("stats", "--redis", f"{address}?ssl_ca_certs=/nope/ca.pem")
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (2, "", 1)


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
