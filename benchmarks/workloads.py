"""The workloads of the throughput benchmarks. Only the standard library: the environments of other engines import it too.

    W1     small model, 256 requests of mixed lengths: the cost per step dominates
    W2     0.6B model in bfloat16, 32 requests: the matrix products dominate
    W3     128 requests that share a prefix of 512 tokens
    TINY   the example model, 48 requests
    W1-RANDOM    W1 with random sampling
    STEP<n>      n sequences decode; gives milliseconds per decode step

Lengths depend on the name alone; token ids also depend on the round. So all rounds cost the same, and no round finds its
prompts in a prefix cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

LLAMA, QWEN, TINY_MODEL = "llama-15m", "qwen3-0.6b-random", "tiny_model"
TOKEN_IDS = (300, 31_000)
"""Range of the prompts' token ids: ordinary tokens of both models."""
QUICK_TOKEN_IDS = (10, 500)
PREFIX_TOKENS = 512
STEP_TOKENS = (16, 80)
"""Output tokens of the short and the long run of STEP. The difference of their times is that of decode steps alone."""
QUICK_DIVISOR = 16
"""A quick workload has so many times fewer requests and tokens."""


@dataclass(frozen=True)
class Request:
    """One prompt and the exact number of tokens to generate."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True)
class Workload:
    """The requests of one round."""

    name: str
    model: str
    dtype: str
    requests: list[Request]
    max_model_len: int
    num_shared: int = 0
    """Tokens at the beginning of every prompt that are the same in all prompts of the round."""
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output for request in self.requests)

    @property
    def least_prefill_tokens(self) -> int:
        """Prompt tokens to compute if what the prompts share is computed once."""
        return self.num_prompt_tokens - self.num_shared * (len(self.requests) - 1)

    def head(self, num_requests: int, num_output: int) -> Workload:
        """Return the first requests with at most `num_output` tokens each, for a warm-up."""
        few = [replace(one, num_output=min(one.num_output, num_output)) for one in self.requests[:num_requests]]
        return replace(self, requests=few)


def is_step(name: str) -> bool:
    """Whether the workload's figure is a time per decode step."""
    return name.startswith("STEP")


def make(name: str, number: int | str = 0, *, is_quick: bool = False, num_output: int | None = None) -> Workload:
    """Return round `number` of a workload. `num_output` changes the output length of STEP."""
    base = name.removesuffix("-RANDOM")
    tokens = random.Random(f"tokens/{base}/{number}")
    divisor, ids = (QUICK_DIVISOR, QUICK_TOKEN_IDS) if is_quick else (1, TOKEN_IDS)

    def draw(count: int) -> list[int]:
        return [tokens.randint(*ids) for _ in range(max(1, count // divisor))]

    def mixed(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Request]:
        lengths = random.Random(f"shape/{base}")
        return [
            Request(draw(lengths.randint(*prompt)), max(1, lengths.randint(*output) // divisor))
            for _ in range(max(1, count // divisor))
        ]

    if base == "W1":
        made = Workload(name, LLAMA, "float32", mixed(256, (32, 256), (64, 128)), 512)
        if name != base:
            made = replace(made, temperature=0.8, top_p=0.95)
    elif base == "W2":
        made = Workload(name, QWEN, "bfloat16", mixed(32, (64, 256), (32, 64)), 512)
    elif base == "W3":
        prefix, num_requests = draw(PREFIX_TOKENS), max(2, 128 // divisor)
        requests = [Request(prefix + draw(16), max(1, 32 // divisor)) for _ in range(num_requests)]
        made = Workload(name, LLAMA, "float32", requests, 640, num_shared=len(prefix))
    elif base == "TINY":
        ids = QUICK_TOKEN_IDS
        made = Workload(name, TINY_MODEL, "float32", mixed(48, (8, 16), (48, 64)), 512)
    elif is_step(base) and base[4:].isdigit():
        count = max(1, STEP_TOKENS[1] // divisor if num_output is None else num_output)
        requests = [Request(draw(16), count) for _ in range(int(base[4:]))]
        made = Workload(name, LLAMA, "float32", requests, 512)
    else:
        raise ValueError(f'unknown workload "{name}"')
    return replace(made, model=TINY_MODEL, dtype="float32") if is_quick else made
