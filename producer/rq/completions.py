"""From Millrace's ends to RQ's: follows the queue's feed of completions, and looks after what the feed may have missed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from millrace.producer.rq.intake import RQIntake
from millrace.producer.rq.native_jobs import NativeJobs, is_over
from millrace.producer.rq.result_writer import Settler
from millrace.producer.rq.run_table import Flights
from millrace.producer.rq.runs import Flight, FlightEnd
from millrace.results.messages import Job

logger = logging.getLogger("millrace.gateway")

_READ_AT_ONCE = 64
_SWEEP_INTERVAL_S = 10.0
_MAX_LOOKUPS_LOST = 2


class Completions:
    """Owns the way out."""

    def __init__(self, native: NativeJobs, flights: Flights, settler: Settler, intake: RQIntake) -> None:
        self._native = native
        self._flights = flights
        self._settler = settler
        self._intake = intake
        self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S

    def follow(self) -> None:
        """Wait for ends, a second at most, and mirror them."""
        ended = self._flights.by_native_ids(self._native.next_ended())
        self._mirror(ended)
        if time.monotonic() >= self._next_sweep_s:
            self._look_after(self._flights.all())
            self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S
        else:
            self._look_after(self._flights.unchecked())

    def sweep_soon(self) -> None:
        """Something went wrong on the way: look at all flights next time."""
        self._next_sweep_s = 0.0

    def _look_after(self, flights: Sequence[Flight]) -> None:
        states = self._native.states([flight.native_id for flight in flights])
        ended, lost = [], []
        for flight, state in zip(flights, states, strict=True):
            flight.num_lookups_lost = 0 if state else flight.num_lookups_lost + 1
            flight.is_checked = state is not None
            if is_over(state):
                ended.append(flight)
            elif flight.num_lookups_lost > _MAX_LOOKUPS_LOST:  # once or twice: it is just being submitted
                lost.append(flight)
        self._mirror(ended)
        if lost:
            logger.error("Millrace has lost %d jobs: submitting them again", len(lost))
            self._intake.begin_again(lost)

    def _mirror(self, flights: Sequence[Flight]) -> None:
        for first in range(0, len(flights), _READ_AT_ONCE):
            some = flights[first : first + _READ_AT_ONCE]
            jobs = self._native.get([flight.native_id for flight in some])
            self._settler.settle(
                [
                    _end_of(flight, job)
                    for flight, job in zip(some, jobs, strict=True)
                    if job is not None and job.is_done
                ]
            )


def _end_of(flight: Flight, job: Job) -> FlightEnd:
    if job.state == "finished":
        value = {
            "text": job.text,
            "token_ids": job.token_ids,
            "finish_reason": job.finish_reason,
            "usage": msgspec.to_builtins(job.usage),
        }
        return FlightEnd(flight, "finished", value)
    if job.state == "cancelled" and flight.is_stopping:
        return FlightEnd(flight, "stopped", reason="stopped by RQ's stop-job command")
    why = f": {job.error.kind}: {job.error.message}" if job.error else ""
    return FlightEnd(flight, "failed", reason=job.state + why)
