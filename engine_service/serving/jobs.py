"""What passes between the threads of an engine service: jobs on their way in, and events about jobs under way."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from millrace.engine_service.core.crash_policy import ALONE_AFTER_CRASHES
from millrace.engine_service.generation import Generation
from millrace.results.messages import ClaimedJob, JobError, JobId, Lease


class ServedJob:
    """Owns what the engine loop knows of one claimed job besides its generation: how much of it is safe and visible."""

    __slots__ = (
        "arrived_s",
        "cost",
        "generation",
        "is_alone",
        "is_watched",
        "job_id",
        "lease",
        "num_published",
        "num_saved",
        "saved_at_s",
    )

    def __init__(self, claimed: ClaimedJob, generation: Generation) -> None:
        self.job_id = claimed.job_id
        self.lease = claimed.lease
        self.cost = claimed.cost
        self.is_alone = is_alone(claimed)
        self.generation = generation
        self.is_watched = claimed.is_watched or claimed.num_published > 0
        self.num_saved = len(claimed.token_ids)
        """Output tokens in the checkpoint."""
        self.num_published = claimed.num_published
        """Output tokens that readers have seen."""
        self.saved_at_s = 0.0
        self.arrived_s = 0.0

    def __repr__(self) -> str:
        return f"ServedJob({self.job_id}, lease {self.lease}, {self.num_saved} saved, {self.num_published} published)"


def is_alone(claimed: ClaimedJob) -> bool:
    """Whether engines have died with this job so often that it must not take others along."""
    return claimed.crash_count >= ALONE_AFTER_CRASHES


class Arrived(msgspec.Struct, frozen=True):
    """A claimed job that can run."""

    job: ServedJob


class Refused(msgspec.Struct, frozen=True):
    """A claimed job that can't: it ends as failed."""

    claimed: ClaimedJob
    error: JobError


class Deferred(msgspec.Struct, frozen=True):
    """A claimed job whose record is of a newer protocol than this engine knows."""

    claimed: ClaimedJob


class Abort(msgspec.Struct, frozen=True):
    """This job has to end with what it has: somebody asked for it, or its deadline has passed."""

    job_id: JobId
    state: Literal["cancelled", "expired"]


class Watch(msgspec.Struct, frozen=True):
    """Somebody reads this job live."""

    job_id: JobId


class Lost(msgspec.Struct, frozen=True):
    """The job is another engine's by now: drop it and write nothing."""

    job_id: JobId
    lease: Lease | None = None
    """The lease that was lost; None for whichever is held."""


class SetSleepLevel(msgspec.Struct, frozen=True):
    """The operator wants the engine to sleep this deep, or, with 0, to be awake. Said with every heartbeat."""

    level: int


EngineEvent: TypeAlias = Arrived | Refused | Deferred | Abort | Watch | Lost | SetSleepLevel
