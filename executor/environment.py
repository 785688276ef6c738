"""The environment of child processes."""

from __future__ import annotations

from collections.abc import Mapping

SECRETS = frozenset(
    {
        "MILLRACE_REDIS_URL",
        "MILLRACE_REDIS_URL_FILE",
        "REDIS_URL",
        "REDIS_URL_FILE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    }
)
"""Variables with a login, or with the path of one. Only the engine connects to Redis and downloads models."""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that works on what users and model files contain."""
    return {name: value for name, value in environment.items() if name not in SECRETS}
