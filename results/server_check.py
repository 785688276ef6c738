"""Checks of a server: its version, what it does without memory, and what survives a crash."""

from __future__ import annotations

import re
from typing import Any

import redis

from millrace.results.connection import node_of, server_name
from millrace.results.errors import InvalidRedisURL, QueueError, ServerUnsuitable
from millrace.results.server_errors import A_CLUSTER_NODE, A_SENTINEL, as_unavailable

MIN_REDIS = (6, 2)
MIN_VALKEY = (7, 2)


def check_server(client: redis.Redis, key: str) -> list[str]:
    """Return warnings about the server's settings. Raises ServerUnsuitable when it would lose jobs or is too old,
    and InvalidRedisURL when it is a Sentinel, or a cluster's node and the client is not a cluster's.

    In a cluster the node of `key` is checked. Reads INFO, not CONFIG, which hosted servers often forbid; a setting that INFO
    does not show is a warning.
    """
    server = server_name(client)
    info = _read_info(client, server, key)
    if info is None:
        return [f"Redis at {server} does not permit INFO: check that maxmemory-policy is noeviction"]
    modes = (info.get("redis_mode"), info.get("server_mode"))  # the second one is Valkey's
    if "sentinel" in modes:
        raise InvalidRedisURL(f"Redis at {server} is {A_SENTINEL}")
    if "cluster" in modes and not isinstance(client, redis.RedisCluster):
        raise InvalidRedisURL(f"Redis at {server} is {A_CLUSTER_NODE}")
    _check_version(info, server)
    warnings = []
    policy = info.get("maxmemory_policy")
    if policy is None:
        warnings.append(f"Redis at {server} does not show its maxmemory-policy: it has to be noeviction")
    elif policy != "noeviction":
        raise ServerUnsuitable(
            f"Redis at {server} has maxmemory-policy {policy}: it would drop accepted jobs when memory is short. "
            "Set it: CONFIG SET maxmemory-policy noeviction, and in redis.conf"
        )
    if not info.get("aof_enabled"):
        warnings.append(f"Redis at {server} has no AOF: a crash of the server loses jobs. Set appendonly yes")
    return warnings


def _read_info(client: redis.Redis, server: str, key: str) -> dict[str, Any] | None:
    try:
        info: Any = node_of(client, key).info()
        return dict(info)
    except redis.exceptions.NoPermissionError:
        return None
    except redis.RedisError as error:
        if unavailable := as_unavailable(error, server):
            raise unavailable from error
        if "unknown command" in str(error):  # renamed away
            return None
        raise QueueError(f"Redis at {server} refused a command: {error}") from error


def _check_version(info: dict[str, Any], server: str) -> None:
    is_valkey = "valkey_version" in info
    version = str(info["valkey_version"] if is_valkey else info.get("redis_version", ""))
    needed = MIN_VALKEY if is_valkey else MIN_REDIS
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < needed:
        name = "Valkey" if is_valkey else "Redis"
        raise ServerUnsuitable(f"{name} at {server} has version {version}: at least {needed[0]}.{needed[1]} is needed")
