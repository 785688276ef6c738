"""A producer that needs RQ, but not Millrace: pip install rq, and run it.

    millrace serve --model examples/tiny_model &
    millrace gateway rq --queues generate --to-queue default &
    python examples/rq_producer.py

The function's name is a string, so nothing is imported from Millrace. The serializer must be "json": Millrace never reads
pickles.
"""

from __future__ import annotations

import os
import sys
import time

import redis
from rq import Queue
from rq.job import Job

PROMPTS = ["3 + 4 =", "20 + 22 =", "Count from 4 to 9:", "The day after Monday is", "The opposite of hot is"]
LIMIT_S = 60.0


def main() -> int:
    connection = redis.Redis.from_url(os.environ.get("REDIS_URL", "redis://localhost:6379/0"))
    queue = Queue("generate", connection=connection, serializer="json")
    jobs = queue.enqueue_many(
        [
            Queue.prepare_data("millrace.generate", kwargs={"prompt": prompt, "max_tokens": 32, "temperature": 0.0})
            for prompt in PROMPTS
        ]
    )
    deadline_s = time.monotonic() + LIMIT_S
    while not all(job.get_status() in ("finished", "failed") for job in jobs) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for prompt, job in zip(PROMPTS, jobs, strict=True):
        print(prompt + ending_of(job))
    return 0 if all(job.is_finished for job in jobs) else 1


def ending_of(job: Job) -> str:
    result = job.latest_result()
    if result is None:
        return f" ... {job.id} still runs"
    if result.return_value is None:
        return f" ... {result.exc_string}"
    value = result.return_value
    return f"{value['text']}   ({value['usage']['completion_tokens']} tokens, {value['finish_reason']})"


if __name__ == "__main__":
    sys.exit(main())
