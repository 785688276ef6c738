"""`millrace demo`: start a private Redis, an engine on the CPU and a producer process, and show their tokens live.

The demo ends all its processes. They write only into one temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli.exits import OK, OTHER, CommandError, sigterm_interrupts
from millrace.cli.local_engine import ChildProcess, private_server
from millrace.cli.options import Verbs, add_verb
from millrace.cli.serve import engine_command, require_engine

if TYPE_CHECKING:
    from millrace.cli.demo_screen import Screen
    from millrace.producer import Client, GenerationRequest
    from millrace.results.job import Job

_JOBS = Path(__file__).with_name("demo.jsonl")
"""The producer submits this file: streamed jobs with long answers, short ones, and sums with the answer in their meta."""
_ONE_THREAD = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
"""Enough for the tiny model. Several threads slow each other down on a busy machine."""
_LIMIT_S = 180.0
_POLL_INTERVAL_S = 0.05


def add_parsers(verbs: Verbs) -> None:
    parser = add_verb(verbs, "demo", run, "run a demo on this machine; it needs no Redis, no GPU and no model")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model (default: the tiny one of the checkout)")
    parser.set_defaults(queue="demo")


def run(args: argparse.Namespace) -> int:
    require_engine()
    model = args.model or _tiny_model()
    queue = f"{args.queue}-{uuid.uuid4().hex[:8]}"  # new, also on a server that is in use
    with (
        sigterm_interrupts(),
        tempfile.TemporaryDirectory(prefix="millrace-demo-") as folder,
        contextlib.nullcontext(args.redis) if args.redis else private_server() as redis_url,
    ):
        try:
            return _run_jobs(Path(folder), model, redis_url, queue)
        finally:
            if args.redis:
                _remove_keys(redis_url, queue)


def _remove_keys(redis_url: str, queue: str) -> None:
    """Remove the demo's keys from a server that was there before, if it still runs."""
    from millrace.results.connection import connect
    from millrace.results.keys import QueueKeys

    with contextlib.suppress(Exception), connect(redis_url) as client:
        for key in client.scan_iter(QueueKeys(queue).prefix + "*", count=1000):
            client.unlink(key)


def _run_jobs(folder: Path, model: Path, redis_url: str, queue: str) -> int:
    from millrace import Client
    from millrace.cli.demo_screen import Screen
    from millrace.producer.wire import parse_body

    jobs = [parse_body(line) for line in _JOBS.read_bytes().splitlines()]
    place = ("--redis", redis_url, "--queue", queue)
    serve = engine_command(("--model", str(model), *place, "--device", "cpu", "--executor", "mp"))
    submit = (sys.executable, "-P", "-m", "millrace", "submit", "--file", str(_JOBS), *place)
    screen = Screen(len(jobs))
    screen.print_line(f"Redis is ready. An engine loads {model.name} on the CPU, a producer submits {len(jobs)} jobs.")
    with (
        ChildProcess("engine", serve, folder, _ONE_THREAD) as engine,
        ChildProcess("producer", submit, folder) as producer,
        Client(redis_url, queue=queue) as client,
    ):
        with screen:
            seconds = _watch(client, _Followers(jobs, redis_url, queue), engine, producer, screen, len(jobs))
        return _summary([client.get(str(job.id)) for job in jobs], jobs, seconds, screen)


def _watch(
    client: Client, followers: _Followers, engine: ChildProcess, producer: ChildProcess, screen: Screen, num_jobs: int
) -> float:
    """Show the queue until every job has ended. Return the seconds since the first job started."""
    limit_s, began_s = time.monotonic() + _LIMIT_S, None
    while time.monotonic() < limit_s:
        if engine.has_ended():
            raise CommandError("the engine ended before its jobs did")
        counts, now_s = client.stats(), time.monotonic()
        if producer.has_ended() and counts.was_served and not followers.have_started:
            followers.start()  # before that a reader would report that the queue has no engine
        if began_s is None and (counts.running or counts.finished):
            began_s = now_s
        elapsed_s = now_s - began_s if began_s else 0.0
        screen.show(counts, counts.generated_tokens / elapsed_s if elapsed_s else 0.0, followers.text_by_prompt)
        if counts.finished + counts.failed + counts.cancelled + counts.expired >= num_jobs:
            return elapsed_s
        time.sleep(_POLL_INTERVAL_S)
    raise CommandError(f"the demo did not end within {_LIMIT_S:.0f} s")


class _Followers:
    """Owns the texts of the streamed jobs while they grow. Each job has a thread and a connection."""

    def __init__(self, jobs: Sequence[GenerationRequest], redis_url: str, queue: str) -> None:
        self._jobs = [(str(job.id), str(job.prompt)) for job in jobs if job.stream]
        self._redis_url = redis_url
        self._queue = queue
        self._threads: list[threading.Thread] = []
        self.text_by_prompt = {prompt: "" for _, prompt in self._jobs}

    @property
    def have_started(self) -> bool:
        return bool(self._threads)

    def start(self) -> None:
        """Start to read. The jobs must be in the queue."""
        self._threads = [threading.Thread(target=self._follow, args=job, daemon=True) for job in self._jobs]
        for thread in self._threads:
            thread.start()

    def _follow(self, job_id: str, prompt: str) -> None:
        from millrace import Client, MillraceError

        with contextlib.suppress(MillraceError):  # the demo was stopped, and the server is gone
            for event in Client(self._redis_url, queue=self._queue).stream(job_id):
                self.text_by_prompt[prompt] += event.text


def _summary(results: Sequence[Job], jobs: Sequence[GenerationRequest], seconds: float, screen: Screen) -> int:
    tokens = sum(len(result.token_ids) for result in results)
    num_finished = sum(result.state == "finished" for result in results)
    texts = [(f"  {job.prompt}{result.text}", result) for job, result in zip(jobs, results, strict=True)]
    sums = [(text, result) for text, result in texts if result.meta]
    num_right = sum(result.meta == {"answer": result.text.strip()} for _, result in sums)
    for text, _ in [one for one in texts if one not in sums] + sums[:4]:
        screen.print_line(text)
    rate = f" in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s" if seconds else ""
    screen.print_line(f"{num_finished} of {len(jobs)} jobs finished, {tokens} tokens{rate}.")
    screen.print_line(f"{num_right} of {len(sums)} sums are right.")
    return OK if num_finished == len(jobs) else OTHER


def _tiny_model() -> Path:
    model = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_model"
    if not (model / "config.json").exists():
        raise CommandError(f"the demo's model is not at {model}; run the demo in a checkout, or give --model DIR")
    return model
