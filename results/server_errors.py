"""Errors of redis-py as errors of ours, which name the remedy."""

from __future__ import annotations

import errno
import os
import re
from typing import TypeAlias

import redis

from millrace.results.errors import InvalidRedisURL, QueueError, RedisUnavailable


def as_unavailable(error: Exception, server: str) -> RedisUnavailable | None:
    """Return an error that names the remedy, where the server's state is at fault; None where the command is."""
    unavailable = _with_remedy(error, server)
    if unavailable is not None:
        unavailable.is_outage = means_outage(error)
    return unavailable


def _with_remedy(error: Exception, server: str) -> RedisUnavailable | None:
    text = _IN_SCRIPT.sub("", str(error))
    if _is_of_certificate(error):
        sentence = _OTHER_NAME if "mismatch, certificate is not valid for" in text else _NOT_TRUSTED
        return RedisUnavailable(f"Redis at {server} {sentence} ({text})")
    if isinstance(error, redis.TimeoutError) and is_unanswered_handshake(error, server):
        return RedisUnavailable(f"Redis at {server} does not answer in time: does this port speak TLS? ({text})")
    if isinstance(error, redis.exceptions.InvalidResponse):
        remedy = "it speaks TLS: write rediss://" if _TLS_ALERT in text else "check host and port in the URL"
        return RedisUnavailable(f"what answers at {server} does not speak Redis's protocol: {remedy} ({text})")
    if unknown := _UNKNOWN_TO_A_SENTINEL.search(text):
        return InvalidRedisURL(f"Redis at {server} seems to be {A_SENTINEL} ({unknown[0]})")
    if isinstance(error, redis.exceptions.AskError) and "+cluster://" not in server:  # MovedError is one too
        return InvalidRedisURL(f"Redis at {server} is {A_CLUSTER_NODE} ({text})")
    if _is_of_full_pool(error):
        return RedisUnavailable(f"All connections of this client to Redis at {server} are in use{_POOL_REMEDY}")
    for kind, sentence in _SENTENCES:
        if isinstance(error, kind):
            return RedisUnavailable(f"Redis at {server} {sentence} ({text})")
    if isinstance(error, redis.ConnectionError | OSError):
        limit = "" if "connecting to" in text else ", and maxclients of the server"
        if limit and server.startswith("redis://"):
            limit = f", whether the port expects TLS (rediss://){limit}"
        remedy = "Start a Redis there, or check" if _NOT_THERE.match(text) else "Check"
        return RedisUnavailable(
            f"Cannot connect to Redis at {server}: {_reason(text)}. {remedy} --redis or MILLRACE_REDIS_URL{limit}."
        )
    for part, sentence in _BY_TEXT.items():
        if part in text:
            return RedisUnavailable(f"Redis at {server} {sentence} ({text})")
    if isinstance(error, redis.ResponseError) and any(code in text for code in _CODES):
        return RedisUnavailable(f"Redis at {server} cannot do this now: {text}")
    return None


_IN_SCRIPT = re.compile(r" script: (?:\w+, )?on @user_script:\d+\.")
"""What a server appends to the error of a script. For a user it is the same error."""


def is_unanswered_handshake(error: redis.TimeoutError, server: str) -> bool:
    """Return whether a TLS handshake timed out: probably the port does not speak TLS, so another attempt does not help."""
    return server.startswith("rediss://") and "connecting" in str(error)


def means_outage(error: BaseException) -> bool:
    """Return whether the server is gone, silent, loading or failing over; not if it is full or refuses the user."""
    if isinstance(error, redis.exceptions.RedisClusterException) and error.__cause__ is not None:
        return means_outage(error.__cause__)  # what the last node has answered
    if isinstance(error, redis.AuthenticationError) or _is_of_certificate(error) or _is_of_full_pool(error):
        return False  # each is a ConnectionError
    return is_of_replica(error) or isinstance(error, _OUTAGES)


def _is_of_certificate(error: BaseException) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)  # redis-py wraps it in a ConnectionError


def _is_of_full_pool(error: BaseException) -> bool:
    # Older versions of redis-py, and a BlockingConnectionPool of any, raise a plain ConnectionError.
    return isinstance(error, redis.exceptions.MaxConnectionsError) or str(error) in _OF_FULL_POOL


def is_of_replica(reply: object) -> bool:
    """Return whether a reply is the error of a server that is, or has just become, a replica."""
    if not isinstance(reply, redis.ResponseError):
        return False
    is_typed = isinstance(reply, redis.ReadOnlyError | redis.exceptions.MasterDownError)
    return is_typed or any(code in str(reply) for code in _OF_REPLICA)


