"""The workloads of the throughput benchmarks. Only the standard library: the environments of other engines import it too.

    W1         small model, 256 requests of mixed lengths: the cost per step dominates
    W2         0.6B model in bfloat16, 32 requests: the matrix products dominate
    W3         128 requests that share a prefix of 512 tokens
    W4         small model, 32 prompts of 3,000 to 3,900 tokens: the attention of prompts dominates
    W5         the lengths of W2 to a 0.8B model in bfloat16 three quarters of whose layers are recurrent
    W6         W2 with weights in 4 bits, as GPTQ stores them in groups of 128
    NANO       0.6B model, 256 requests with prompts and outputs of 100 to 1,024 tokens: for a GPU
    NANO-14B   the same requests to a 14B model
    W1-SCHEMAS W1, for outputs that follow JSON schemas; only on request
    TINY       the example model, 48 requests
    STEP<n>    n sequences decode; gives milliseconds per decode step

Lengths depend on the name alone; token ids also depend on the round. So all rounds cost the same, and no round finds its
prompts in a prefix cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

QWEN_GPTQ = "qwen3-0.6b-gptq-random"
LLAMA, QWEN, QWEN_14B, TINY_MODEL = "llama-15m", "qwen3-0.6b-random", "qwen3-14b-random", "tiny_model"
HYBRID = "qwen3.5-0.8b-random"
TOKEN_IDS = (300, 31_000)
"""Range of the prompts' token ids: ordinary tokens of both models."""
QUICK_TOKEN_IDS = (10, 500)
PREFIX_TOKENS = 512
QUICK_DIVISOR = 16
"""Requests and tokens of a workload, divided by those of its quick form."""


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

    def head(self, num_requests: int | None, num_output: int) -> Workload:
        """Return the first requests, or all, with at most `num_output` tokens each."""
        few = [replace(one, num_output=min(one.num_output, num_output)) for one in self.requests[:num_requests]]
        return replace(self, requests=few)


def is_step(name: str) -> bool:
    """Whether the workload's figure is a time per decode step."""
    return name.startswith("STEP")


def make(name: str, number: int | str = 0, *, is_quick: bool = False) -> Workload:
    """Return round `number` of a workload."""
    is_nano = name in ("NANO", "NANO-14B")
    shape = 0 if is_nano else f"shape/{'W2' if name in ('W5', 'W6') else name}"
    tokens, lengths = random.Random(f"tokens/{name}/{number}"), random.Random(shape)
    divisor, ids = (QUICK_DIVISOR, QUICK_TOKEN_IDS) if is_quick else (1, TOKEN_IDS)
    dtype, num_shared, max_model_len = "float32", 0, 512
    if name == "TINY":
        ids = QUICK_TOKEN_IDS

    def draw(count: int) -> list[int]:
        return [tokens.randint(*ids) for _ in range(max(1, count // divisor))]

    def mixed(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Request]:
        return [
            Request(draw(lengths.randint(*prompt)), max(1, lengths.randint(*output) // divisor))
            for _ in range(max(1, count // divisor))
        ]

    if name in ("W1", "W1-SCHEMAS"):
        model, requests = LLAMA, mixed(256, (32, 256), (64, 128))
    elif name in ("W2", "W5", "W6"):
        model, dtype = {"W5": HYBRID, "W6": QWEN_GPTQ}.get(name, QWEN), "bfloat16"
        requests = mixed(32, (64, 256), (32, 64))
    elif name == "W3":
        prefix, count = draw(PREFIX_TOKENS), max(2, 128 // divisor)
        model, max_model_len, num_shared = LLAMA, 640, len(prefix)
        requests = [Request(prefix + draw(16), max(1, 32 // divisor)) for _ in range(count)]
    elif name == "W4":
        model, max_model_len = LLAMA, 512 if is_quick else 4096
        requests = mixed(32, (3000, 3900), (32, 64))
    elif is_nano:
        model = QWEN if name == "NANO" else QWEN_14B
        dtype, max_model_len = "bfloat16", 512 if is_quick else 2048
        requests = mixed(256, (100, 1024), (100, 1024))
    elif name == "TINY":
        model, requests = TINY_MODEL, mixed(48, (8, 16), (48, 64))
    elif is_step(name) and name[4:].isdigit():
        count = int(name[4:])
        num_steps = max(64, 256 // count) // divisor  # more where a step is short
        model, requests = LLAMA, [Request(draw(16), 1 + num_steps) for _ in range(count)]
    else:
        raise ValueError(f'unknown workload "{name}"')
    if is_quick:
        model, dtype = TINY_MODEL, "float32"
    return Workload(name, model, dtype, requests, max_model_len, num_shared)
