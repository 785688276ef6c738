"""Connections to the server, and their options."""

from __future__ import annotations

import os
import re
import socket
import ssl
import sys
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from millrace.results.errors import InvalidRedisURL, QueueError, RedisUnavailable
from millrace.results.server_errors import MASTER_NEEDED, means_outage
from millrace.results.tls_options import check_tls_options

CLIENT_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
"""The errors that redis-py raises."""
DEFAULT_URL = "redis://localhost:6379/0"
URL_VARIABLES = ("MILLRACE_REDIS_URL", "REDIS_URL")
SOCKET_TIMEOUT_S = 10.0
"""How long a reply may take. A blocking command takes less: at most BLOCK_LIMIT_S."""
BLOCK_LIMIT_S = 5.0
NUM_RETRIES = 2
"""Every call may be repeated, so a call is sent again after its connection was lost."""
_RETRIED = (redis.ConnectionError,)
"""Without timeouts: redis-py retries on two levels, so 10 s would become 90 s. `transport` sends once more instead."""

Connection: TypeAlias = redis.Redis | redis.RedisCluster
AsyncConnection: TypeAlias = redis.asyncio.Redis | redis.asyncio.RedisCluster
_AnyClient = TypeVar("_AnyClient", redis.Redis, redis.asyncio.Redis)


def resolve_url(url: str | None) -> str:
    """Return the given URL, otherwise that of the environment, otherwise the local server's. Raises InvalidRedisURL for a
    file that cannot be read, for an unknown scheme, and for a database that is not a number, which redis-py takes for 0."""
    if url is not None and not url.strip():
        raise InvalidRedisURL("the URL of the Redis is empty; leave it out for that of the environment, or give one")
    resolved = url or next(filter(None, map(_from_environment, URL_VARIABLES)), DEFAULT_URL)
    if "#" in resolved:  # redis-py would drop what follows, which mostly is a part of the password
        raise _bad_url(resolved, ValueError("it contains #"))
    scheme, separator, _ = resolved.partition("://")
    if separator and "sentinel" in scheme:
        raise InvalidRedisURL(f"Sentinel URLs are not supported: {MASTER_NEEDED}")
    if scheme not in _SCHEMES:
        raise _bad_url(resolved, ValueError(f"the scheme has to be one of {', '.join(_SCHEMES)}"))
    if not resolved.startswith("unix://") and not _URL_END.fullmatch(resolved.partition("?")[0].rpartition("@")[2]):
        raise _bad_url(resolved, ValueError("the part after the host has to be the number of a database"))
    return resolved


def _from_environment(variable: str) -> str | None:
    """Return the URL of a variable, or of the file that the same variable with _FILE names, such as a container's secret."""
    file = os.environ.get(f"{variable}_FILE")
    if (url := os.environ.get(variable)) or not file:
        return url
    try:
        url = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InvalidRedisURL(f"{variable}_FILE: {file!r} cannot be read: {error}") from error
    if not url:
        raise InvalidRedisURL(f"{variable}_FILE: {file!r} is empty; it must contain the URL of the Redis")
    return url


_SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_URL_END = re.compile(r"([^/]*://)?[^/]*/?\d*")
"""A URL without its login: scheme, host and port, database."""


def connect(url: str | None = None, *, blocking: bool = False) -> redis.Redis:
    """Return a client for a URL of redis-py: redis://, rediss://, unix://, with user, password and TLS options.

    redis+cluster:// and rediss+cluster:// return a cluster's client, which has the same commands; all keys of a queue live
    in one slot. It connects at once, any other client on first use. `blocking`, which has no effect on a cluster's, is for a
    loop that waits on the server and retries by itself: errors are raised at once, and no command is sent twice.
    """
    resolved = resolve_url(url)
    if plain := _cluster_url(resolved):
        return _connect_cluster(plain)
    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 0 if blocking else NUM_RETRIES, _RETRIED)
    try:
        options = {**_OPTIONS, **({"connection_class": _TlsConnection} if _is_tls(resolved) else {})}
        pool = _Pool.from_url(resolved, retry=retry, **_options_for(resolved, options))
        return _checked_client(redis.Redis.from_pool(pool))
    except _INVALID_OPTIONS as error:
        raise _bad_url(resolved, error) from error


