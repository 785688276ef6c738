"""The claimed jobs of an engine service, and the events that its threads post to the engine loop."""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

import msgspec

from millrace.engine_service.chat.outputs import CandidateParts, ChatReader
from millrace.engine_service.core.crash_policy import ALONE_AFTER_CRASHES
from millrace.engine_service.generation import Generation
from millrace.producer.prompt_start import prompt_digest
from millrace.results.messages import ClaimedJob, JobError, JobId, Lease


class Candidate(msgspec.Struct, eq=False):
    """Owns how much of a candidate's output is saved and published. The generation owns the output itself."""

    generation: Generation
    index: int | None
    """None: the only candidate of its job."""
    num_saved: int
    """Output tokens in the checkpoint."""
    num_published: int
    """Output tokens that readers can see."""
    parts: CandidateParts | None = None
    """Splits the published text of a chat; None: it is plain."""

    def restore_parts(self) -> None:
        """Bring `parts` to where an earlier attempt left off."""
        if self.parts is not None and self.num_published > 0:
            self.parts.feed(self.generation.marked_text_between(0, self.num_published, self.parts.hidden_marks))


class ServedJob:
    """Owns the candidates of one job. They run side by side, and the job ends with the last of them."""

    def __init__(
        self,
        claimed: ClaimedJob,
        generations: list[Generation],
        due_s: float,
        chat: ChatReader | None = None,
    ) -> None:
        """`generations`: one for each candidate of the record. `due_s`: since when it could run, in seconds since the epoch
        by the clock of Redis. `chat` reads the outputs; None: they are plain text."""
        self.job_id = claimed.job_id
        self.lease = claimed.lease
        self.cost = claimed.cost
        self.prompt_digest = prompt_digest(claimed.body)
        self.is_alone = is_alone(claimed)
        checkpoints = claimed.checkpoints
        indices = [None] if len(checkpoints) == 1 else range(len(checkpoints))
        self.candidates = [
            Candidate(
                generation,
                index,
                len(checkpoint.token_ids),
                checkpoint.num_published,
                None if chat is None else CandidateParts(chat, claimed.job_id, index or 0),
            )
            for generation, index, checkpoint in zip(generations, indices, checkpoints, strict=False)
        ]
        for candidate in self.candidates:
            candidate.restore_parts()
        for generation in generations:
            generation.sequence.is_followed |= self.is_alone  # its engine may die of it: each token is saved at once
        if claimed.is_watched or any(one.num_published for one in checkpoints):
            self.watch()
        self.saved_at_s = 0.0
        self.due_s = due_s
        self.awaits_first_token = claimed.attempt <= 1 and not any(one.token_ids for one in checkpoints)
        """Whether no token of the job exists yet, also not of an earlier attempt."""
        self.first_token_s: float | None = None
        """When it came (`time.monotonic`); None where an earlier attempt had it, or none has come."""
        first = generations[0].sequence
        self.is_first_followed = first.is_followed
        """Whether the first candidate reports each token also after the first token of the job."""
        first.is_followed |= self.awaits_first_token

    @property
    def is_watched(self) -> bool:
        """Whether somebody reads the output while it grows."""
        return self.candidates[0].generation.sequence.is_watched

    def watch(self) -> None:
        """Mark the job as read live."""
        for generation in self.generations:
            generation.sequence.is_watched = generation.sequence.is_followed = True

    def note_first_token(self) -> None:
        self.awaits_first_token, self.first_token_s = False, time.monotonic()
        self.generations[0].sequence.is_followed = self.is_first_followed or self.is_watched

    @property
    def generations(self) -> list[Generation]:
        return [candidate.generation for candidate in self.candidates]

    @property
    def has_ended(self) -> bool:
        """Whether all candidates have."""
        return all(candidate.generation.finish_reason is not None for candidate in self.candidates)


class PendingJob(msgspec.Struct, eq=False):
    """A claimed job that is slow to prepare, which is done beside the claims. Also the event that this begins."""

    claimed: ClaimedJob
    is_withdrawn: bool = False
    """Set by the engine loop: the result is not needed any more."""


def is_alone(claimed: ClaimedJob) -> bool:
    """Whether so many engines have died with this job that it must run alone."""
    return claimed.crash_count >= ALONE_AFTER_CRASHES


class Arrived(msgspec.Struct, frozen=True):
    """A claimed job that can run."""

    job: ServedJob


class Refused(msgspec.Struct, frozen=True):
    """A claimed job that can't run: it ends as failed."""

    claimed: ClaimedJob
    error: JobError


class Deferred(msgspec.Struct, frozen=True):
    """A claimed job whose record has a newer protocol than this engine knows."""

    claimed: ClaimedJob


class Prepared(msgspec.Struct, frozen=True):
    """The preparation of a slow job is over."""

    job: PendingJob
    outcome: Arrived | Refused | Deferred


class Abort(msgspec.Struct, frozen=True):
    """This job has to end with its output so far: it was cancelled, or its deadline has passed."""

    job_id: JobId
    state: Literal["cancelled", "expired"]


class Watch(msgspec.Struct, frozen=True):
    """A reader follows this job live."""

    job_id: JobId


class Lost(msgspec.Struct, frozen=True):
    """The job belongs to another engine now: drop it and write nothing."""

    job_id: JobId
    lease: Lease | None = None
    """The lost lease; None: whichever is held."""


class SetSleepLevel(msgspec.Struct, frozen=True):
    """The sleep level that the operator wants, 0 for awake. Repeated with every heartbeat."""

    level: int


class ResetCache(msgspec.Struct, frozen=True):
    """The operator wants the prefix cache to be forgotten. Repeated with every heartbeat."""

    number: int
    """Number of the request. A later request has a larger number."""


EngineEvent: TypeAlias = (
    PendingJob | Prepared | Arrived | Refused | Deferred | Abort | Watch | Lost | SetSleepLevel | ResetCache
)
