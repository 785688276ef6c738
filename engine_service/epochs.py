"""The workers' lives, one after the other: the KV pool of each, how it ended, and who is to blame for that."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import msgspec

from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.scheduler import ALONE_AFTER_CRASHES, Scheduler, SchedulerConfig
from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.errors import EngineDead
from millrace.engine_service.recovery import Recovery
from millrace.executor.base import Executor
from millrace.executor.errors import ExecutorError, WorkerError
from millrace.executor.wire.messages import RowSampling, SeqId

logger = logging.getLogger("millrace.engine")

TOO_LARGE = "too_large"
"""The kind of `Failure` of a sequence that an engine with all its ranks could compute."""

MAX_FRUITLESS_RESTARTS = 10
"""Losses of the workers in a row, without one new token from anybody, after which it must be the machine."""

_PROBE_ID = SeqId(0)
"""Requests count from 1."""
_GREEDY = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, candidate=0, min_tokens=0, end_token_ids=[]
)


class Failure(msgspec.Struct, frozen=True):
    """Why a generation ended without a result."""

    kind: str
    message: str


class FailedSequence(msgspec.Struct, frozen=True):
    """A sequence that did not survive the end of an epoch; it is gone from the scheduler."""

    sequence: Sequence
    failure: Failure


class Epochs:
    """Owns the decision when the workers are replaced. Every epoch but the first begins with the sequences of the last."""

    def __init__(self, executor: Executor, config: SchedulerConfig, block_size: int) -> None:
        self._executor = executor
        self._config = config
        self._block_size = block_size
        self._recovery = Recovery(executor)
        self._num_fruitless = 0
        self._weights: dict[tuple[int, int], list[int]] = {}
        """Their checksums by rank, by the sizes that they were divided by first."""
        self.scheduler: Scheduler
        self.repair: str | None = None
        """While the workers are replaced: why, for those who watch from other threads."""

    def start(self) -> Scheduler:
        """The first epoch. Raises `ConfigurationError` when this can't work, else `EngineDead`."""
        self._recovery.start()
        self._require_same_weights()
        self.scheduler = Scheduler(self._config, self._make_pool(), self._executor.epoch)
        return self.scheduler

    def restart(self, error: ExecutorError) -> list[FailedSequence]:
        """Replace the workers after this error. Raises `EngineDead` when that can't be done or does not help."""
        if not self._executor.can_restart:
            raise _dead(f"{error}; who started the workers has to start them again", error) from error
        logger.error("%s; restarting the workers", error)
        self._num_fruitless += 1
        if self._num_fruitless > MAX_FRUITLESS_RESTARTS:
            raise _dead(f"{error}, the {self._num_fruitless}th loss without a token between", error) from error
        with self._repairing(str(error)):
            self._recovery.restart()
        return self._begin()

    def is_time_to_grow(self) -> bool:
        """Whether ranks are missing and it is time to see if they are back."""
        return self._recovery.is_time_to_grow()

    def grow(self) -> list[FailedSequence]:
        """See whether missing ranks are back. Nothing may be in flight."""
        with self._repairing("all ranks are tried again"):
            self._recovery.grow()
        return self._begin()

    def count_good_step(self) -> None:
        """The workers have brought somebody a token."""
        self._num_fruitless = 0

    @contextlib.contextmanager
    def _repairing(self, reason: str) -> Iterator[None]:
        self.repair = reason
        try:
            yield
        finally:
            self.repair = None

    def _begin(self) -> list[FailedSequence]:
        """The workers are new: whoever is blamed for that too often, or fits no more, is over."""
        self._require_same_weights()
        quarantined = self.scheduler.restart(self._executor.epoch)
        is_same_size = self._executor.num_device_blocks == self.scheduler.pool.num_blocks
        misfits = [] if is_same_size else self.scheduler.replace_pool(self._make_pool())
        if quarantined:
            self._require_sound_machine()
        return [FailedSequence(sequence, _crashed(sequence)) for sequence in quarantined] + [
            FailedSequence(sequence, too_large(self.scheduler.pool)) for sequence in misfits
        ]

    def _make_pool(self) -> BlockPool:
        return BlockPool(self._executor.num_device_blocks, self._block_size)

    def _require_same_weights(self) -> None:
        """What goes on has to go on with the model that it began with: workers with another one are not kept. When the
        weights are divided by these sizes for the first time there is nothing to compare."""
        now = self._executor.weights_checksums
        before = self._weights.setdefault(self._executor.parallel_sizes, now)
        changed = [rank for rank, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
        if changed:
            self._executor.shutdown()
            raise EngineDead(
                f"rank {changed[0]}: the weights are not what they were before the workers were replaced: restart the "
                "engine, with the model's files as they were when it started"
            )

    def _require_sound_machine(self) -> None:
        """Before a sequence is blamed: one token of a harmless one. When that is lost too, it is not the sequence."""
        rules = StopRules(max_tokens=1, min_tokens=0, end_token_ids=frozenset())
        self.scheduler.add_alone(Sequence(_PROBE_ID, [0], _GREEDY, rules, crash_count=ALONE_AFTER_CRASHES))
        plan = self.scheduler.schedule()
        assert plan is not None
        try:
            self.scheduler.apply(self._executor.execute_model(plan).result())
        except ExecutorError as error:
            raise _dead(f"the workers can't even compute one token: {error}", error) from error


def _dead(message: str, error: ExecutorError) -> EngineDead:
    return EngineDead(message, error.failure.cause if isinstance(error, WorkerError) else "error")


def too_large(pool: BlockPool) -> Failure:
    """For a sequence that fitted when it came, before ranks were lost."""
    message = f"with the ranks that are left the KV pool holds {pool.capacity_tokens} tokens, too few for this job"
    return Failure(TOO_LARGE, message)


def _crashed(sequence: Sequence) -> Failure:
    message = f"the workers were lost {sequence.crash_count} times while they computed this job, the last times alone"
    return Failure("crashed", message)
