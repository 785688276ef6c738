"""Measures tokens per second, offline and through Redis with the same executor, and the time of a start.

Work: prompts of 8 to 32 tokens and outputs of 32 to 96 tokens, drawn with a fixed seed. Model: a Llama with 15 million
random weights, float32, and the tiny model's tokenizer. Each side has one compute thread, or OMP_NUM_THREADS of the
environment: with more threads, those of a step wait for each other when another process runs. Both sides run in turns,
so that other load on the machine affects both. The ratio is the median of the pairs' ratios.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.service import Service
from millrace import LLM, GenerationRequest, SamplingParams

os.environ.setdefault("OMP_NUM_THREADS", "1")

NUM_REQUESTS = 256
QUICK_REQUESTS = 32
NUM_ROUNDS = 7
IDLE_S, QUICK_IDLE_S = 10.0, 1.0
TINY = ROOT / "examples" / "tiny_model"


def make_work(seed: int, num_requests: int) -> list[GenerationRequest]:
    """Return the requests of one run. The lengths are always the same, the prompts depend on the seed."""
    lengths, tokens = random.Random(0), random.Random(seed)
    return [
        GenerationRequest(
            prompt_token_ids=[tokens.randint(10, 500) for _ in range(lengths.randint(8, 32))],
            sampling=SamplingParams(temperature=0.0, max_tokens=lengths.randint(32, 96), ignore_eos=True),
        )
        for _ in range(num_requests)
    ]


def count_tokens(num_requests: int) -> int:
    """Return the output tokens of one run."""
    return sum(request.sampling.max_tokens or 0 for request in make_work(0, num_requests))


def measure(url: str, model: Path, num_rounds: int, *, is_quick: bool = False) -> dict[str, Any]:
    """Return all figures of this part."""
    num_requests = QUICK_REQUESTS if is_quick else NUM_REQUESTS
    service = Service(url, model, queue="bench")
    try:
        first_token_s = service.seconds_to_first_token()
        idle_share = service.idle_cpu_share(QUICK_IDLE_S if is_quick else IDLE_S)
        offline_s, redis_s = _run_pairs(service, model, num_rounds, num_requests)
    finally:
        service.stop()
    ratios = [offline / through_redis for offline, through_redis in zip(offline_s, redis_s, strict=True)]
    num_tokens = count_tokens(num_requests)
    return {
        "num_requests": num_requests,
        "compute_threads": os.environ["OMP_NUM_THREADS"],
        "output_tokens": num_tokens,
        "offline_tokens_per_s": round(num_tokens / statistics.median(offline_s), 1),
        "through_redis_tokens_per_s": round(num_tokens / statistics.median(redis_s), 1),
        "through_redis_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "start_to_first_token_s": round(first_token_s, 3),
        "idle_cpu_share_of_a_core": round(idle_share, 5),
    }


def _run_pairs(service: Service, model: Path, num_pairs: int, num_requests: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each offline run, and of each run through Redis."""
    offline_s, redis_s = [], []
    with LLM(model=model, device="cpu", executor="mp") as llm:
        run_offline(llm, 100, num_requests)
        service.run(make_work(101, num_requests))
        for pair in range(num_pairs):
            offline_s.append(run_offline(llm, 2 * pair, num_requests))
            redis_s.append(service.run(make_work(2 * pair + 1, num_requests)))
    return offline_s, redis_s


def run_offline(llm: LLM, seed: int, num_requests: int) -> float:
    """Return the seconds of one run without Redis."""
    work = make_work(seed, num_requests)
    prompts = [request.prompt_token_ids or [] for request in work]
    begin_s = time.perf_counter()
    llm.generate(prompts, [request.sampling for request in work], use_tqdm=False)
    return time.perf_counter() - begin_s


def make_model(path: Path) -> Path:
    """Save a Llama with 15 million random weights and the tiny model's tokenizer in `path`. Return `path`."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, path / name)
    return path