class _Pool(redis.ConnectionPool):
    """Closes a connection that the exception of a signal handler, such as Ctrl-C, has left between a command and its reply:
    the next caller would take that for its own. redis-py does so only while it reads or writes."""

    has_connected = False
    """Otherwise no command can have reached the server."""

    def get_connection(self, *arguments: Any, **options: Any) -> redis.Connection:
        connection: redis.Connection = super().get_connection(*arguments, **options)
        self.has_connected = True
        return connection

    def release(self, connection: Any) -> None:
        error = sys.exception()
        # Where the exception is that of a caller who handles it, its traceback begins outside redis-py.
        passed = error.__traceback__.tb_frame.f_globals.get("__name__", "") if error and error.__traceback__ else ""
        if passed.startswith("redis.") and not isinstance(error, redis.RedisError):
            connection.disconnect()
        super().release(connection)


def connect_async(url: str | None = None) -> redis.asyncio.Redis:
    """The same for asyncio."""
    resolved = resolve_url(url)
    retry = redis.asyncio.retry.Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), NUM_RETRIES, _RETRIED)
    try:
        if plain := _cluster_url(resolved):
            cluster = redis.asyncio.RedisCluster.from_url(plain, retry=retry, **_options_for(plain, _ASYNC_OPTIONS))
            return cast(redis.asyncio.Redis, cluster)
        options = {**_ASYNC_OPTIONS, **({"socket_connect_timeout": HANDSHAKE_LIMIT_S} if _is_tls(resolved) else {})}
        return _checked_client(redis.asyncio.Redis.from_url(resolved, retry=retry, **_options_for(resolved, options)))
    except _INVALID_OPTIONS as error:
        raise _bad_url(resolved, error) from error


_INVALID_OPTIONS = (ValueError, TypeError, AttributeError, redis.RedisError)
"""What redis-py raises for options, before it connects."""

HANDSHAKE_LIMIT_S = 2.0
"""A port that does not speak TLS may wait for the rest of a handshake for ever. A user learns of it after this time."""


class _TlsConnection(redis.SSLConnection):
    def _wrap_socket_with_ssl(self, sock: socket.socket, *arguments: Any) -> ssl.SSLSocket:
        sock.settimeout(HANDSHAKE_LIMIT_S)  # redis-py takes socket_timeout
        wrapped: ssl.SSLSocket = super()._wrap_socket_with_ssl(sock, *arguments)  # type: ignore[no-untyped-call]
        wrapped.settimeout(self.socket_timeout)
        return wrapped


def _is_tls(url: str) -> bool:
    return url.startswith("rediss://")


def _checked_client(client: _AnyClient) -> _AnyClient:
    """Return the client. Raises ValueError for an invalid host name, and TypeError for an unknown option, which redis-py
    reports with the first command."""
    pool = client.connection_pool
    str(pool.connection_kwargs.get("host", "")).encode("idna")
    pool.connection_class(**pool.connection_kwargs)
    return client


def borrow(connection: Connection) -> redis.Redis:
    """Return a caller's client. Raises QueueError for options that do not fit: replies have to be bytes in the shapes of
    RESP2, and may take up to SOCKET_TIMEOUT_S."""
    return cast(redis.Redis, _checked(connection, (redis.Redis, redis.RedisCluster), "redis"))


def borrow_async(connection: AsyncConnection) -> redis.asyncio.Redis:
    """The same for asyncio."""
    kinds = (redis.asyncio.Redis, redis.asyncio.RedisCluster)
    return cast(redis.asyncio.Redis, _checked(connection, kinds, "redis.asyncio"))


def _checked(client: Any, kinds: tuple[type, type], package: str) -> Any:
    if not isinstance(client, kinds):
        needed = f"a URL, a {package}.Redis or a {package}.RedisCluster is needed"
        raise QueueError(f"{needed}, not {type(client).__name__}")
    if options := _needed_options({**_DEFAULTS, **cast(Any, client).get_connection_kwargs()}):
        raise QueueError(f"Millrace cannot share this connection: make it with {', '.join(options)}; or give its URL")
    return client


_DEFAULTS = {"socket_timeout": cast(Any, redis.Connection)().socket_timeout}
"""What connections of redis-py, of every kind, use if their options leave it out: since version 8 a limit."""