def is_refusal(error: QueueError) -> bool:
    """Return whether the server has answered that it does not execute the command. Otherwise it may have executed it."""
    return isinstance(error.__cause__, redis.ResponseError)


_OUTAGES = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterError,
    redis.exceptions.RedisClusterException,
    OSError,
)

_OF_REPLICA = (
    "-READONLY ",  # in a script, before Redis 7.0
    "UNBLOCKED ",  # a blocking command of a primary that becomes a replica
)


def _reason(text: str) -> str:
    """Return why a connection failed, from redis-py's message: it repeats the address, and differs under asyncio."""
    number = re.match(r"Error (\d+) connecting to ", text)
    return os.strerror(int(number[1])).lower() if number else text.rstrip(".").rpartition(". ")[2]


_NOT_THERE = re.compile(rf"Error ({errno.ECONNREFUSED}|{errno.ENOENT}) connecting to ")
"""No server listens at the port, or at the path of a socket."""

_OF_FULL_POOL = ("Too many connections", "No connection available.")

_POOL_REMEDY = (
    ", and each waiting reader takes one: raise max_connections, "
    "or make the client with a BlockingConnectionPool, whose timeout is long enough"
)

_LOGIN_REFUSED = (
    "refuses the login: check user and password in the URL; a password alone is written redis://:PASSWORD@host"
)

_NOT_PERMITTED = "does not permit this to the URL's user: extend the user's ACL"

_NOT_TRUSTED = (
    "has a certificate that is not trusted here: name the authority that signed it in the URL, "
    "rediss://...?ssl_ca_certs=/path/ca.pem"
)

_OTHER_NAME = (
    "has a certificate for another name: use a name of the certificate as the host in the URL, "
    "or add ssl_check_hostname=false"
)

_TLS_ALERT = r'got "\x15"'
"""The first byte of what some servers with TLS send to a client without."""

MASTER_NEEDED = (
    "give the URL of the master, or make a Client from Sentinel(...).master_for(name, socket_timeout=15) of redis-py"
)

A_SENTINEL = f"a Sentinel, which does not hold the data: {MASTER_NEEDED}"

A_CLUSTER_NODE = (
    "a node of a Redis Cluster: write redis+cluster:// in its URL (rediss+cluster:// with TLS), "
    "or make a Client from a RedisCluster of redis-py"
)

# The first commands of our programs. Every other server that is new enough has them; before Redis 7.0 in backquotes.
_UNKNOWN_TO_A_SENTINEL = re.compile(r"unknown command ['`](EVALSHA|HGET|HMGET|SCAN|SELECT|TIME|XREAD|XREVRANGE)['`]")

_READ_ONLY = "is a read-only replica: give the URL of the primary, or wait for the failover to end"

_OUT_OF_MEMORY = "is out of memory: raise maxmemory, or delete jobs that have ended: millrace delete"

_Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]

_SENTENCES: tuple[tuple[_Errors, str], ...] = (
    (redis.AuthenticationError, _LOGIN_REFUSED),
    (redis.exceptions.NoPermissionError, _NOT_PERMITTED),
    (redis.BusyLoadingError, "is still loading its data: try again in a moment"),
    (redis.ReadOnlyError, _READ_ONLY),
    (redis.exceptions.MasterDownError, "is a replica that has lost its primary: wait for the failover to end"),
    (redis.OutOfMemoryError, _OUT_OF_MEMORY),
    (redis.TimeoutError, "does not answer in time: is it overloaded, or the network cut?"),
    (redis.exceptions.TryAgainError, "moves the keys to another node of the cluster: try again in a moment"),
    (redis.exceptions.NoScriptError, "has lost the scripts again: try again"),
    (
        (redis.exceptions.ClusterError, redis.exceptions.RedisClusterException, redis.exceptions.AskError),
        "is a cluster that cannot serve this now",
    ),
)

# Recognized by their text. Servers before 7.0 wrap the error of a command in a script.
_BY_TEXT = {
    "ACL failure in script": _NOT_PERMITTED,
    "The user executing the script can't": _NOT_PERMITTED,
    "DB index is out of range": "has no such database: check the number at the end of the URL",
    "-OOM ": _OUT_OF_MEMORY,
    "-READONLY ": _READ_ONLY,
}

# Codes of temporary errors that redis-py has no class for, anywhere in the text. For the others it removes the code.
_CODES = ("MISCONF ", "NOREPLICAS ", "BUSY ", "UNBLOCKED ")
