"""A chat in which the model calls functions of this program, until it answers without a call.

    python examples/tools.py "What is 3 + 4?" --redis redis://localhost:6379/0

The engines must serve a model that was trained for tools; see docs/chat.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import msgspec

from millrace import Client, ToolCall

MAX_ROUNDS = 5


def add(a: float, b: float) -> float:
    return a + b


FUNCTIONS: dict[str, Callable[..., Any]] = {"add": add}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--redis", help="default: $MILLRACE_REDIS_URL")
    parser.add_argument("--queue", default="default")
    args = parser.parse_args()
    with Client(args.redis, queue=args.queue) as client:
        print(answer(client, args.question))


def answer(client: Client, question: str) -> str | None:
    """Return the model's answer to a question, after the calls that it needs."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_ROUNDS):
        job = client.wait(client.submit(messages=messages, tools=TOOLS, max_tokens=512), timeout_s=300)
        if job.error is not None:
            raise SystemExit(f"job {job.id} failed: {job.error.message}")
        if not job.tool_calls:
            return job.content
        calls = msgspec.to_builtins(job.tool_calls)
        messages.append({"role": "assistant", "content": job.content, "tool_calls": calls})
        for call in job.tool_calls:
            print(f"{call.function.name}({call.function.arguments})")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call)})
    raise SystemExit(f"the model still calls functions after {MAX_ROUNDS} rounds")


def result_of(call: ToolCall) -> str:
    """Return the result as JSON. The model has written name and arguments, so it gets an error back if they are wrong."""
    try:
        return json.dumps(FUNCTIONS[call.function.name](**json.loads(call.function.arguments)))
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
