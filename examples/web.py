"""A web server for chats: it streams each answer as server-sent events, a page that is loaded again goes on with it, and a
button stops it. A job that no page reads any more is cancelled.

    pip install starlette uvicorn
    MILLRACE_REDIS_URL=redis://localhost:6379/0 uvicorn --app-dir examples web:app
    open http://localhost:8000

The functions are the same under FastAPI. See docs/web.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from millrace import AsyncClient, InvalidRequest, JobNotFound, QueueFull, RedisUnavailable, ResultExpired, WaitTimeout

logger = logging.getLogger("web")

KEEP_ALIVE_S = 15.0
"""Proxies close a connection on which nothing comes for a minute or less."""
GRACE_S = 10.0
"""How long a job runs without a reader, such as while a page is loaded again."""
MAX_BODY_BYTES = 64 * 1024
OUR_ID = re.compile(r"web-[0-9a-f]{32}")
"""The ids that this application gives. They cannot be guessed, so whoever has one got it from `submit`."""


class Question(msgspec.Struct):
    """What a browser may choose. Other fields, such as tenant and priority, are dropped."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 512


class Readers:
    """Owns the jobs of this process that have not ended, and cancels those that nobody reads for GRACE_S."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def leave(self, job_id: str) -> None:
        """Count one reader less, or none yet. Its caller may be cancelled, so another task does the rest."""
        self._counts[job_id] -= self._counts[job_id] > 0
        task = asyncio.create_task(self._cancel_unread(job_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def enter(self, job_id: str) -> None:
        self._counts[job_id] += 1

    def end(self, job_id: str) -> None:
        self._counts.pop(job_id, None)

    async def cancel_all(self) -> None:
        await self.client.cancel_many(self._counts)

    async def _cancel_unread(self, job_id: str) -> None:
        await asyncio.sleep(GRACE_S)
        if self._counts.get(job_id) == 0:
            self.end(job_id)
            with contextlib.suppress(JobNotFound):
                await self.client.cancel(job_id)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with AsyncClient() as client:
        app.state.client, app.state.readers = client, Readers(client)
        yield
        await app.state.readers.cancel_all()


async def page(request: Request) -> Response:
    return FileResponse(Path(__file__).with_name("web.html"))


async def submit(request: Request) -> Response:
    readers, job_id = request.app.state.readers, f"web-{secrets.token_hex(16)}"
    try:
        question = await read_question(request)
    except HTTPException as error:
        return JSONResponse({"error": error.detail}, error.status_code)
    readers.leave(job_id)  # if the submission is cut off, the job may be in the queue
    try:
        fields = msgspec.structs.asdict(question)
        await readers.client.submit(**fields, tenant="web", stream=True, job_id=job_id)
    except RedisUnavailable as error:
        logger.error("a job is not submitted: %s", error)
        return JSONResponse({"error": "the service cannot be used now; try again later"}, 503)
    except (QueueFull, InvalidRequest) as error:
        readers.end(job_id)
        return JSONResponse({"error": str(error)}, 429 if isinstance(error, QueueFull) else 400)
    return JSONResponse({"id": job_id}, 201)


async def read_question(request: Request) -> Question:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the content type must be application/json")  # pages of other sites can send others
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=Question)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, str(error)) from error


async def stop(request: Request) -> Response:
    job_id = request.path_params["job_id"]
    if not OUR_ID.fullmatch(job_id):
        return Response(status_code=404)
    with contextlib.suppress(JobNotFound):
        await request.app.state.client.cancel(job_id)
    return Response(status_code=204)  # the stream ends with the state "cancelled"


async def events(request: Request) -> Response:
    after = request.headers.get("last-event-id")  # which browsers send when they connect again
    stream = read(request.app.state.readers, request.path_params["job_id"], after)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def read(readers: Readers, job_id: str, after: str | None) -> AsyncGenerator[str]:
    if not OUR_ID.fullmatch(job_id):
        yield 'event: gone\ndata: "unknown job"\n\n'
        return
    readers.enter(job_id)
    has_ended = is_told = False
    try:
        while not has_ended:
            try:
                async for event in readers.client.stream(job_id, after=after, timeout_s=KEEP_ALIVE_S):
                    after, is_told = event.id, True
                    yield f"id: {event.id}\ndata: {json.dumps(event.to_dict())}\n\n"
                has_ended = True
                if not is_told:  # `after` was the last event, and a browser would connect again and again
                    yield 'event: gone\ndata: "the answer is complete"\n\n'
            except WaitTimeout:  # the client has logged why
                yield ": nothing yet\n\n"  # a comment, which browsers skip
            except RedisUnavailable as error:
                if not error.is_outage:
                    raise
                logger.error("%s", error)
                yield ": nothing yet\n\n"
                await asyncio.sleep(1)
            except (JobNotFound, ResultExpired, ValueError):
                yield 'event: gone\ndata: "this job is not known any more"\n\n'
                has_ended = True
    finally:
        if has_ended:
            readers.end(job_id)
        else:  # the browser has gone, or loads the page again
            readers.leave(job_id)


app = Starlette(
    routes=[
        Route("/", page),
        Route("/jobs", submit, methods=["POST"]),
        Route("/jobs/{job_id}", stop, methods=["DELETE"]),
        Route("/jobs/{job_id}/events", events),
    ],
    lifespan=lifespan,
)
