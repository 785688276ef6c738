"""The queue as its callers see it: one typed call for each transition of a job, and a few to look around."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import redis

from millrace.results import commands, replies
from millrace.results.connection import BLOCK_LIMIT_S
from millrace.results.keys import QueueKeys
from millrace.results.messages import (
    BatchStatus,
    Claim,
    EngineId,
    InboxEntry,
    Job,
    JobError,
    JobId,
    Lease,
    Position,
    QueueStats,
    Reconciliation,
    Signal,
    Submission,
    Write,
)
from millrace.results.scripts import Command
from millrace.results.server_check import check_server
from millrace.results.transport import Transport


class JobQueue:
    """Owns nothing but a connection: all state is in Redis, and every call here may be repeated.

    May be used by several threads. Takes a client of `results.connection.connect`. Every call raises RedisUnavailable
    when the server cannot be reached or cannot do it now.
    """

    def __init__(self, client: redis.Redis, queue: str = "default") -> None:
        self.keys = QueueKeys(queue)
        self._client = client
        self._transport = Transport(client)

    # --- jobs come in ----------------------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> list[str]:
        """For each job: "created", "exists" (the same job is known), "conflict" (the id is another job's) or
        "full <limit> <value>" (not taken: the queue is at that limit) or "invalid <field>" (not taken: no job can have
        that; of what the Python clients send only "invalid deadline_ms", for a deadline that ends before run_at)."""
        return replies.words(self._transport.send(commands.submit(self.keys, submissions)))

    def read_inbox(
        self,
        after: str,
        count: int,
        block_ms: int | None = None,
        *,
        max_body_bytes: int = commands.MAX_INBOX_BYTES,
    ) -> list[InboxEntry]:
        """Return inbox entries after an id ("0" for all), with bodies of 4 MiB and one more. With `block_ms` wait for the
        first one. Of a body above `max_body_bytes` only the beginning is sent. Entries stay until an engine accepts or
        rejects them."""
        command = commands.read_inbox(self.keys, after, count, max_body_bytes)
        entries = replies.inbox_entries(self._transport.send(command))
        if entries or block_ms is None:
            return entries
        block_ms = min(block_ms, int(BLOCK_LIMIT_S * 1000))
        self._transport.wait(commands.read_stream(self.keys.inbox, after, 1, block_ms), self.keys.inbox)
        return replies.inbox_entries(self._transport.send(command))

    def accept(self, entry_id: str, submission: Submission) -> str:
        """Turn an inbox entry into a job: as `submit`, or "taken" when another engine had the entry. At a limit,
        and when it is invalid, the entry stays where it is."""
        reply: bytes = self._transport.send(commands.accept(self.keys, entry_id, submission))
        return reply.decode()

    def reject(self, entry_id: str, job_id: JobId | None, raw: bytes, error: JobError) -> str:
        """Turn an inbox entry into a failed job, "failed", or into a line of the rejected ones, "rejected", when it has
        no usable id or that of another job; "exists" when it was rejected before, "taken" as in `accept`."""
        reply: bytes = self._transport.send(commands.reject(self.keys, entry_id, job_id, raw, error))
        return reply.decode()

    # --- an engine works -------------------------------------------------------------------------------------------

    def claim(
        self,
        engine_id: EngineId,
        claim_id: str,
        *,
        max_jobs: int,
        kv_token_budget: int,
        num_held: int,
        fingerprint: str,
        says_begin: bool = False,
    ) -> Claim | None:
        """Ready jobs for this engine. A repeated claim id returns the same jobs again. None: the engine's heartbeat is
        gone; send one, then claim again. `says_begin` promises a `Begin` before a job that runs alone is computed."""
        command = commands.claim(
            self.keys,
            engine_id,
            claim_id,
            max_jobs=max_jobs,
            kv_token_budget=kv_token_budget,
            num_held=num_held,
            fingerprint=fingerprint,
            says_begin=says_begin,
        )
        reply = self._transport.send(command)
        return None if reply is None else replies.claim(reply)

    def write(self, writes: Sequence[Write]) -> list[str]:
        """For each write: "ok", "already" (this lease has ended the job), "retrying" (a failure that may pass: it
        waits for its next attempt), "stale" (drop the job and write no more of it), or "error: ..." when the write
        itself is at fault. Writes of one job take effect in their order."""
        outcomes: dict[int, str] = {}
        to_send: dict[int, Command] = {}
        for i, item in enumerate(writes):
            try:
                to_send[i] = commands.write(self.keys, item)
            except (TypeError, ValueError, OverflowError) as error:
                outcomes[i] = f"error: {error}"
        for indices in _rounds(writes, to_send):
            sent = self._transport.send_each([to_send[i] for i in indices])
            for i, reply in zip(indices, sent, strict=True):
                outcomes[i] = reply.decode() if isinstance(reply, bytes) else f"error: {reply}"
        return [outcomes[i] for i in range(len(writes))]

    def heartbeat(
        self, engine_id: EngineId, ttl_ms: int, held: Mapping[JobId, Lease], sleep_level: int = 0
    ) -> Reconciliation:
        """Stay alive for `ttl_ms`, and say which jobs the engine holds: all that it runs, and all whose writes are
        still on their way. A job that is missing from two heartbeats in a row goes back to the queue.
        `sleep_level` is how the engine sleeps, 0 when it does not."""
        command = commands.heartbeat(self.keys, engine_id, ttl_ms, held, sleep_level)
        return replies.reconciliation(self._transport.send(command))

    def deregister(self, engine_id: EngineId) -> int:
        """Leave. Jobs that the engine had not released go back to the queue; returns how many there were."""
        return int(self._transport.send(commands.deregister(self.keys, engine_id)))

    def recover(self, max_jobs: int = 256) -> int:
        """Take jobs of dead engines back; returns how many. Call again while it is `max_jobs`."""
        return int(self._transport.send(commands.recover(self.keys, max_jobs)))

    def wait_for_signal(
        self, engine_id: EngineId, timeout_s: float, *, include_wake: bool
    ) -> Signal | Literal["wake", "beat"] | None:
        """The next word to this engine, where "beat" asks for a heartbeat; with `include_wake` also "wake" when there is
        work. None after the timeout, which is at most BLOCK_LIMIT_S, and for a word of a newer version."""
        command = commands.wait_for_signal(self.keys, engine_id, min(timeout_s, BLOCK_LIMIT_S), include_wake)
        return replies.signal(self._transport.send(command), self.keys.wake)

    # --- looking around --------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job:
        """The job as it is now. Raises JobNotFound."""
        return replies.job(job_id, self.keys.queue, self._transport.send(commands.get(self.keys, job_id)))

    def cancel(self, job_id: str) -> str:
        """Ask for a job's end: "cancelled" when it had not begun, "cancelling" when its engine has been told, else the
        state that it had ended in. Raises JobNotFound."""
        reply = self._transport.send(commands.cancel(self.keys, job_id))
        return replies.cancelled(job_id, self.keys.queue, reply)

    def redrive(self, job_id: str) -> str:
        """Run a job again that has failed, expired or been cancelled; returns the id of the new one, the same at every
        call. Raises JobNotFound and CannotRedrive."""
        return replies.redriven(job_id, self.keys.queue, self._transport.send(commands.redrive(self.keys, job_id)))

    def pause(self, is_paused: bool) -> None:
        """Hand out nothing more, or go on."""
        self._transport.send(commands.pause(self.keys, is_paused))

    def sleep(self, level: int, engine_id: str | None = None) -> list[str]:
        """Have one engine, or all, sleep (1: weights in host memory, 2: dropped) or wake up (0); returns who was told.
        Raises EngineNotFound when nobody was."""
        reply = self._transport.send(commands.sleep(self.keys, level, engine_id))
        return replies.engines_told(engine_id, self.keys.queue, reply)

    def position(self, job_id: str) -> Position:
        """How many jobs are likely to begin before this one, and when it begins. Raises JobNotFound."""
        return replies.position(job_id, self.keys.queue, self._transport.send(commands.position(self.keys, job_id)))

    def batch_status(self, batch: str) -> BatchStatus:
        """The counts of a batch, and when it ends. Raises BatchNotFound."""
        return replies.batch_status(
            batch, self.keys.queue, self._transport.send(commands.batch_status(self.keys, batch))
        )

    def stats(self) -> QueueStats:
        return replies.queue_stats(self._transport.send(commands.stats(self.keys)))

    def check_server(self) -> list[str]:
        """Warnings about the server's settings. Raises ServerUnsuitable when it would lose jobs or is too old."""
        return check_server(self._client, self.keys.prefix)

    def close(self) -> None:
        self._transport.close()


def _rounds(writes: Sequence[Write], indices: Iterable[int]) -> list[list[int]]:
    """The indices of writes in groups that may travel together: no group has two writes of one job."""
    rounds: list[list[int]] = []
    num_seen: dict[JobId, int] = {}
    for i in indices:
        job_id = writes[i].job_id
        number = num_seen.get(job_id, 0)
        num_seen[job_id] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(i)
    return rounds
