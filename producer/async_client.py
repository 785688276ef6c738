"""The client for asyncio: the same methods, arguments and errors as `Client`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Self, Unpack

from millrace.producer import arguments, calls
from millrace.producer.client import Client
from millrace.producer.options import SubmitOptions, build_request
from millrace.producer.request import GenerationRequest
from millrace.producer.submitting import Submitted, Submitting, submitted
from millrace.producer.wire import to_submission
from millrace.results import commands, replies
from millrace.results.connection import AsyncConnection
from millrace.results.counts import BatchStatus, Position, QueueStats, RejectedEntry, TenantStats
from millrace.results.durability import Durability
from millrace.results.job import Job, StreamEvent
from millrace.results.reader import CompletionFollower, EventFollower
from millrace.results.transport import AsyncTransport, Call, T


class AsyncClient:
    """`Client` for asyncio; see there for what the methods do. Belongs to the event loop that first uses it.

    For keep-alive messages between the events of `stream`, use its `timeout_s`: `asyncio.wait_for(anext(events), 5)` cancels
    the generator at the timeout, and so ends it.

    A connection of your own is a `redis.asyncio.Redis` or `redis.asyncio.RedisCluster` here.
    """

    def __init__(self, url: str | AsyncConnection | None = None, queue: str = "default") -> None:
        self._keys = arguments.queue_keys(queue)
        self._transport = AsyncTransport.to(url)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    # --- submit and change jobs ------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: str | None = None,
        *,
        batch: str | None = None,
        durability: Durability = "memory",
        **options: Unpack[SubmitOptions],
    ) -> str:
        request = build_request(prompt, options)
        if arguments.durability(durability) != "memory":  # to be confirmed
            return (await self.submit_many([request], batch=batch, durability=durability))[0]
        job = to_submission(request, batch=arguments.new_batch(batch))
        (outcome,) = replies.outcomes(await self._transport.send(commands.submit(self._keys, [job])))
        return submitted(job, outcome)

    async def submit_many(
        self, requests: Iterable[GenerationRequest], *, batch: str | None = None, durability: Durability = "memory"
    ) -> Submitted:
        call = Submitting(self._keys, requests, batch, durability)
        while to_send := call.next_commands():
            if call.confirmation:
                call.feed(*await self._transport.send_together(to_send, call.confirmation))
            else:
                call.feed([await self._transport.send(command) for command in to_send])
        return await self._run(call.end())

    async def cancel(self, job_id: str) -> str:
        reply = await self._transport.send(commands.cancel(self._keys, arguments.job_id(self._keys, job_id)))
        return replies.cancelled(job_id, self._keys.queue, reply)

    async def cancel_many(self, job_ids: Iterable[str]) -> dict[str, str]:
        return await self._run(calls.change_many(self._keys, commands.cancel, job_ids))

    async def cancel_batch(self, batch: str) -> dict[str, str]:
        return await self._run(calls.change_batch(self._keys, commands.cancel, batch))

    async def cancel_waiting(self) -> dict[str, str]:
        return await self._run(calls.cancel_waiting(self._keys))

    async def delete(self, job_id: str) -> None:
        reply = await self._transport.send(commands.delete(self._keys, arguments.job_id(self._keys, job_id)))
        replies.check_deleted(job_id, self._keys.queue, reply)

    async def delete_many(self, job_ids: Iterable[str]) -> dict[str, str]:
        return await self._run(calls.change_many(self._keys, commands.delete, job_ids))

    async def delete_batch(self, batch: str) -> dict[str, str]:
        return await self._run(calls.change_batch(self._keys, commands.delete, batch))

    async def retry(self, job_id: str) -> str:
        reply = await self._transport.send(commands.redrive(self._keys, arguments.job_id(self._keys, job_id)))
        return replies.redriven(job_id, self._keys.queue, reply)

    async def retry_all(self) -> calls.Retried:
        return await self._run(calls.retry_all(self._keys))

    async def retry_batch(self, batch: str) -> calls.Retried:
        return await self._run(calls.retry_batch(self._keys, batch))

    async def pause(self) -> None:
        await self._transport.send(commands.pause(self._keys, True))

    async def resume(self) -> None:
        await self._transport.send(commands.pause(self._keys, False))

    async def settings(self) -> dict[str, str]:
        return await self._run(calls.settings(self._keys))

    async def set_settings(self, settings: Mapping[str, float | None]) -> None:
        await self._run(calls.set_settings(self._keys, settings))

    async def sleep(self, level: int = 1, *, engine_id: str | None = None) -> list[str]:
        return await self._set_sleep(arguments.sleep_level(level), engine_id)

    async def wake(self, *, engine_id: str | None = None) -> list[str]:
        return await self._set_sleep(0, engine_id)

    async def reset_prefix_cache(self, *, engine_id: str | None = None) -> list[str]:
        command = commands.reset_cache(self._keys, arguments.engine_id(self._keys, engine_id))
        return replies.signalled_engines(engine_id, self._keys.queue, await self._transport.send(command))

    async def _set_sleep(self, level: int, engine_id: str | None) -> list[str]:
        command = commands.sleep(self._keys, level, arguments.engine_id(self._keys, engine_id))
        return replies.signalled_engines(engine_id, self._keys.queue, await self._transport.send(command))

    # --- read jobs and the queue -----------------------------------------------------------------------------------

    async def get(self, job_id: str) -> Job:
        return await self._run(calls.get(self._keys, job_id))

    async def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        return await self._run(
            calls.wait(self._keys, arguments.job_id(self._keys, job_id), arguments.timeout(timeout_s))
        )

    async def stream(
        self, job_id: str, after: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        after, timeout_s = arguments.event_id(after), arguments.timeout(timeout_s)
        follower = EventFollower(self._keys, arguments.job_id(self._keys, job_id), after, timeout_s)
        while events := await self._run(follower.next_events()):
            for event in events:
                yield event

    async def as_completed(self, job_ids: Iterable[str], timeout_s: float | None = None) -> AsyncGenerator[Job, None]:
        known = [arguments.job_id(self._keys, job_id) for job_id in arguments.many_ids(job_ids)]
        follower = CompletionFollower(self._keys, known, arguments.timeout(timeout_s))
        while not follower.is_done:
            for some in calls.batched(await self._run(follower.next_ended()), calls.READ_JOBS):
                for job in await self._run(calls.get_many(self._keys, some)):
                    yield job

    async def position(self, job_id: str) -> Position:
        reply = await self._transport.send(commands.position(self._keys, arguments.job_id(self._keys, job_id)))
        return replies.position(job_id, self._keys.queue, reply)

    async def batch_status(self, batch: str) -> BatchStatus:
        reply = await self._transport.send(commands.batch_status(self._keys, arguments.batch(self._keys, batch)))
        return replies.batch_status(batch, self._keys.queue, reply)

    async def batch_jobs(self, batch: str) -> dict[str, str]:
        return await self._run(calls.batch_jobs(self._keys, batch))

    async def stats(self) -> QueueStats:
        return replies.queue_stats(await self._transport.send(commands.stats(self._keys)))

    async def tenants(self) -> dict[str, TenantStats]:
        return replies.tenants(await self._transport.send(commands.waiting(self._keys)))

    async def list_jobs(self, state: str, limit: int = 100) -> list[Job]:
        return await self._run(calls.list_jobs(self._keys, state, limit))

    async def list_rejected(self, limit: int = 100) -> list[RejectedEntry]:
        return await self._run(calls.list_rejected(self._keys, limit))

    async def _run(self, call: Call[T]) -> T:
        try:
            to_send = next(call)
            while True:
                to_send = call.send(await self._transport.send_many(to_send))
        except StopIteration as end:
            result: T = end.value
            return result


for _name, _method in vars(Client).items():  # for help()
    if not _name.startswith("_"):
        getattr(AsyncClient, _name).__doc__ = _method.__doc__
