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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from engine_service import LLM
from millrace import Client, GenerationRequest, SamplingParams

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
    service = Service(url, model)
    try:
        first_token_s = service.seconds_to_first_token()
        idle_share = service.idle_cpu_share()
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
        _run_offline(llm, seed=100)
        service.run(seed=101)
        for pair in range(NUM_PAIRS):
            offline.append(_run_offline(llm, seed=2 * pair))
            through.append(service.run(seed=2 * pair + 1))
    return offline, through, [one / other for one, other in zip(offline, through, strict=True)]


def _run_offline(llm: LLM, seed: int) -> float:
    work = make_work(seed)
    prompts = [request.prompt_token_ids or [] for request in work]
    begin_s = time.perf_counter()
    llm.generate(prompts, [request.sampling for request in work], use_tqdm=False)
    return time.perf_counter() - begin_s


class Service:
    """Owns one engine service and a client of it."""

    def __init__(self, url: str, model: Path) -> None:
        self._client = Client(url, queue="bench")
        self._begin_s = time.perf_counter()
        command = [sys.executable, "-P", "-m", "engine_service", "--model", str(model), "--redis", url]
        command += ["--queue", "bench", "--device", "cpu", "--executor", "mp", "--log-level", "WARNING"]
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def seconds_to_first_token(self) -> float:
        """From the start of the process until a waiting job's first token can be read."""
        job_id = self._client.submit(prompt="3 + 4 =", max_tokens=4, stream=True)
        next(iter(self._client.stream(job_id)))
        return time.perf_counter() - self._begin_s

    def idle_cpu_share(self) -> float:
        """CPU seconds per second of the service and its worker while there is nothing to do."""
        time.sleep(1.0)
        begin_s, begin_cpu_s = time.perf_counter(), self._cpu_s()
        time.sleep(IDLE_S)
        return (self._cpu_s() - begin_cpu_s) / (time.perf_counter() - begin_s)

    def run(self, seed: int) -> float:
        """Seconds from the first submit to the last result in hand."""
        work = make_work(seed)
        begin_s = time.perf_counter()
        ids = self._client.submit_many(work)
        num_done = sum(job.state == "finished" for job in self._client.as_completed(ids))
        seconds = time.perf_counter() - begin_s
        assert num_done == NUM_REQUESTS, f"{num_done} of {NUM_REQUESTS} finished"
        return seconds

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._client.close()

    def _cpu_s(self) -> float:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return sum(map(_process_cpu_s, [str(self._process.pid), *children]))


def _process_cpu_s(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
