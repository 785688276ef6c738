"""What must be true of a queue at any moment, whatever happened to its clients and engines."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import redis

from millrace.results.keys import QueueKeys
from millrace.results.messages import TERMINAL_STATES

PLACES = {"queued": "ready", "delayed": "delayed", "running": "leases"}
"""By state: the kind of set that such a job is in. A job that has ended is in none."""


def check_queue(client: redis.Redis, queue: str) -> dict[str, str]:
    """Check everything that the keys of a queue must agree on. Returns the state of each job."""
    return _Check(client, QueueKeys(queue)).run()


def check_all_ended(client: redis.Redis, queue: str, job_ids: list[str]) -> None:
    """Check that each of the jobs has ended, in one terminal record, and that nothing is left of them elsewhere."""
    states = check_queue(client, queue)
    assert {job_id: states.get(job_id) for job_id in job_ids if states.get(job_id) not in TERMINAL_STATES} == {}


class _Check:
    """Owns one look at a queue, which must be at rest."""

    def __init__(self, client: redis.Redis, keys: QueueKeys) -> None:
        self._client: Any = client
        self._keys = keys
        pattern = keys.prefix.replace("{", "\\{").replace("}", "\\}") + "*"
        self._all = [key.decode().removeprefix(keys.prefix) for key in self._client.scan_iter(pattern, count=5000)]
        job_ids = self._names("job:")
        keys_of_jobs = [keys.job(job_id) for job_id in job_ids]
        records = map(_fields, self._read_each("hgetall", keys_of_jobs))
        self._records = dict(zip(job_ids, records, strict=True))
        self._ttl_s = dict(zip(job_ids, self._read_each("ttl", keys_of_jobs), strict=True))
        entries = self._read_each("xrange", [keys.result(job_id) for job_id in job_ids])
        self._entries = dict(zip(job_ids, entries, strict=True))
        self._have_checkpoints = {name.split(":")[1] for name in self._all if name.startswith(("tokens:", "logprobs:"))}

    def run(self) -> dict[str, str]:
        places = self._places()
        for job_id, record in self._records.items():
            state = record["state"]
            expected = [PLACES[state]] if state in PLACES else []
            assert places.pop(job_id, []) == expected, f"{job_id} is {state}, and in {expected}"
            self._check_output(job_id, record)
        assert places == {}, "ids without a record"
        self._check_owners()
        self._check_counts()
        self._check_waiting()
        self._check_deadlines()
        self._check_batches()
        self._check_done_feed()
        return {job_id: record["state"] for job_id, record in self._records.items()}

    def _places(self) -> dict[str, list[str]]:
        places: dict[str, list[str]] = {}
        for tenant in self._names("ready:"):
            for member in self._client.zrange(self._key("ready:" + tenant), 0, -1):
                number, beginning, job_id = member.decode().split(":", 2)
                places.setdefault(job_id, []).append("ready")
                record = self._records[job_id]
                serial = f"{int(number)}" + (f"-{beginning}" if beginning != "--------" else "")
                assert (record["tenant"], record["serial"]) == (tenant, serial), job_id
        for member in self._client.zrange(f"{self._keys.prefix}delayed", 0, -1):
            places.setdefault(member.decode(), []).append("delayed")
        for engine in self._names("leases:"):
            for member in self._client.smembers(f"{self._keys.prefix}leases:{engine}"):
                places.setdefault(member.decode(), []).append("leases")
                assert self._records[member.decode()]["engine"] == engine
        return places

    def _check_output(self, job_id: str, record: dict[str, str]) -> None:
        entries = [_fields(fields) for _, fields in self._entries[job_id]]
        terminals = [i for i, fields in enumerate(entries) if "state" in fields]
        has_ended = record["state"] in TERMINAL_STATES
        assert terminals == ([len(entries) - 1] if has_ended else []), f"{job_id}: terminal entries at {terminals}"
        indices = range(int(record["n"])) if "n" in record else [None]
        ends = {index: int(record.get(_of(index, "trimmed"), 0)) for index in indices}
        assert sum(ends.values()) == int(record.get("trimmed", 0)), f"{job_id}: trimmed"
        for fields in entries[: len(entries) - has_ended]:
            index, num_tokens = int(fields["index"]) if "index" in fields else None, len(json.loads(fields["tokens"]))
            place = int(fields["offset"]), int(fields["count"])
            assert place == (ends[index], num_tokens), f"{job_id}: gap or overlap"
            assert int(fields.get("position", ends[index])) == sum(ends.values()), f"{job_id}: position"
            ends[index] += num_tokens
        assert sum(ends.values()) == int(record.get("published", 0)), f"{job_id}: published"
        for index, end in ends.items():
            assert end == int(record.get(_of(index, "published"), 0)), f"{job_id}: published of {index}"
        if has_ended:
            assert entries[-1]["state"] == record["state"]
            assert int(entries[-1]["offset"]) == sum(ends.values()), f"{job_id}: offset of the end"
            has_lost = bool(int(record.get("trimmed", 0)))
            assert has_lost or job_id not in self._have_checkpoints, (
                f"{job_id} has ended, and its checkpoints are still there"
            )
            assert self._ttl_s[job_id] > 0, f"{job_id} stays for ever"
        else:
            for index, end in ends.items():
                key = f"{self._keys.prefix}tokens:{job_id}" + (f":{index}" if index is not None else "")
                num_kept = self._client.strlen(key) / 4
                assert end <= num_kept, f"{job_id}: visible but not kept"
                lines = self._client.get(key.replace(":tokens:", ":logprobs:"))
                assert lines is None or lines.count(b"\n") == num_kept, f"{job_id}: log-probabilities of other tokens"
            assert self._ttl_s[job_id] == -1, f"{job_id} expires before its end"

    def _check_owners(self) -> None:
        engines = {member.decode() for member in self._client.zrange(self._keys.prefix + "engines", 0, -1)}
        assert set(self._names("leases:")) <= engines, "leases of an engine that no reaper looks at"
        running = [record for record in self._records.values() if record["state"] == "running"]
        assert len({record["lease"] for record in running}) == len(running), "two jobs with one lease"
        for job_id, record in self._records.items():
            if record["state"] in PLACES and record["state"] != "running":
                assert "lease" not in record, f"{job_id} is {record['state']} and has a lease"

    def _check_counts(self) -> None:
        counts = self._hash("counts")
        states = [record["state"] for record in self._records.values()]
        assert int(counts.get("queued", 0)) == states.count("queued")
        ready = set(self._names("ready:"))
        assert {member.decode() for member in self._client.zrange(self._keys.prefix + "tenants", 0, -1)} == ready
        for state in TERMINAL_STATES:
            assert int(counts.get(state, 0)) >= states.count(state), state

    def _check_waiting(self) -> None:
        expected: dict[str, int] = {}
        for record in self._records.values():
            if record["state"] in ("queued", "delayed"):
                cost = int(record["cost"])
                for name, more in (
                    (":tokens", cost),
                    (f"{record['tenant']}:tokens", cost),
                    (f"{record['tenant']}:jobs", 1),
                ):
                    expected[name] = expected.get(name, 0) + more
        assert {name: int(value) for name, value in self._hash("waiting").items()} == expected

    def _check_deadlines(self) -> None:
        swept = {member.decode() for member in self._client.zrange(f"{self._keys.prefix}deadlines", 0, -1)}
        for job_id, record in self._records.items():
            is_open = "deadline" in record and record["state"] in PLACES and "expire" not in record
            assert (job_id in swept) == is_open, f"{job_id} is {record['state']}, its deadline is not kept so"
            assert "expire" not in record or record["state"] != "queued"

    def _check_batches(self) -> None:
        for batch in self._names("batch:"):
            members = [member.decode() for member in self._client.lrange(self._keys.members(batch), 0, -1)]
            assert len(members) == len(set(members)), f"{batch} has a job twice"
            states = [record["state"] for record in self._records.values() if record.get("batch") == batch]
            num_deleted = len(set(members) - self._records.keys())
            counts = {name: int(value) for name, value in self._hash("batch:" + batch).items() if name != "created"}
            redriven = [
                record for record in self._records.values() if record.get("batch") == batch and "redriven_as" in record
            ]
            assert 0 <= counts.pop("redriven", 0) - len(redriven) <= num_deleted, batch
            deleted = Counter({state: count for state, count in counts.items() if count}) - Counter(states)
            assert deleted.total() == num_deleted, batch  # what was counted stays counted
            assert Counter(states) <= Counter(counts), batch
            assert deleted.keys() <= TERMINAL_STATES, batch
            is_open = any(state in PLACES for state in states)
            assert (self._client.ttl(self._keys.prefix + "batch:" + batch) == -1) == is_open, (
                f"{batch}: lives too long, or not enough"
            )

    def _check_done_feed(self) -> None:
        ended = [_fields(fields) for _, fields in self._client.xrange(self._keys.done)]
        ids = [fields["id"] for fields in ended]
        assert len(ids) == len(set(ids)), "an end was announced twice"
        for fields in ended:
            record = self._records.get(fields["id"])
            assert record is None or record["state"] == fields["state"]
        has_ended = {job_id for job_id, record in self._records.items() if record["state"] in TERMINAL_STATES}
        assert has_ended <= set(ids), "an end was not announced"

    def _read_each(self, method: str, keys: list[str]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                getattr(pipe, method)(key)
            replies: list[Any] = pipe.execute()
            return replies

    def _key(self, name: str) -> str:
        return self._keys.prefix + name

    def _names(self, kind: str) -> list[str]:
        return [name.removeprefix(kind) for name in self._all if name.startswith(kind)]

    def _hash(self, name: str) -> dict[str, str]:
        return _fields(self._client.hgetall(self._key(name)))


def _of(index: int | None, name: str) -> str:
    """The field of the record for one candidate."""
    return name if index is None else f"{name}:{index}"


def _fields(raw: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in raw.items()}  # a digest may be any bytes
