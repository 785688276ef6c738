"""The queue as an engine sees it: one typed call for each transition of a job. Programs that submit jobs and read results
use `producer.Client`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import redis

from millrace.results import commands, engine_replies, replies
from millrace.results.connection import BLOCK_LIMIT_S, server_name
from millrace.results.counts import QueueStats
from millrace.results.errors import one_line
from millrace.results.job import Job
from millrace.results.keys import QUEUE_PATTERN, QueueKeys
from millrace.results.messages import (
    Claim,
    EngineId,
    InboxEntry,
    JobError,
    JobId,
    Lease,
    Reconciliation,
    Recovery,
    Signal,
    Submission,
    Write,
)
from millrace.results.replies import Outcome
from millrace.results.scripts import Argument, Command, script_command
from millrace.results.server_check import check_server
from millrace.results.transport import Transport

MAX_INBOX_BYTES = 4 * 1024 * 1024
"""A read of the inbox ends with the entry that exceeds this."""


class JobQueue:
    """Owns a connection to one queue; all state is in Redis. Every call may be repeated. Thread-safe.

    Takes a client of `results.connection.connect`. Every call raises RedisUnavailable when the server cannot be reached or
    cannot execute it now.
    """

    def __init__(self, client: redis.Redis, queue: str = "default") -> None:
        self.keys = QueueKeys(queue)
        self._client = client
        self._transport = Transport(client)

    @property
    def server(self) -> str:
        """The URL of the server, without its password."""
        return server_name(self._client)

    def submit(self, submissions: Sequence[Submission]) -> list[Outcome]:
        """Return the outcome of each job. A checked request is "invalid" only for a deadline before its run_at."""
        return replies.outcomes(self._transport.send(commands.submit(self.keys, submissions)))

    def read_inbox(
        self, after: str, count: int, block_ms: int | None = None, *, max_body_bytes: int = MAX_INBOX_BYTES
    ) -> list[InboxEntry]:
        """Return inbox entries after an id ("0" for all); with `block_ms` wait for the first one. They stay until an engine
        accepts or rejects them. Of a body above `max_body_bytes` only the beginning is sent."""
        reply = self._run("inbox", after, count, MAX_INBOX_BYTES, max_body_bytes)
        if block_ms is not None and not reply:
            block_ms = min(block_ms, int(BLOCK_LIMIT_S * 1000))
            self._transport.wait(commands.read_stream(self.keys.inbox, after, 1, block_ms), self.keys.inbox)
            reply = self._run("inbox", after, count, MAX_INBOX_BYTES, max_body_bytes)
        return engine_replies.inbox_entries(reply)

    def accept(self, entry_id: str, submission: Submission) -> Outcome:
        """Turn an inbox entry into a job. At a limit, and when it is invalid, the entry stays in the inbox."""
        return replies.outcome(self._transport.send(commands.accept(self.keys, entry_id, submission)))

    def reject(self, entry_id: str, job_id: JobId | None, raw: bytes, error: JobError) -> str:
        """Turn an inbox entry into a failed job, "failed", or into a rejected entry, "rejected", when it has no usable id or
        that of another job; "exists" when it was rejected before, "taken" as in `accept`."""
        reply: bytes = self._transport.send(commands.reject(self.keys, entry_id, job_id, raw, error))
        return reply.decode()

    def claim(
        self,
        engine_id: EngineId,
        claim_id: str,
        *,
        max_jobs: int,
        kv_token_budget: int,
        num_held: int,
        fingerprint: str,
        calls_begin: bool = False,
        cached_prompts: Sequence[str] = (),
        is_fair: bool = False,
    ) -> Claim | None:
        """Claim ready jobs. A repeated claim id returns the same jobs again. None: the engine's heartbeat has expired; send
        one, then claim again. `calls_begin` promises a `Begin` before a job that runs alone is computed.
        `cached_prompts`: digests of beginnings of prompts; jobs that begin so are preferred among the first ones.
        `is_fair`: leave to other engines that can take jobs their part."""
        limits = (
            max_jobs,
            kv_token_budget,
            fingerprint,
            num_held,
            "1" if calls_begin else "",
            " ".join(cached_prompts),
            "1" if is_fair else "",
        )
        reply = self._run("claim", engine_id, claim_id, *limits)
        return None if reply is None else engine_replies.claim(reply)

    def write(self, writes: Sequence[Write]) -> list[str]:
        """Send writes; those of one job take effect in their order. Returns for each one: "ok", "already" (this lease has
        ended the job), "retrying" (the job waits for its next attempt), "stale" (drop the job, write nothing more) or
        "error: ..." when the write itself is at fault."""
        outcomes: dict[int, str] = {}
        to_send: dict[int, Command] = {}
        now_s = time.monotonic()
        for i, item in enumerate(writes):
            try:
                to_send[i] = commands.write(self.keys, item, now_s)
            except (TypeError, ValueError, OverflowError) as error:
                outcomes[i] = f"error: {one_line(str(error))}"
        for indices in _rounds(writes, to_send):
            sent = self._transport.send_each([to_send[i] for i in indices])
            for i, reply in zip(indices, sent, strict=True):
                outcomes[i] = reply.decode() if isinstance(reply, bytes) else f"error: {one_line(str(reply))}"
        return [outcomes[i] for i in range(len(writes))]

    def heartbeat(
        self, engine_id: EngineId, ttl_ms: int, held: Mapping[JobId, Lease], sleep_level: int = 0, model: str = ""
    ) -> Reconciliation:
        """Renew the engine's heartbeat for `ttl_ms`, and name the jobs that it holds: all that it runs, and all with pending
        writes. A job that is missing from two heartbeats in a row goes back to the queue. `sleep_level` is 0 when the engine
        is awake. `model` is the name of its model."""
        pairs: Iterator[Argument] = chain.from_iterable(held.items())
        return engine_replies.reconciliation(self._run("heartbeat", engine_id, ttl_ms, sleep_level, model, *pairs))

    def deregister(self, engine_id: EngineId) -> int:
        """Remove the engine, and return its remaining jobs to the queue. Returns their number."""
        return int(self._run("deregister", engine_id))

    def recover(self, max_jobs: int = 256) -> list[Recovery]:
        """Recover jobs of dead engines. Call again while it returns `max_jobs` jobs."""
        return engine_replies.recoveries(self._run("recover", max_jobs))

    def stats(self) -> QueueStats:
        """Return the counts of the queue."""
        return replies.queue_stats(self._transport.send(commands.stats(self.keys)))

    def wait_for_signal(
        self, engine_id: EngineId, timeout_s: float, *, include_wake: bool
    ) -> Signal | Literal["wake", "beat"] | None:
        """Wait for the next signal to this engine: "beat" requests a heartbeat; with `include_wake`, "wake" means that there
        are ready jobs. None after the timeout, at most BLOCK_LIMIT_S, and for an unknown signal."""
        command = commands.wait_for_signal(self.keys, engine_id, min(timeout_s, BLOCK_LIMIT_S), include_wake)
        return engine_replies.signal(self._transport.send(command), self.keys.wake)

    def get(self, job_id: str) -> Job:
        """Read a job. Raises JobNotFound."""
        return replies.job(job_id, self.keys.queue, self._transport.send(commands.get(self.keys, job_id)))

    def cancel(self, job_id: str) -> str:
        """Cancel a job. Returns "cancelled", "cancelling" (its engine has a signal), or the state in which it had ended.
        Raises JobNotFound."""
        reply = self._transport.send(commands.cancel(self.keys, job_id))
        return replies.cancelled(job_id, self.keys.queue, reply)

    def check_server(self) -> list[str]:
        """Return warnings about the server's settings. Raises ServerUnsuitable when it would lose jobs or is too old."""
        return check_server(self._client, self.keys.prefix)

    def close(self) -> None:
        self._transport.close()

    def _run(self, script: str, *arguments: Argument) -> Any:
        return self._transport.send(script_command(script, self.keys.prefix, *arguments))


def find_queues(url: str | None) -> Iterator[tuple[str, QueueStats]]:
    """Yield the name and the counts of each queue of a server that has had a job, an inbox entry or an engine."""
    transport = Transport.to(url)
    try:
        keys = {*transport.find_keys("millrace:{*}:counts"), *transport.find_keys("millrace:{*}:inbox")}
        for name in sorted({key[key.index("{") + 1 : key.rindex("}")] for key in keys}):
            if QUEUE_PATTERN.fullmatch(name):
                yield name, replies.queue_stats(transport.send(commands.stats(QueueKeys(name))))
    finally:
        transport.close()


def _rounds(writes: Sequence[Write], indices: Iterable[int]) -> list[list[int]]:
    """Group the indices of writes so that no group, which is one pipeline, has two writes of one job."""
    rounds: defaultdict[int, list[int]] = defaultdict(list)
    num_seen: dict[JobId, int] = {}
    for i in indices:
        number = num_seen.get(writes[i].job_id, 0)
        rounds[number].append(i)
        num_seen[writes[i].job_id] = number + 1
    return list(rounds.values())
