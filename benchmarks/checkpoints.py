"""What it costs that running jobs are saved: the same work on two services, one of which saves nothing on the way.

Work: unwatched jobs of 256 output tokens, so that each is saved every 64 tokens or every second, as in production. Runs
alternate. The throughput's ratio is the median of the pairs' ratios. Since that moves by more than the cost itself on a
machine with neighbours, the CPU time of the service process tells it a second time: what saving adds to it, as a share
of the run's wall time, bounds the cost even if nothing of it were hidden behind the worker.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.service import Service
from millrace import GenerationRequest, SamplingParams

NUM_REQUESTS = 64
NUM_TOKENS = 256
NUM_PAIRS = 7

_NEVER_SAVES = (
    "from engine_service import output; output.CHECKPOINT_TOKENS = output.CHECKPOINT_INTERVAL_S = 10**9;"
    "import sys; from engine_service.__main__ import main; sys.exit(main())"
)


def make_work(seed: int) -> list[GenerationRequest]:
    """The requests of one run."""
    tokens = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        GenerationRequest(prompt_token_ids=[tokens.randint(10, 500) for _ in range(16)], sampling=sampling)
        for _ in range(NUM_REQUESTS)
    ]


def measure(url: str, model: Path) -> dict[str, Any]:
    """All figures of this file."""
    saving = Service(url, model, queue="bench-saving")
    unsaved = Service(url, model, queue="bench-unsaved", start=("-c", _NEVER_SAVES))
    try:
        for service in (saving, unsaved):
            service.run(make_work(1000))
        pairs = [(_run(saving, seed), _run(unsaved, seed)) for seed in range(NUM_PAIRS)]
    finally:
        saving.stop()
        unsaved.stop()
    ratios = [without_s / with_s for (with_s, _), (without_s, _) in pairs]
    added_cpu_s = statistics.median(with_cpu_s - without_cpu_s for (_, with_cpu_s), (_, without_cpu_s) in pairs)
    wall_s = statistics.median(with_s for (with_s, _), _ in pairs)
    return {
        "num_requests": NUM_REQUESTS,
        "tokens_per_request": NUM_TOKENS,
        "throughput_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "added_service_cpu_share": round(added_cpu_s / wall_s, 4),
    }


def _run(service: Service, seed: int) -> tuple[float, float]:
    """Seconds and the service's CPU seconds of one run."""
    begin_cpu_s = service.cpu_s(with_workers=False)
    seconds = service.run(make_work(seed))
    time.sleep(0.2)  # the last writes' threads come to rest
    return seconds, service.cpu_s(with_workers=False) - begin_cpu_s
