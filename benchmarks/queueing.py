"""Measures jobs per second of the queue protocol alone: one process, 1 KB payloads, a private server.

Baselines in the same rounds: a plain Redis Streams consumer group, and RQ's `enqueue_many` and `SimpleWorker`.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis
import rq

from benchmarks.options import Options
from millrace import Client, GenerationRequest
from millrace.results.connection import connect
from millrace.results.messages import ClaimedJob, EngineId, Event, Finish, Usage
from millrace.results.queue import JobQueue

NUM_JOBS = 10_000
NUM_ROUNDS = 5
NUM_SINGLE = 2_000
NUM_THREADS = 8
NUM_RQ_RUN = 1_000
BATCH = 256
PAYLOAD = "x" * 1000
FEW, MANY, QUICK_MANY = 1_000, 1_000_000, 10_000

Figures = dict[str, float]


def measure(options: Options) -> dict[str, Any]:
    """Return medians over the rounds, and the figures of one very long queue."""
    rounds = [_round(options.url) for _ in range(options.num_rounds)]
    figures = {name: statistics.median(values[name] for values in rounds) for name in rounds[0]}
    num_queued = QUICK_MANY if options.is_quick else MANY
    figures |= _first_claim(options.url)
    figures |= _long_queue(options.url, num_queued, options.num_rounds)
    return {name: round(value, 2) for name, value in figures.items()}


def _round(url: str) -> Figures:
    queue = _new_queue()
    submit_s, _ = _timed(lambda: _submit(url, queue, NUM_JOBS))
    claim_s, claim_cpu_s = _timed(lambda: _claim_and_finish(url, queue))
    single_s, single_cpu_s = _timed(lambda: _submit_singly(url, _new_queue()))
    set_s, _ = _timed(lambda: _set_singly(url))
    threads_s, _ = _timed(lambda: _submit_from_threads(url, _new_queue()))
    rq_queue = _rq_queue(url)
    rq_s, _ = _timed(lambda: _rq_enqueue(rq_queue))
    rq_queue.delete(delete_jobs=True)
    rq_queue.connection.close()
    return {
        "submit_many_jobs_per_s": NUM_JOBS / submit_s,
        "claim_and_finish_jobs_per_s": NUM_JOBS / claim_s,
        "claim_and_finish_client_cpu_us_per_job": claim_cpu_s / NUM_JOBS * 1e6,
        "single_submit_jobs_per_s": NUM_SINGLE / single_s,
        "single_submit_client_cpu_us_per_job": single_cpu_s / NUM_SINGLE * 1e6,
        "single_submit_over_redis_set": set_s / single_s,
        "single_submit_of_threads_jobs_per_s": NUM_SINGLE / threads_s,
        **_streams_baseline(url),
        "rq_enqueue_many_jobs_per_s": NUM_JOBS / rq_s,
        "rq_simple_worker_jobs_per_s": _rq_work(url),
        "submit_many_over_rq": rq_s / submit_s,
    }


# --- Millrace ------------------------------------------------------------------------------------------------------


def _submit(url: str, queue: str, num_jobs: int) -> None:
    with Client(url, queue=queue) as client:
        client.submit_many(GenerationRequest(prompt=PAYLOAD) for _ in range(num_jobs))


def _submit_singly(url: str, queue: str) -> None:
    with Client(url, queue=queue) as client:
        for _ in range(NUM_SINGLE):
            client.submit(PAYLOAD)


def _submit_from_threads(url: str, queue: str) -> None:
    """Submit from NUM_THREADS threads with one client, like the requests of a web server. Each waits for its reply."""
    with Client(url, queue=queue) as client, ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in pool.map(client.submit, itertools.repeat(PAYLOAD, NUM_SINGLE)):
            pass


def _claim_and_finish(url: str, queue: str, limit: int | None = None) -> float:
    """Claim and finish all jobs, or `limit` of them. Return the seconds that the claims took."""
    engine, claim_s, num_done = _Engine(url, queue), 0.0, 0
    while limit is None or num_done < limit:
        begin_s = time.perf_counter()
        jobs = engine.claim(BATCH if limit is None else min(BATCH, limit - num_done))
        claim_s += time.perf_counter() - begin_s
        if not jobs:
            break
        engine.jobs.write([_finish(job) for job in jobs])
        num_done += len(jobs)
    return claim_s


class _Engine:
    """The part of an engine that uses the queue. Generates nothing."""

    def __init__(self, url: str, queue: str) -> None:
        self.jobs = JobQueue(connect(url), queue)
        self.id = EngineId(f"bench-{uuid.uuid4().hex[:8]}")
        self._numbers = itertools.count()
        self.jobs.heartbeat(self.id, 600_000, {})

    def claim(self, max_jobs: int) -> list[ClaimedJob]:
        number = str(next(self._numbers))
        limits: dict[str, Any] = {"max_jobs": max_jobs, "kv_token_budget": 10**9, "num_held": 0, "fingerprint": "bench"}
        claim = self.jobs.claim(self.id, number, **limits)
        return claim.jobs if claim else []


def _finish(job: ClaimedJob) -> Finish:
    usage = Usage(prompt_tokens=10, completion_tokens=10)
    events = [Event(offset=0, token_ids=list(range(10)), text="ten tokens of text")]
    end: dict[str, Any] = {"state": "finished", "finish_reason": "stop", "usage": usage, "events": events}
    return Finish(job_id=job.job_id, lease=job.lease, **end)


def _first_claim(url: str) -> Figures:
    """Measure the median time from `submit` until a waiting engine has the job."""
    queue, waits_s = _new_queue(), []
    engine = _Engine(url, queue)
    with Client(url, queue=queue) as client, ThreadPoolExecutor(1) as pool:
        for _ in range(50):
            claimed = pool.submit(_wait_and_claim, engine)
            time.sleep(0.01)  # until the thread blocks
            begin_s = time.perf_counter()
            client.submit(PAYLOAD)
            waits_s.append(claimed.result() - begin_s)
    return {"submit_to_first_claim_ms": statistics.median(waits_s) * 1000}


def _wait_and_claim(engine: _Engine) -> float:
    """Return the time of the claim."""
    while True:
        engine.jobs.wait_for_signal(engine.id, 1.0, include_wake=True)
        if engine.claim(1):
            return time.perf_counter()


def _long_queue(url: str, num_jobs: int, num_rounds: int) -> Figures:
    """Measure claim rates with many queued jobs and with few, in turns, and the memory of a queued job."""
    client, long = connect(url), _new_queue()
    before: Any = client.info("memory")
    _submit(url, long, num_jobs)
    after: Any = client.info("memory")
    rates: dict[str, list[float]] = {"few": [], "many": []}
    for _ in range(num_rounds):
        short = _new_queue()
        _submit(url, short, FEW)
        for name, queue in (("few", short), ("many", long)):
            rates[name].append(FEW / _claim_and_finish(url, queue, FEW))
    few, many = (statistics.median(values) for values in rates.values())
    return {
        "queued_jobs": num_jobs,
        "claims_per_s_with_few_queued": few,
        "claims_per_s_with_many_queued": many,
        "many_over_few": many / few,
        "bytes_per_queued_job": (after["used_memory"] - before["used_memory"]) / num_jobs,
    }


# --- baselines -----------------------------------------------------------------------------------------------------


def _streams_baseline(url: str) -> Figures:
    """Measure a bare consumer group: XADD, then XREADGROUP, XADD of a result, and XACK."""
    client, stream = connect(url), f"bench-{uuid.uuid4().hex[:8]}"
    client.xgroup_create(stream, "g", id="0", mkstream=True)
    add_s, _ = _timed(lambda: _streams_add(client, stream))
    work_s, _ = _timed(lambda: _streams_work(client, stream))
    client.delete(stream, stream + ":results")
    client.close()
    return {"streams_add_jobs_per_s": NUM_JOBS / add_s, "streams_read_and_ack_jobs_per_s": NUM_JOBS / work_s}


def _streams_add(client: redis.Redis, stream: str) -> None:
    for first in range(0, NUM_JOBS, BATCH):
        with client.pipeline(transaction=False) as pipe:
            for _ in range(first, min(first + BATCH, NUM_JOBS)):
                pipe.xadd(stream, {"job": PAYLOAD})
            pipe.execute()


def _streams_work(client: redis.Redis, stream: str) -> None:
    while found := client.xreadgroup("g", "c", {stream: ">"}, count=BATCH):
        entries: Any = found[0][1]  # type: ignore[index]
        with client.pipeline(transaction=False) as pipe:
            for entry_id, _ in entries:
                pipe.xadd(stream + ":results", {"id": entry_id, "text": "ten tokens of text"})
                pipe.xack(stream, "g", entry_id)
            pipe.execute()


def _set_singly(url: str) -> None:
    """SET the payload with redis-py: the minimum cost of a call to the server."""
    with connect(url) as client:
        for _ in range(NUM_SINGLE):
            client.set("bench-set", PAYLOAD)
        client.unlink("bench-set")


def _rq_queue(url: str) -> rq.Queue:
    return rq.Queue(_new_queue(), connection=redis.Redis.from_url(url), serializer="json")


def _rq_enqueue(queue: rq.Queue) -> None:
    data = [rq.Queue.prepare_data("bench.generate", kwargs={"prompt": PAYLOAD}) for _ in range(NUM_JOBS)]
    for first in range(0, NUM_JOBS, BATCH):
        queue.enqueue_many(data[first : first + BATCH])


def _rq_work(url: str) -> float:
    """Return the jobs per second of RQ's worker without a fork per job, for jobs that return at once."""
    logging.getLogger("rq.worker").setLevel(logging.ERROR)
    queue = _rq_queue(url)
    for _ in range(NUM_RQ_RUN):
        queue.enqueue("builtins.len", PAYLOAD)
    worker = rq.SimpleWorker([queue], connection=queue.connection, serializer="json")
    work_s, _ = _timed(lambda: worker.work(burst=True, logging_level="ERROR"))
    ids = queue.finished_job_registry.get_job_ids()  # else they expire while the memory of a long queue is measured
    queue.connection.unlink(*(f"rq:{kind}:{job_id}" for kind in ("job", "results") for job_id in ids))
    queue.connection.close()
    return NUM_RQ_RUN / work_s


def _new_queue() -> str:
    return f"bench-{uuid.uuid4().hex[:8]}"


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds of this process) of the work."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
