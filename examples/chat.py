"""A conversation with the model: its reasoning apart from its answers, and the tokens and times of each answer.

    python examples/chat.py "What is 3 + 4?" "And 20 + 22?" --redis redis://localhost:6379/0

--thinking-token-budget ends the reasoning of a model that marks it; see docs/chat.md.
"""

from __future__ import annotations

import argparse

from millrace import Client, Job


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--system", default="Be brief.", help="what the model is told first")
    parser.add_argument("--thinking-token-budget", type=int, help="most tokens of reasoning for each answer")
    parser.add_argument("--redis", help="default: $MILLRACE_REDIS_URL")
    parser.add_argument("--queue", default="default")
    args = parser.parse_args()
    messages = [{"role": "system", "content": args.system}]
    with Client(args.redis, queue=args.queue) as client:
        for question in args.questions:
            messages.append({"role": "user", "content": question})
            budget = args.thinking_token_budget
            job_id = client.submit(messages=messages, max_tokens=None, temperature=0, thinking_token_budget=budget)
            job = client.wait(job_id, timeout_s=300)
            show(job)
            messages.append({"role": "assistant", "content": job.content or ""})


def show(job: Job) -> None:
    if job.error is not None or job.usage is None:
        raise SystemExit(f"job {job.id}: {job.error.message if job.error is not None else job.state}")
    if job.reasoning is not None:
        print(f"({job.reasoning})")
    print(job.content)
    usage, times = job.usage, job.timings
    print(
        f"  {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} of the answer"
    )
    print(f"  {times.queued_s} s in the queue, {times.prefill_s} s to the first token, {times.total_s} s in all")
    print(f"  attempt {job.attempt} on engine {job.engine}")


if __name__ == "__main__":
    main()
