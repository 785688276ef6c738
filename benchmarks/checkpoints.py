"""What it costs that running jobs are saved: the same work on one service that saves them, and then does not.

Work: unwatched jobs, each saved every 64 tokens or every second, as in production. One process does both, told by a
signal, because two processes differ by more than the cost; the first of a pair alternates. The ratio of throughputs is
the median over the pairs, with the interval that holds the true median with 95 % confidence. The CPU time of the service
process tells it a second time: what saving adds to it, as a share of the run's wall time, bounds the cost even if nothing
of it were hidden behind the worker.
"""

from __future__ import annotations

import math
import random
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.service import Service
from millrace import GenerationRequest, SamplingParams

NUM_REQUESTS = 64
NUM_TOKENS = 128
NUM_PAIRS = 40

_TOLD_BY_SIGNALS = """
import signal, sys
from millrace.engine_service.serving import output
from millrace.engine_service.__main__ import main
usual = output.CHECKPOINT_TOKENS, output.CHECKPOINT_INTERVAL_S
def set_limits(tokens, interval_s):
    output.CHECKPOINT_TOKENS, output.CHECKPOINT_INTERVAL_S = tokens, interval_s
signal.signal(signal.SIGUSR1, lambda *_: set_limits(*usual))
signal.signal(signal.SIGUSR2, lambda *_: set_limits(10**9, 10**9))
sys.exit(main())
"""


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
    service = Service(url, model, queue="bench-checkpoints", start=("-c", _TOLD_BY_SIGNALS))
    runs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    try:
        service.run(make_work(1000))
        for pair in range(NUM_PAIRS):
            for is_saving in (True, False) if pair % 2 else (False, True):
                service.send_signal(signal.SIGUSR1 if is_saving else signal.SIGUSR2)
                runs[is_saving].append(_run(service, pair))
    finally:
        service.stop()
    pairs = list(zip(runs[True], runs[False], strict=True))
    ratios = [without_s / with_s for (with_s, _), (without_s, _) in pairs]
    added_cpu_s = statistics.median(with_cpu_s - without_cpu_s for (_, with_cpu_s), (_, without_cpu_s) in pairs)
    wall_s = statistics.median(with_s for (with_s, _), _ in pairs)
    return {
        "num_requests": NUM_REQUESTS,
        "tokens_per_request": NUM_TOKENS,
        "throughput_ratio": round(statistics.median(ratios), 4),
        "ratio_interval": [round(bound, 4) for bound in median_interval(ratios)],
        "ratios": [round(ratio, 4) for ratio in ratios],
        "added_service_cpu_share": round(added_cpu_s / wall_s, 4),
    }


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of the true median: two order statistics, by the binomial distribution of how many values lie below it
    (Conover, Practical Nonparametric Statistics, section 3.2). Assumes nothing of how the values are distributed."""
    ordered, tail, rank = sorted(values), 0.0, 0
    while (tail := tail + math.comb(len(ordered), rank) / 2 ** len(ordered)) <= (1 - confidence) / 2:
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[-rank]


def _run(service: Service, seed: int) -> tuple[float, float]:
    """Seconds and the service's CPU seconds of one run."""
    begin_cpu_s = service.cpu_s(with_workers=False)
    seconds = service.run(make_work(seed))
    time.sleep(0.2)  # the last writes' threads come to rest
    return seconds, service.cpu_s(with_workers=False) - begin_cpu_s
