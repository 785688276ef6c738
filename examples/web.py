"""A web server that streams jobs to browsers as server-sent events, and cancels the job of a browser that has gone.

    pip install starlette uvicorn
    MILLRACE_REDIS_URL=redis://localhost:6379/0 uvicorn --app-dir examples web:app
    curl -N localhost:8000/generate -d '{"prompt": "3 + 4 =", "max_tokens": 20}'

The functions are the same under FastAPI. See docs/web.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from millrace import AsyncClient, InvalidRequest, QueueFull, RedisUnavailable, WaitTimeout

KEEP_ALIVE_S = 15.0
"""Proxies close a connection on which nothing comes for a minute or less."""


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with AsyncClient() as client:
        app.state.client, app.state.open_jobs, app.state.tasks = client, set(), set()
        yield
        await client.cancel_many(app.state.open_jobs)


async def generate(request: Request) -> Response:
    client: AsyncClient = request.app.state.client
    open_jobs: set[str] = request.app.state.open_jobs
    job_id = uuid.uuid4().hex
    open_jobs.add(job_id)  # before it is submitted: if the submission is cut off, the job may be in the queue
    try:
        await client.submit(**{**await request.json(), "stream": True, "job_id": job_id})
    except RedisUnavailable as error:
        return JSONResponse({"error": str(error)}, 503)
    except (QueueFull, InvalidRequest, ValueError, TypeError) as error:
        open_jobs.discard(job_id)
        return JSONResponse({"error": str(error)}, 429 if isinstance(error, QueueFull) else 400)
    return StreamingResponse(events(request.app, job_id), media_type="text/event-stream")


async def events(app: Starlette, job_id: str) -> AsyncGenerator[str]:
    client: AsyncClient = app.state.client
    last, has_ended = None, False
    try:
        while not has_ended:
            try:
                async for event in client.stream(job_id, after=last, timeout_s=KEEP_ALIVE_S):
                    last, has_ended = event.id, event.state is not None
                    yield f"id: {event.id}\ndata: {json.dumps(event.to_dict())}\n\n"
            except WaitTimeout as waiting:
                yield f": {waiting}\n\n"  # a comment, which browsers skip
            except RedisUnavailable as error:
                if not error.is_outage:
                    raise
                yield f": {error}\n\n"
                await asyncio.sleep(1)
    finally:
        if has_ended:
            app.state.open_jobs.discard(job_id)
        else:  # the browser has gone, so this task is being cancelled, and another one has to tell the queue
            task = asyncio.create_task(cancel(app, job_id))
            app.state.tasks.add(task)
            task.add_done_callback(app.state.tasks.discard)


async def cancel(app: Starlette, job_id: str) -> None:
    await app.state.client.cancel(job_id)
    app.state.open_jobs.discard(job_id)


app = Starlette(routes=[Route("/generate", generate, methods=["POST"])], lifespan=lifespan)
