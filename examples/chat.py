"""A conversation with the model, shown as it comes: reasoning apart from answers, then the tokens and times of each answer.

    python examples/chat.py "What is 3 + 4?" "And 20 + 22?" --redis redis://localhost:6379/0
    python examples/chat.py

The second one reads your questions, one on each line, until Ctrl-D.
--thinking-token-budget ends the reasoning of a model that marks it; see docs/chat.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from millrace import Client, Job, StreamEvent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", nargs="*", help="default: the lines that you type")
    parser.add_argument("--system", default="Be brief.", help="what the model is told first")
    parser.add_argument("--thinking-token-budget", type=int, help="most tokens of reasoning for each answer")
    parser.add_argument("--redis", help="default: $MILLRACE_REDIS_URL")
    parser.add_argument("--queue", default="default")
    args = parser.parse_args()
    messages = [{"role": "system", "content": args.system}]
    with Client(args.redis, queue=args.queue) as client:
        for question in args.questions or typed():
            messages.append({"role": "user", "content": question})
            budget = args.thinking_token_budget
            options: dict[str, Any] = {"max_tokens": None, "temperature": 0, "thinking_token_budget": budget}
            job_id = client.submit(messages=messages, stream=True, **options)
            show(client.stream(job_id, timeout_s=300))
            job = client.get(job_id)
            show_numbers(job)
            messages.append({"role": "assistant", "content": job.content or ""})


def typed() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def show(events: Iterator[StreamEvent]) -> None:
    is_reasoning = False
    for event in events:
        if event.reasoning:
            print(event.reasoning if is_reasoning else "(" + event.reasoning, end="", flush=True)
            is_reasoning = True
        if is_reasoning and (event.content or event.state):
            print(")")
            is_reasoning = False
        if event.content:
            print(event.content, end="", flush=True)
    print()


def show_numbers(job: Job) -> None:
    if job.error is not None or job.usage is None:
        raise SystemExit(f"job {job.id}: {job.error.message if job.error is not None else job.state}")
    usage, times = job.usage, job.timings
    print(
        f"  {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} of the answer"
    )
    print(f"  {times.queued_s} s in the queue, {times.prefill_s} s to the first token, {times.total_s} s in all")
    print(f"  attempt {job.attempt} on engine {job.engine}")


if __name__ == "__main__":
    main()
