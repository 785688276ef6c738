"""The jobs that one gateway has in flight, between its threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from millrace.producer.rq.ledger import Ledger
from millrace.producer.rq.runs import GatewayRun


class RunTable:
    """Owns the table of runs. The intake adds and takes back, the result_writer removes; every thread may look."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._by_job_id: dict[str, GatewayRun] = {}
        self._by_native_id: dict[str, GatewayRun] = {}
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"RunTable({len(self)} of {self._max_in_flight})"

    def __len__(self) -> int:
        return len(self._by_job_id)

    def add(self, runs: Iterable[GatewayRun]) -> None:
        """A run of the same RQ job takes the old one's place."""
        with self._changed:
            for run in runs:
                self._remove(self._by_job_id.get(run.job.id))
                self._by_job_id[run.job.id] = run
                self._by_native_id[run.native_id] = run

    def remove(self, runs: Iterable[GatewayRun]) -> None:
        """Those that are no longer in the table are skipped."""
        with self._changed:
            for run in runs:
                if self._by_job_id.get(run.job.id) is run:
                    self._remove(run)
            self._changed.notify_all()

    def get(self, job_id: str) -> GatewayRun | None:
        return self._by_job_id.get(job_id)

    def of(self, ledger: Ledger) -> list[GatewayRun]:
        """Those from one RQ queue."""
        return [run for run in self.all() if run.ledger is ledger]

    def all(self) -> list[GatewayRun]:
        with self._changed:
            return list(self._by_job_id.values())

    def by_native_ids(self, native_ids: Iterable[str]) -> list[GatewayRun]:
        """Those of these Millrace jobs; other people's jobs are skipped."""
        with self._changed:
            found = {native_id: self._by_native_id.get(native_id) for native_id in native_ids}
        return [run for run in found.values() if run is not None]

    def unchecked(self) -> list[GatewayRun]:
        return [run for run in self.all() if not run.is_checked]

    @property
    def room(self) -> int:
        """How many more jobs may be taken."""
        return max(0, self._max_in_flight - len(self._by_job_id))

    def wait_for_room(self, timeout_s: float) -> int:
        """How many more jobs may be taken; 0 after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.room > 0, timeout_s)
            return self.room

    def _remove(self, run: GatewayRun | None) -> None:
        if run is not None:
            self._by_job_id.pop(run.job.id, None)
            self._by_native_id.pop(run.native_id, None)
