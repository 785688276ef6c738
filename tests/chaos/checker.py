"""The checker of all fault tests: what must hold after a fault.

A test names the invariants that hold under its fault: `ALL`, or fewer with the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Any

from millrace.results.connection import connect
from millrace.results.job import CompletionOutput
from millrace.results.keys import QueueKeys
from millrace.results.messages import TERMINAL_STATES
from millrace.results.queue import JobQueue
from tests.chaos.processes import ChaosEngine
from tests.results.invariants import check_queue


class Invariant(Enum):
    """The five invariants."""

    ENDED = "every accepted id has exactly one terminal record"
    COMMITTED_ONCE = "one committed result per id"
    IN_ONE_PLACE = "no id in two sets, none in no set"
    SAME_OUTPUT = "output equals the undisturbed run, and streams join to it"
    ALL_RETURNED = "all leases and KV blocks are returned"


ALL = frozenset(Invariant)
WITHOUT_LOST_JOBS = ALL - {Invariant.ENDED}
"""For faults under which the server itself may lose jobs that it had accepted."""

REPLACEMENT = "\ufffd"
"""Stands for a character whose last bytes are missing: an output that was cut short may end with it."""


class Checker:
    """Checks a queue whose jobs have all ended."""

    def __init__(self, server_url: str, queue: str, expected: Mapping[str, list[CompletionOutput]]) -> None:
        """`expected`: the undisturbed candidates by accepted id."""
        self._client: Any = connect(server_url)
        self._queue = JobQueue(self._client, queue)
        self._keys = QueueKeys(queue)
        self._expected = expected

    def close(self) -> None:
        self._queue.close()

    def check(
        self,
        invariants: Iterable[Invariant] = ALL,
        *,
        drained: Iterable[ChaosEngine] = (),
        states: Mapping[str, str] | None = None,
    ) -> None:
        """`drained`: engines that have drained. `states`: by id, ends other than "finished"; such an output is a prefix
        of the undisturbed one."""
        checks: dict[Invariant, Callable[[], None]] = {
            Invariant.ENDED: lambda: _require_none(self.lost(states), "have not ended as they should"),
            Invariant.COMMITTED_ONCE: lambda: _require_none(self.doubled(), "were committed more than once"),
            Invariant.IN_ONE_PLACE: self._check_places,
            Invariant.SAME_OUTPUT: lambda: _require_none(self.torn(), "differ from the undisturbed run"),
            Invariant.ALL_RETURNED: lambda: self._check_returned(drained),
        }
        for invariant in Invariant:
            if invariant in set(invariants):
                checks[invariant]()

    # --- one method for each invariant -----------------------------------------------------------------------------

    def lost(self, states: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the accepted ids without the expected end, with the end that they have."""
        return {
            job_id: found
            for job_id in self._expected
            if (found := self._end_of(job_id)) != (states or {}).get(job_id, "finished")
        }

    def doubled(self) -> list[str]:
        """Return ids whose end was announced more than once, and states whose count is not the number of jobs in them."""
        announced = Counter(_text(fields)["id"] for _, fields in self._client.xrange(self._keys.done))
        states = Counter(self._record(job_id)["state"] for job_id in announced)
        counts = _text(self._client.hgetall(self._keys.prefix + "counts"))
        miscounted = [state for state in sorted(TERMINAL_STATES) if int(counts.get(state, 0)) != states.get(state, 0)]
        return [job_id for job_id, count in announced.items() if count != 1] + miscounted

    def torn(self) -> list[str]:
        """Return the accepted ids whose output is not the undisturbed one, or whose stream does not join to it."""
        return [job_id for job_id in self._expected if not self._is_whole(job_id)]

    def _check_places(self) -> None:
        check_queue(self._client, self._keys.queue)

    def _check_returned(self, drained: Iterable[ChaosEngine]) -> None:
        engines = [member.decode() for member in self._client.zrange(self._keys.prefix + "engines", 0, -1)]
        held = {engine: self._client.smembers(f"{self._keys.prefix}leases:{engine}") for engine in engines}
        assert {engine: ids for engine, ids in held.items() if ids} == {}
        for engine in drained:
            engine.check_kv_returned()

    # --- reading ---------------------------------------------------------------------------------------------------

    def _end_of(self, job_id: str) -> str:
        state = self._record(job_id).get("state", "no record")
        terminal = [i for i, entry in enumerate(self._entries(job_id)) if "state" in entry]
        is_last = terminal == [int(self._client.xlen(self._keys.result(job_id))) - 1]
        return state if is_last else f"{state}, with terminal entries at {terminal}"

    def _is_whole(self, job_id: str) -> bool:
        record = self._record(job_id)
        if not record:
            return True  # whether it may be gone is for ENDED to say
        job = self._queue.get(job_id)
        entries = [entry for entry in self._entries(job_id) if "state" not in entry]
        streams = [[entry for entry in entries if entry.get("index", "0") == str(one.index)] for one in job.outputs]
        is_joined = "trimmed" in record or all(map(_is_joined, streams, job.outputs))
        expected = self._expected[job_id]
        has_all = len(job.outputs) == len(expected)
        if job.state == "finished":
            return is_joined and job.outputs == expected
        return is_joined and has_all and all(map(_is_beginning, job.outputs, expected))

    def _record(self, job_id: str) -> dict[str, str]:
        return _text(self._client.hgetall(self._keys.job(job_id)))

    def _entries(self, job_id: str) -> list[dict[str, str]]:
        return [_text(fields) for _, fields in self._client.xrange(self._keys.result(job_id))]


def _is_joined(entries: list[dict[str, str]], output: CompletionOutput) -> bool:
    shown = "".join(entry["text"] for entry in entries)
    token_ids = [token for entry in entries for token in json.loads(entry["tokens"])]
    return (shown, token_ids) == (output.text, output.token_ids)


def _is_beginning(output: CompletionOutput, expected: CompletionOutput) -> bool:
    is_beginning = expected.token_ids[: len(output.token_ids)] == output.token_ids
    return is_beginning and expected.text.startswith(output.text.rstrip(REPLACEMENT))


def _text(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in raw.items()}


def _require_none(found: Collection[str], what: str) -> None:
    assert not found, f"{len(found)} {what}: {found}"
