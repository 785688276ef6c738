"""The client for asyncio: the same verbs, the same arguments, the same errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Unpack

from millrace.producer.batches import SubmitCall, submitted
from millrace.producer.lookups import (
    CANCEL_BATCH,
    READ_BATCH,
    at_most,
    batched,
    is_job_id,
    many_ids,
    new_batch,
    one_batch,
    one_engine,
    one_event,
    one_job,
    one_state,
    patience,
    queue_keys,
    sleep_level,
)
from millrace.producer.options import SubmitOptions, build_request
from millrace.producer.request import GenerationRequest
from millrace.producer.wire import to_submission
from millrace.results import commands, replies
from millrace.results.connection import AsyncConnection
from millrace.results.durability import Durability
from millrace.results.errors import BatchNotFound
from millrace.results.messages import BatchStatus, Job, Position, QueueStats, StreamEvent
from millrace.results.reader import CompletionFollower, EndFollower, EventFollower
from millrace.results.transport import AsyncTransport


class AsyncClient:
    """`Client` for asyncio; what the methods do stands there. Belongs to the event loop that uses it first.

    An existing connection is a `redis.asyncio.Redis` or `redis.asyncio.RedisCluster` here.
    """

    def __init__(self, url: str | AsyncConnection | None = None, queue: str = "default") -> None:
        self._keys = queue_keys(queue)
        self._transport = AsyncTransport.to(url)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    # --- jobs in ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: str | None = None,
        *,
        batch: str | None = None,
        durability: Durability = "memory",
        **options: Unpack[SubmitOptions],
    ) -> str:
        request = build_request(prompt, options)
        if durability != "memory":  # to be confirmed
            return (await self.submit_many([request], batch=batch, durability=durability))[0]
        job = to_submission(request, batch=new_batch(batch))
        (outcome,) = replies.words(await self._transport.send(commands.submit(self._keys, [job])))
        return submitted(job, outcome)

    async def submit_many(
        self, requests: Iterable[GenerationRequest], *, batch: str | None = None, durability: Durability = "memory"
    ) -> list[str]:
        call = SubmitCall(self._keys, requests, batch, durability)
        while to_send := call.next_commands():
            if call.confirmation:
                call.feed(*await self._transport.send_together(to_send, call.confirmation))
            else:
                call.feed([await self._transport.send(command) for command in to_send])
        return call.end()

    async def cancel(self, job_id: str) -> str:
        reply = await self._transport.send(commands.cancel(self._keys, one_job(self._keys, job_id)))
        return replies.cancelled(job_id, self._keys.queue, reply)

    async def cancel_many(self, job_ids: Iterable[str]) -> dict[str, str]:
        outcomes: dict[str, str] = {}
        for some in batched(job_ids, CANCEL_BATCH):
            outcomes |= dict.fromkeys(some, "unknown")
            to_ask = list(filter(is_job_id, some))
            found = await self._transport.send_many([commands.cancel(self._keys, job_id) for job_id in to_ask])
            outcomes |= {job_id: reply.decode() for job_id, reply in zip(to_ask, found, strict=True) if reply}
        return outcomes

    async def cancel_batch(self, batch: str) -> dict[str, str]:
        outcomes: dict[str, str] = {}
        one_batch(self._keys, batch)
        first = 0
        while members := await self._transport.send(commands.batch_members(self._keys, batch, first, CANCEL_BATCH)):
            outcomes |= await self.cancel_many(replies.words(members))
            first += len(members)
        if not outcomes:
            raise BatchNotFound(batch, self._keys.queue)
        return outcomes

    async def retry(self, job_id: str) -> str:
        reply = await self._transport.send(commands.redrive(self._keys, one_job(self._keys, job_id)))
        return replies.redriven(job_id, self._keys.queue, reply)

    async def retry_all(self) -> dict[str, str]:
        new_ids: dict[str, str] = {}
        made: set[str] = set()
        after = 0
        while failed := replies.words(await self._transport.send(commands.dead(self._keys, after, CANCEL_BATCH))):
            fresh = [job_id for job_id in failed if job_id not in made]
            found = await self._transport.send_many([commands.redrive(self._keys, job_id) for job_id in fresh])
            redriven = replies.all_redriven(fresh, found)
            new_ids |= redriven
            made.update(redriven.values())
            after += len(failed) - len(redriven)  # those have left the list
        return new_ids

    async def pause(self) -> None:
        await self._transport.send(commands.pause(self._keys, True))

    async def resume(self) -> None:
        await self._transport.send(commands.pause(self._keys, False))

    async def sleep(self, level: int = 1, *, engine_id: str | None = None) -> list[str]:
        return await self._tell_engines(sleep_level(level), engine_id)

    async def wake(self, *, engine_id: str | None = None) -> list[str]:
        return await self._tell_engines(0, engine_id)

    async def _tell_engines(self, level: int, engine_id: str | None) -> list[str]:
        to_tell = one_engine(self._keys, engine_id)
        reply = await self._transport.send(commands.sleep(self._keys, level, to_tell))
        return replies.engines_told(engine_id, self._keys.queue, reply)

    # --- results out -----------------------------------------------------------------------------------------------

    async def get(self, job_id: str) -> Job:
        return (await self._get_many([one_job(self._keys, job_id)]))[0]

    async def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        follower = EndFollower(self._keys, one_job(self._keys, job_id), patience(timeout_s))
        while not follower.is_done:
            follower.feed(await self._transport.send_many(follower.next_commands()))
        return await self.get(job_id)

    async def stream(self, job_id: str, after: str | None = None) -> AsyncIterator[StreamEvent]:
        follower = EventFollower(self._keys, one_job(self._keys, job_id), one_event(after))
        while not follower.is_done:
            for event in follower.feed(await self._transport.send_many(follower.next_commands())):
                yield event

    async def as_completed(self, job_ids: Iterable[str], timeout_s: float | None = None) -> AsyncIterator[Job]:
        known = [one_job(self._keys, job_id) for job_id in many_ids(job_ids)]
        follower = CompletionFollower(self._keys, known, patience(timeout_s))
        while not follower.is_done:
            ended = follower.feed(await self._transport.send_many(follower.next_commands()))
            for first in range(0, len(ended), READ_BATCH):
                for job in await self._get_many(ended[first : first + READ_BATCH]):
                    yield job

    async def position(self, job_id: str) -> Position:
        reply = await self._transport.send(commands.position(self._keys, one_job(self._keys, job_id)))
        return replies.position(job_id, self._keys.queue, reply)

    async def batch_status(self, batch: str) -> BatchStatus:
        reply = await self._transport.send(commands.batch_status(self._keys, one_batch(self._keys, batch)))
        return replies.batch_status(batch, self._keys.queue, reply)

    async def stats(self) -> QueueStats:
        return replies.queue_stats(await self._transport.send(commands.stats(self._keys)))

    async def list_jobs(self, state: str, limit: int = 100) -> list[Job]:
        listed = await self._transport.send(commands.list_jobs(self._keys, one_state(state), at_most(limit)))
        jobs: list[Job] = []
        for some in batched(replies.words(listed), READ_BATCH):
            found = await self._transport.send_many([commands.get(self._keys, job_id) for job_id in some])
            jobs += replies.known_jobs(some, self._keys.queue, found)
        return jobs

    async def _get_many(self, job_ids: list[str]) -> list[Job]:
        found = await self._transport.send_many([commands.get(self._keys, job_id) for job_id in job_ids])
        return [replies.job(job_id, self._keys.queue, reply) for job_id, reply in zip(job_ids, found, strict=True)]
