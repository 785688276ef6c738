"""Tokens per second, offline and through Redis with the same executor, and how long a start takes.

Work: prompts of 8 to 32 tokens and outputs of 32 to 96, drawn with a fixed seed, on a random-weight Llama that is made
here (15 million parameters with the tiny model's tokenizer), float32, one compute thread on both sides: with more, the
threads of a step wait for each other whenever anything else runs on this machine, and the figures tell about that. Runs
alternate, so that both sides see the same neighbours; the ratio is the median of the pairs' ratios. OMP_NUM_THREADS in
the environment asks for another number of threads.
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
NUM_PAIRS = 7
IDLE_S = 10.0
TINY = ROOT / "examples" / "tiny_model"


def make_work(seed: int) -> list[GenerationRequest]:
    """The requests of one run: always the same lengths, always the same tokens for the same seed."""
    lengths, tokens = random.Random(0), random.Random(seed)
    return [
        GenerationRequest(
            prompt_token_ids=[tokens.randint(10, 500) for _ in range(lengths.randint(8, 32))],
            sampling=SamplingParams(temperature=0.0, max_tokens=lengths.randint(32, 96), ignore_eos=True),
        )
        for _ in range(NUM_REQUESTS)
    ]


def measure(url: str, model: Path) -> dict[str, Any]:
    """All figures of this file."""
    service = Service(url, model, queue="bench")
    try:
        first_token_s = service.seconds_to_first_token()
        idle_share = service.idle_cpu_share(IDLE_S)
        offline, through, ratios = _pairs(service, model)
    finally:
        service.stop()
    num_tokens = sum(request.sampling.max_tokens or 0 for request in make_work(0))
    return {
        "num_requests": NUM_REQUESTS,
        "compute_threads": os.environ["OMP_NUM_THREADS"],
        "output_tokens": num_tokens,
        "offline_tokens_per_s": round(num_tokens / statistics.median(offline), 1),
        "through_redis_tokens_per_s": round(num_tokens / statistics.median(through), 1),
        "through_redis_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "start_to_first_token_s": round(first_token_s, 3),
        "idle_cpu_share_of_a_core": round(idle_share, 5),
    }


def _pairs(service: Service, model: Path) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each offline run, of each run through Redis, and offline / through for each pair."""
    offline, through = [], []
    with LLM(model=model, device="cpu", executor="mp") as llm:
        run_offline(llm, seed=100)
        service.run(make_work(101))
        for pair in range(NUM_PAIRS):
            offline.append(run_offline(llm, seed=2 * pair))
            through.append(service.run(make_work(2 * pair + 1)))
    return offline, through, [one / other for one, other in zip(offline, through, strict=True)]


def run_offline(llm: LLM, seed: int) -> float:
    """Seconds of one run without Redis."""
    work = make_work(seed)
    prompts = [request.prompt_token_ids or [] for request in work]
    begin_s = time.perf_counter()
    llm.generate(prompts, [request.sampling for request in work], use_tqdm=False)
    return time.perf_counter() - begin_s


def make_model(path: Path) -> Path:
    """A Llama of 15 million parameters with random weights, and the tiny model's tokenizer."""
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
