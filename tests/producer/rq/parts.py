"""What the gateway's tests are made of: gateways as real processes, and an engine without a model."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rq import Queue
from rq.job import Job

from millrace.engine_service.serving.leases import new_engine_id
from millrace.results.connection import connect
from millrace.results.errors import QueueError
from millrace.results.messages import Claim, ClaimedJob, Event, Finish, JobError, JobId, Lease, Usage
from tests.processes import LIMIT_S, LoggedProcess, module_command, wait_until
from tests.results.full_queue import FullQueue


def enqueue(queue: Queue, prompt: str = "hello", **options: Any) -> Job:
    """As a script does that has only RQ."""
    return queue.enqueue("millrace.generate", prompt=prompt, max_tokens=8, **options)


def enqueue_many(queue: Queue, number: int) -> list[Job]:
    """Prompts "hello 0", "hello 1", ..."""
    calls = [
        Queue.prepare_data("millrace.generate", kwargs={"prompt": f"hello {i}", "max_tokens": 8}) for i in range(number)
    ]
    return queue.enqueue_many(calls)


def status_of(job: Job) -> str:
    return str(job.get_status().value)


def refreshed(job: Job) -> Job:
    """The same job as RQ has it now."""
    return Job.fetch(job.id, connection=job.connection, serializer=job.serializer)


def value_of(job: Job) -> dict[str, Any]:
    value = job.return_value(refresh=True)
    assert isinstance(value, dict)
    return value


def wait_for(status: str, *jobs: Job, limit_s: float = LIMIT_S) -> None:
    """Until all of the jobs have this status."""
    wait_until(lambda: all(status_of(job) == status for job in jobs), limit_s, f"status {status} of {len(jobs)} jobs")


def num_finished(queue: Queue) -> int:
    return int(queue.finished_job_registry.get_job_count(cleanup=False))


def wait_for_finished(queue: Queue, number: int, limit_s: float = LIMIT_S) -> None:
    """Until so many jobs of the queue have finished."""
    wait_until(lambda: num_finished(queue) == number, limit_s, f"the end of {number} jobs")


class GatewayProcess(LoggedProcess):
    """One `millrace gateway rq`."""

    def __init__(self, log: Path, redis_url: str, rq_queues: str, to_queue: str, *options: str) -> None:
        place = ("--redis", redis_url, "--queues", rq_queues, "--to-queue", to_queue)
        super().__init__(log, module_command("millrace", "gateway", "rq", *place, *options))

    @property
    def name(self) -> str:
        """Its name among RQ's workers."""
        found = re.search(r"gateway (\S+): RQ queues", self.text())
        assert found is not None, self.text()
        return found[1]

    def wait_until_serving(self) -> Self:
        return self.wait_for_log("RQ queues")


class EchoEngine:
    """An engine of one thread that claims as engines do and answers with the prompt. It finishes what `may_finish` lets
    through, and counts how often each job was run to its end."""

    def __init__(self, redis_url: str, queue: str) -> None:
        self.queue = FullQueue(connect(redis_url), queue)
        self._runs: Counter[str] = Counter()
        self._writing = threading.Lock()
        """Held from the end of a job until it is counted."""
        self.may_finish: Callable[[ClaimedJob], bool] = lambda job: True
        self.errors: dict[str, JobError] = {}
        self.held: dict[JobId, ClaimedJob] = {}
        self._engine_id = new_engine_id()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echo-engine", daemon=True)

    @property
    def runs(self) -> Counter[str]:
        with self._writing:
            return Counter(self._runs)

    def __enter__(self) -> EchoEngine:
        self.queue.heartbeat(self._engine_id, 5000, {})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self.queue.close()

    def hold(self) -> None:
        """From now on nothing ends."""
        self.may_finish = lambda job: False

    def let_go(self) -> None:
        self.may_finish = lambda job: True

    def _run(self) -> None:
        next_beat_s = 0.0
        num_claims = 0
        while not self._stopping.is_set():
            try:
                if time.monotonic() > next_beat_s:
                    next_beat_s = time.monotonic() + 0.2
                    leases = {job_id: Lease(job.lease) for job_id, job in self.held.items()}
                    for job_id in self.queue.heartbeat(self._engine_id, 5000, leases).cancelled:
                        self._cancel(self.held[job_id])
                claim = self._claim(num_claims + 1)  # the same id again after an error
                num_claims += 1
                self.held.update((job.job_id, job) for job in claim.jobs)
                ready = [job for job in self.held.values() if self.may_finish(job)]
                with self._writing:
                    self.queue.write([self._ended(job) for job in ready])
                    for job in ready:
                        self._count(job)
                if not ready and not claim.jobs:
                    self.queue.wait_for_signal(self._engine_id, 0.05, include_wake=True)
            except QueueError:
                self._stopping.wait(0.1)

    def _claim(self, number: int) -> Claim:
        claim = self.queue.claim(
            self._engine_id,
            str(number),
            max_jobs=256,
            kv_token_budget=10**9,
            num_held=len(self.held),
            fingerprint="echo",
        )
        return claim or Claim(jobs=[], num_ready=0, num_set_aside=0)

    def _ended(self, job: ClaimedJob) -> Finish:
        error = self.errors.get(job.job_id)
        usage = Usage(prompt_tokens=3, completion_tokens=2)
        if error is not None:
            return Finish(
                job_id=job.job_id, lease=job.lease, state="failed", finish_reason="error", usage=usage, error=error
            )
        text = answer_to(json.loads(job.body).get("prompt", ""))
        indices = range(len(job.checkpoints)) if len(job.checkpoints) > 1 else [None]
        events = [Event(offset=0, token_ids=[1, 2], text=text, index=index) for index in indices]
        return Finish(
            job_id=job.job_id, lease=job.lease, state="finished", finish_reason="stop", usage=usage, events=events
        )

    def _cancel(self, job: ClaimedJob) -> None:
        usage = Usage(prompt_tokens=3, completion_tokens=0)
        self.queue.write(
            [Finish(job_id=job.job_id, lease=job.lease, state="cancelled", finish_reason="cancelled", usage=usage)]
        )
        del self.held[job.job_id]

    def _count(self, job: ClaimedJob) -> None:
        self._runs[job.job_id] += 1
        del self.held[job.job_id]


def answer_to(prompt: str) -> str:
    return f"echo: {prompt}"
