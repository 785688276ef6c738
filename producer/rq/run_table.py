"""The jobs that one gateway has in flight, between its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from millrace.producer.rq.ledger import Ledger
from millrace.producer.rq.runs import Flight


class Flights:
    """Owns the table of flights. The intake adds and takes back, the settler removes; every thread may look."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._by_job_id: dict[str, Flight] = {}
        self._by_native_id: dict[str, Flight] = {}
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Flights({len(self)} of {self._max_in_flight})"

    def __len__(self) -> int:
        return len(self._by_job_id)

    def add(self, flights: Iterable[Flight]) -> None:
        """A flight of the same RQ job takes the old one's place."""
        with self._changed:
            for flight in flights:
                self._remove(self._by_job_id.get(flight.job.id))
                self._by_job_id[flight.job.id] = flight
                self._by_native_id[flight.native_id] = flight

    def remove(self, flights: Iterable[Flight]) -> None:
        """Those that are no longer in the table are skipped."""
        with self._changed:
            for flight in flights:
                if self._by_job_id.get(flight.job.id) is flight:
                    self._remove(flight)
            self._changed.notify_all()

    def get(self, job_id: str) -> Flight | None:
        return self._by_job_id.get(job_id)

    def of(self, ledger: Ledger) -> list[Flight]:
        """Those from one RQ queue."""
        return [flight for flight in self.all() if flight.ledger is ledger]

    def all(self) -> list[Flight]:
        with self._changed:
            return list(self._by_job_id.values())

    def by_native_ids(self, native_ids: Iterable[str]) -> list[Flight]:
        """Those of these Millrace jobs; other people's jobs are skipped."""
        with self._changed:
            found = {native_id: self._by_native_id.get(native_id) for native_id in native_ids}
        return [flight for flight in found.values() if flight is not None]

    def unchecked(self) -> list[Flight]:
        return [flight for flight in self.all() if not flight.is_checked]

    @property
    def room(self) -> int:
        """How many more jobs may be taken."""
        return max(0, self._max_in_flight - len(self._by_job_id))

    def wait_for_room(self, timeout_s: float) -> int:
        """How many more jobs may be taken; 0 after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.room > 0, timeout_s)
            return self.room

    def _remove(self, flight: Flight | None) -> None:
        if flight is not None:
            self._by_job_id.pop(flight.job.id, None)
            self._by_native_id.pop(flight.native_id, None)
