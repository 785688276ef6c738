"""Producers that die and submit again, slow readers, results that expire. All five invariants hold."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec
import pytest

from millrace import Client, GenerationRequest
from millrace.results.errors import JobConflict, JobNotFound
from tests.chaos.checker import ALL, Invariant
from tests.chaos.conftest import TEST_LIMIT, Place
from tests.chaos.processes import ProducerProcess, wait_until
from tests.chaos.workload import make_jobs

pytestmark = [pytest.mark.faults, TEST_LIMIT]


def test_a_producer_is_killed_between_submits_and_submits_all_again(place: Place, tmp_path: Path) -> None:
    """Every job that was confirmed runs once, also if it is submitted again."""
    requests = make_jobs(24, max_tokens=24)
    file = tmp_path / "jobs.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(_fields(request)) + b"\n" for request in requests))
    engine = place.engine()
    first = ProducerProcess(place.server.url, place.queue, file)
    first.go_on(5)
    accepted = first.read_accepted(5)
    first.kill()
    first.close()
    place.wait_all(accepted)
    assert place.client.stats().finished == 5
    second = ProducerProcess(place.server.url, place.queue, file)
    second.go_on(24)
    assert second.read_accepted(24)[:5] == accepted
    second.close()
    place.accepted.update({request.id or "": request for request in requests})
    place.wait_all()
    assert place.client.stats().finished == 24
    place.check(ALL, engine)


def _fields(request: GenerationRequest) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(request)
    return {"sampling": {}, **fields}


@pytest.mark.slow
def test_the_same_ids_from_several_producers_at_once(place: Place) -> None:
    engine = place.engine()
    requests = make_jobs(64, max_tokens=24)
    place.accepted.update({request.id or "": request for request in requests})

    def submit() -> None:
        with Client(place.server.url, queue=place.queue) as client:
            for _ in range(5):
                client.submit_many(requests)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = msgspec.structs.replace(requests[0], prompt="another body")
    with pytest.raises(JobConflict):
        place.client.submit_many([other])
    place.wait_all()
    assert place.client.stats().finished == 64
    place.check(ALL, engine)


@pytest.mark.slow
def test_a_slow_reader_of_a_short_stream_misses_nothing(place: Place) -> None:
    """The stream holds 4 events and is trimmed while it is read. The reader gets the removed events too."""
    place.redis.hset(place.client._keys.settings, "max_events", "4")
    engine = place.engine()
    (job_id,) = place.submit(make_jobs(1, max_tokens=900))
    events = place.client.stream(job_id)
    first = next(events)
    place.wait_all()
    assert "trimmed" in place.record(job_id)
    read = [first, *events]
    assert "".join(event.text for event in read) == place.client.get(job_id).text
    assert [event.offset for event in read] == sorted({event.offset for event in read})
    again = list(place.client.stream(job_id, after=first.id))
    assert again[0].is_restart
    assert "".join(event.text for event in again) == place.client.get(job_id).text
    place.check(ALL, engine)


@pytest.mark.slow
def test_a_result_passes_while_it_is_polled(place: Place) -> None:
    """Until its time is over it is there as a whole, and all five invariants hold; then it is unknown, and its id is free.
    It is never in between. Afterwards no record says how it ended, so what is left to hold is that nothing of it lies
    about: IN_ONE_PLACE and ALL_RETURNED."""
    place.redis.hset(place.client._keys.settings, "result_ttl_ms", "4000")
    engine = place.engine()
    (request,) = make_jobs(1, max_tokens=24)
    text = place.expected([request])["job-0"][0].text
    for _ in range(2):
        place.submit([request])
        place.wait_all()
        place.check(ALL)
        assert poll_to_the_end(place, "job-0") == {text}
        pattern = place.client._keys.prefix.replace("{", "\\{").replace("}", "\\}") + "*:job-0"
        wait_until(lambda pattern=pattern: list(place.redis.scan_iter(pattern)) == [])  # type: ignore[misc]
        place.accepted.clear()
        place.check(frozenset({Invariant.IN_ONE_PLACE, Invariant.ALL_RETURNED}))
        place.redis.delete(
            place.client._keys.done, place.client._keys.prefix + "counts"
        )  # else its second life counts as a second end
    place.check(ALL, engine)


def poll_to_the_end(place: Place, job_id: str) -> set[str]:
    """Return every text that the job has until it is unknown."""
    seen = set()
    with contextlib.suppress(JobNotFound):
        while True:
            seen.add(place.client.get(job_id).text)
    return seen
