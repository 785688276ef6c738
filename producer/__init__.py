"""What a client says to the queue: requests, and the clients that submit them and read what became of them."""

from __future__ import annotations

from producer.async_client import AsyncClient
from producer.client import Client
from producer.errors import InvalidRequest, PayloadTooLarge
from producer.request import GenerationRequest
from producer.sampling import SamplingParams
from results.errors import (
    BatchNotFound,
    CannotRedrive,
    EngineNotFound,
    JobConflict,
    JobNotFound,
    MillraceError,
    NotDurable,
    QueueError,
    QueueFull,
    RedisUnavailable,
    ServerUnsuitable,
    WaitTimeout,
)
from results.messages import BatchStatus, Job, JobError, Position, QueueStats, StreamEvent, Usage

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
    "PayloadTooLarge",
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
]
