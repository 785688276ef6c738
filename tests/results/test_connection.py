from __future__ import annotations

from pathlib import Path

import pytest

from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect, connect_async, resolve_url, server_name
from millrace.results.errors import InvalidRedisURL, RedisUnavailable
from millrace.results.transport import Transport
from tests.results.full_queue import FullQueue


def test_the_given_url_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_REDIS_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert resolve_url(None) == "redis://localhost:6379/0"
    monkeypatch.setenv("REDIS_URL", "redis://b")
    assert resolve_url(None) == "redis://b"
    monkeypatch.setenv("MILLRACE_REDIS_URL", "redis://a")
    assert resolve_url(None) == "redis://a"
    assert resolve_url("redis://c") == "redis://c"


def test_the_url_may_stand_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "url").write_text("redis://:secret@a\n")
    monkeypatch.setenv("MILLRACE_REDIS_URL", "")
    monkeypatch.setenv("MILLRACE_REDIS_URL_FILE", str(file))
    monkeypatch.setenv("REDIS_URL", "redis://b")
    assert resolve_url(None) == "redis://:secret@a"
    monkeypatch.setenv("MILLRACE_REDIS_URL", "redis://c")
    assert resolve_url(None) == "redis://c"


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read: .*No such file"), (b"\n", "is empty"), (b"\xff", "cannot be read")]
)
def test_a_file_without_a_url_is_an_error(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "url").write_bytes(content)
    monkeypatch.delenv("MILLRACE_REDIS_URL", raising=False)
    monkeypatch.setenv("MILLRACE_REDIS_URL_FILE", str(tmp_path / "url"))
    with pytest.raises(RedisUnavailable, match=f"^MILLRACE_REDIS_URL_FILE: .*{reason}"):
        resolve_url(None)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://localhost",
        "redis://localhost:port",
        "redis://h/0?db=x",
        "x",
        "redis+cluster://h:port",
        "redis+cluster://h:6379/foo",
        "redis://h/foo",
        "redis://h:6379/1/2",
        "rediss://user:secret@h:6379/0x",
        "redis://h/0?no_such_option=1",
        "redis://:p@ss/w#rd@h:6379/2",
        "redis://\udcff",
        f"redis://{'a' * 64}",
    ],
)
def test_what_is_no_redis_url_is_told_at_once(url: str) -> None:
    for opener in (connect, connect_async):
        with pytest.raises(RedisUnavailable, match="not a Redis URL"):
            opener(url)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "unix"])
@pytest.mark.parametrize(
    ("option", "needed"),
    [
        ("decode_responses=true", "decode_responses=False"),
        ("protocol=3", "protocol=2"),
        ("legacy_responses=false", "legacy_responses=True"),
        ("socket_timeout=1", "socket_timeout=10 or more, not 1"),
    ],
)
def test_a_url_with_options_for_other_replies_is_refused(scheme: str, option: str, needed: str) -> None:
    for opener in (connect, connect_async):
        with pytest.raises(InvalidRedisURL, match=f"Millrace needs {needed}; leave out"):
            opener(f"{scheme}://localhost:1/0?{option}")


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "unix"])
def test_another_protocol_than_2_or_3_is_refused_like_3(scheme: str) -> None:
    for opener in (connect, connect_async):
        with pytest.raises(InvalidRedisURL, match="Millrace needs protocol=2"):
            opener(f"{scheme}://localhost:1/0?protocol=9")


def test_a_wrong_scheme_is_told_all_that_are_right() -> None:
    schemes = r"redis, rediss, unix, redis\+cluster, rediss\+cluster"
    for opener in (connect, connect_async):
        with pytest.raises(InvalidRedisURL, match=rf"\(scheme: http\): the scheme has to be one of {schemes}\."):
            opener("http://localhost:6379/0")


@pytest.mark.parametrize("url", ["redis+sentinel://a:26379,b:26379/mymaster/0", "rediss+sentinel://:pw@a/mymaster"])
def test_a_sentinel_url_is_refused_with_the_way_that_works(url: str) -> None:
    for opener in (connect, connect_async):
        with pytest.raises(
            InvalidRedisURL, match=r"^Sentinel URLs are not supported: .* Sentinel\(\.\.\.\)\.master_for"
        ):
            opener(url)


@pytest.mark.parametrize("password", ["secret/x", "secret?x", "secret#x"])
def test_a_password_that_breaks_the_url_is_not_in_the_error(password: str) -> None:
    for opener in (connect, connect_async):
        with pytest.raises(RedisUnavailable, match="a password needs %2F for /") as caught:
            opener(f"redis://user:{password}@localhost:6379/0")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://:pw@host:1234/5", "redis://:***@host:1234/5"),
        ("redis://host", "redis://host:6379/0"),
        ("rediss://user:pw@host", "rediss://user:***@host:6379/0"),
        ("redis://pw@host", "redis://***@host:6379/0"),
        ("unix:///tmp/x.sock?db=2&password=pw", "unix://:***@/tmp/x.sock"),
    ],
)
def test_a_server_is_named_without_secrets(url: str, name: str) -> None:
    assert server_name(connect(url)) == name


def test_users_of_an_acl_can_log_in_and_others_are_told_why_not() -> None:
    with EmbeddedServer() as server:
        admin = Transport(connect(server.url))
        admin.send(("ACL SETUSER", "app", "on", ">pw", "~millrace:*", "+@all"))
        admin.send(("ACL SETUSER", "default", "resetpass", "off"))
        socket = server.url.split("?")[0].removeprefix("unix://")
        app = FullQueue(connect(f"unix://app@{socket}?password=pw"))
        assert app.stats().queued == 0
        with pytest.raises(RedisUnavailable, match=r"login: .* a password alone is written redis://:PASSWORD@host"):
            FullQueue(connect(f"unix://app@{socket}?password=wrong")).stats()
        with pytest.raises(RedisUnavailable, match=r"login|permit|NOAUTH"):
            FullQueue(connect(f"unix://{socket}")).stats()
        app.close()
        admin.close()
