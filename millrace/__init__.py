"""Millrace turns a Redis that you already run into an LLM generation service.

    from millrace import Client

    client = Client("redis://localhost:6379/0")
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4)
    print(client.wait(job_id, timeout_s=60).text)

Every public name is loaded when it is first used, so that `import millrace` costs nothing and needs neither torch nor rq.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producer import AsyncClient, Client, GenerationRequest, InvalidRequest, SamplingParams
    from results.messages import (
        BatchNotFound,
        BatchStatus,
        CannotRedrive,
        EngineNotFound,
        Job,
        JobConflict,
        JobError,
        JobNotFound,
        MillraceError,
        NotDurable,
        Position,
        QueueError,
        QueueFull,
        QueueStats,
        RedisUnavailable,
        ServerUnsuitable,
        StreamEvent,
        Usage,
        WaitTimeout,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "BatchNotFound",
    "BatchStatus",
    "CannotRedrive",
    "Client",
    "EngineNotFound",
    "GenerationRequest",
    "InvalidRequest",
    "Job",
    "JobConflict",
    "JobError",
    "JobNotFound",
    "MillraceError",
    "NotDurable",
    "Position",
    "QueueError",
    "QueueFull",
    "QueueStats",
    "RedisUnavailable",
    "SamplingParams",
    "ServerUnsuitable",
    "StreamEvent",
    "Usage",
    "WaitTimeout",
    "__version__",
]

_FROM_PRODUCER = {"AsyncClient", "Client", "GenerationRequest", "InvalidRequest", "SamplingParams"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    from millrace.shadowing import CLIENT_PACKAGES, check_packages

    check_packages(CLIENT_PACKAGES)
    module = import_module("producer" if name in _FROM_PRODUCER else "results.messages")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