def _options_for(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. Raises ValueError where the URL has others that do not fit: they would replace these; and
    InvalidRedisURL for TLS options that cannot be used."""
    given = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
    if needed := _needed_options(given):
        raise ValueError(f"Millrace needs {', '.join(needed)}; leave out what the URL says instead")
    if _is_tls(url):
        check_tls_options(given)
    return options


def _needed_options(options: dict[str, Any]) -> list[str]:
    """Return what has to be changed in the options of a connection."""
    needed: list[str] = []
    if options.get("decode_responses"):
        needed.append("decode_responses=False")
    if str(options.get("protocol")) not in ("None", "2"):
        needed.append("protocol=2")
    if options.get("legacy_responses") in (False, "false", "False", "0"):
        needed.append("legacy_responses=True")
    timeout_s = options.get("socket_timeout")
    if timeout_s is not None and timeout_s < SOCKET_TIMEOUT_S:
        needed.append(f"socket_timeout={SOCKET_TIMEOUT_S:g} or more, not {timeout_s:g}")
    return needed


def is_cluster(url: str) -> bool:
    """Return whether the URL names a cluster."""
    return _cluster_url(url) is not None


def _cluster_url(url: str) -> str | None:
    """Return the URL of a node where the URL names a cluster, else None."""
    scheme, _, rest = url.partition("+cluster://")
    return f"{scheme}://{rest}" if rest and scheme in ("redis", "rediss") else None


def _connect_cluster(url: str) -> redis.Redis:
    # A cluster that moves a slot or elects a primary sends redirections for a while, so there are more retries.
    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 2 * NUM_RETRIES)
    try:
        return cast(redis.Redis, redis.RedisCluster.from_url(url, retry=retry, **_options_for(url, _OPTIONS)))
    except CLIENT_ERRORS as error:
        node = redis.Redis.from_url(url)
        message = f"the cluster at {server_name(node)} cannot be used: {error}"
        raise RedisUnavailable(message, is_outage=means_outage(error)) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise _bad_url(url, error) from error


_OPTIONS: dict[str, Any] = {
    "protocol": 2,  # the same replies with any version of redis-py
    "decode_responses": False,
    "socket_timeout": SOCKET_TIMEOUT_S,
    "socket_connect_timeout": 5.0,
    "health_check_interval": 30,
    "max_connections": 10_000,  # each waiting reader holds one
}
# With health checks, redis-py's asyncio client reconnects for ever when the server closes new connections, as at maxclients.
_ASYNC_OPTIONS = {**_OPTIONS, "health_check_interval": 0}


def server_name(client: redis.Redis | redis.asyncio.Redis) -> str:
    """Return where a client connects to, as a URL without the password. A user without one is left out too: it may be a
    password whose colon was forgotten."""
    if isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster):
        first = next(iter(client.nodes_manager.startup_nodes.values()))
        return f"redis+cluster://{first.host}:{first.port}"
    options = client.connection_pool.connection_kwargs
    login = ""
    if options.get("password"):
        login = f"{options.get('username') or ''}:***@"
    elif options.get("username"):
        login = "***@"
    if path := options.get("path"):
        return f"unix://{login}{path}"
    scheme = "rediss" if issubclass(client.connection_pool.connection_class, _TLS_CONNECTIONS) else "redis"
    return f"{scheme}://{login}{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db') or 0}"


_TLS_CONNECTIONS = (redis.SSLConnection, redis.asyncio.SSLConnection)


def node_of(client: redis.Redis, key: str) -> redis.Redis:
    """Return the client of the server that holds a key: in a cluster that of its node, otherwise the client itself."""
    if not isinstance(client, redis.RedisCluster):
        return client
    node: redis.Redis = client.get_redis_connection(client.get_node_from_key(key))
    return node


async def node_of_async(client: redis.asyncio.Redis, key: str) -> redis.asyncio.Redis:
    """The same for asyncio. In a cluster it is a new client, which the caller closes."""
    if not isinstance(client, redis.asyncio.RedisCluster):
        return client
    await client.initialize()
    node = client.get_node_from_key(key)
    pool = redis.asyncio.ConnectionPool(node.connection_class, **node.connection_kwargs)
    return redis.asyncio.Redis.from_pool(pool)


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument ('\w+')")


def _bad_url(url: str, error: Exception) -> InvalidRedisURL:
    scheme = url.split("://", 1)[0] if "://" in url else "none"
    reason = str(error).partition(" as ")[0]  # what follows is taken for the port and may be a part of the password
    if unknown := _UNKNOWN_OPTION.search(reason):
        reason = f"redis-py has no option {unknown[1]}"
    return InvalidRedisURL(
        f"not a Redis URL (scheme: {scheme}): {reason}. It looks like redis://[user:password@]host:6379/0, rediss://... "
        "for TLS, redis+cluster://host:6379, or unix:///path/to/socket; "
        "a password needs %2F for /, %3F for ?, %23 for #, %40 for @"
    )
