"""Measures what saving running jobs costs: the same work on one service, with checkpoints and without.

Work: unwatched jobs, each saved every 64 tokens or every second, as in production. A signal turns checkpoints on or off
in one process, because two processes differ by more than the cost. Which of a pair is first alternates. The ratio of
throughputs is the median of the pairs, with the interval that holds the true median with 95 % confidence.
`added_service_cpu_share` is the CPU time that saving adds to the service process, as a share of the run's wall time: an
upper bound of the cost.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from typing import Any

from benchmarks.options import Options
from benchmarks.service import Service, greedy
from benchmarks.timing import median_interval

NUM_REQUESTS = 64
QUICK_REQUESTS = 16
NUM_TOKENS = 128
NUM_ROUNDS = 40

_SWITCHED_BY_SIGNALS = """
import signal, sys
from millrace.engine_service.serving import output
from millrace.engine_service.process import main
default = output.CHECKPOINT_TOKENS, output.CHECKPOINT_INTERVAL_S
def set_limits(tokens, interval_s):
    output.CHECKPOINT_TOKENS, output.CHECKPOINT_INTERVAL_S = tokens, interval_s
signal.signal(signal.SIGUSR1, lambda *_: set_limits(*default))
signal.signal(signal.SIGUSR2, lambda *_: set_limits(10**9, 10**9))
sys.exit(main())
"""


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part."""
    num_requests = QUICK_REQUESTS if options.is_quick else NUM_REQUESTS
    service = Service(options.url, options.model, queue="bench-checkpoints", start=("-c", _SWITCHED_BY_SIGNALS))
    runs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    try:
        _run(service, 1000, num_requests)
        for pair in range(options.num_rounds):
            for is_saving in (True, False) if pair % 2 else (False, True):
                service.send_signal(signal.SIGUSR1 if is_saving else signal.SIGUSR2)
                runs[is_saving].append(_run(service, pair, num_requests))
    finally:
        service.stop()
    pairs = list(zip(runs[True], runs[False], strict=True))
    ratios = [without_s / with_s for (with_s, _), (without_s, _) in pairs]
    added_cpu_s = statistics.median(with_cpu_s - without_cpu_s for (_, with_cpu_s), (_, without_cpu_s) in pairs)
    wall_s = statistics.median(with_s for (with_s, _), _ in pairs)
    return {
        "num_requests": num_requests,
        "tokens_per_request": NUM_TOKENS,
        "throughput_ratio": round(statistics.median(ratios), 4),
        "ratio_interval": [round(bound, 4) for bound in median_interval(ratios)],
        "ratios": [round(ratio, 4) for ratio in ratios],
        "added_service_cpu_share": round(added_cpu_s / wall_s, 4),
    }


def _run(service: Service, seed: int, num_requests: int) -> tuple[float, float]:
    """Return the wall seconds and the service's CPU seconds of one run."""
    tokens = random.Random(seed)
    work = [greedy(tokens.choices(range(10, 501), k=16), NUM_TOKENS) for _ in range(num_requests)]
    begin_cpu_s = service.cpu_s(with_workers=False)
    seconds = service.run(work)
    time.sleep(0.2)  # until the writer has sent the last writes
    return seconds, service.cpu_s(with_workers=False) - begin_cpu_s
