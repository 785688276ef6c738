"""From Millrace's ends to RQ's: follows the queue's feed of completions, and looks after what the feed may have missed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from millrace.producer.rq.intake import RQIntake
from millrace.producer.rq.native_jobs import NativeJobs, is_over
from millrace.producer.rq.result_writer import ResultWriter
from millrace.producer.rq.run_table import RunTable
from millrace.producer.rq.runs import GatewayRun, RunEnd
from millrace.results.messages import Job

logger = logging.getLogger("millrace.gateway")

_READ_AT_ONCE = 64
_SWEEP_INTERVAL_S = 10.0
_MAX_LOOKUPS_LOST = 2


class Completions:
    """Owns the way out."""

    def __init__(self, native: NativeJobs, runs: RunTable, result_writer: ResultWriter, intake: RQIntake) -> None:
        self._native = native
        self._runs = runs
        self._result_writer = result_writer
        self._intake = intake
        self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S

    def follow(self) -> None:
        """Wait for ends, a second at most, and mirror them."""
        ended = self._runs.by_native_ids(self._native.next_ended())
        self._mirror(ended)
        if time.monotonic() >= self._next_sweep_s:
            self._look_after(self._runs.all())
            self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S
        else:
            self._look_after(self._runs.unchecked())

    def sweep_soon(self) -> None:
        """Something went wrong on the way: look at all runs next time."""
        self._next_sweep_s = 0.0

    def _look_after(self, runs: Sequence[GatewayRun]) -> None:
        states = self._native.states([run.native_id for run in runs])
        ended, lost = [], []
        for run, state in zip(runs, states, strict=True):
            run.num_lookups_lost = 0 if state else run.num_lookups_lost + 1
            run.is_checked = state is not None
            if is_over(state):
                ended.append(run)
            elif run.num_lookups_lost > _MAX_LOOKUPS_LOST:  # once or twice: it is just being submitted
                lost.append(run)
        self._mirror(ended)
        if lost:
            logger.error("Millrace has lost %d jobs: submitting them again", len(lost))
            self._intake.begin_again(lost)

    def _mirror(self, runs: Sequence[GatewayRun]) -> None:
        for first in range(0, len(runs), _READ_AT_ONCE):
            some = runs[first : first + _READ_AT_ONCE]
            jobs = self._native.get([run.native_id for run in some])
            self._result_writer.write_ends(
                [_end_of(run, job) for run, job in zip(some, jobs, strict=True) if job is not None and job.is_done]
            )


def _end_of(run: GatewayRun, job: Job) -> RunEnd:
    if job.state == "finished":
        value = {
            "text": job.text,
            "token_ids": job.token_ids,
            "finish_reason": job.finish_reason,
            "usage": msgspec.to_builtins(job.usage),
        }
        return RunEnd(run, "finished", value)
    if job.state == "cancelled" and run.is_stopping:
        return RunEnd(run, "stopped", reason="stopped by RQ's stop-job command")
    why = f": {job.error.kind}: {job.error.message}" if job.error else ""
    return RunEnd(run, "failed", reason=job.state + why)
