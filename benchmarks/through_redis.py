"""Measures a service against `LLM`, both with the worker in a process of its own: the same workloads in turns, through Redis
and offline. `over_offline` is the ratio of tokens per second.

Also the service's time from its start to the first token of a waiting job, and the CPU time that it takes when it is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import models, workloads
from benchmarks.contenders import Contender, EngineProcess, Figures, prepare_model, rounds_of, run_in_turns
from benchmarks.offline import MP
from benchmarks.options import Options
from benchmarks.service import Service
from benchmarks.workloads import Workload
from millrace import GenerationRequest, SamplingParams

NUM_ROUNDS = 5
WORKLOADS = ("W1", "W2", "W3")
IDLE_S, QUICK_IDLE_S = 10.0, 1.0


class ServedWorkload:
    """Owns a service that runs one workload. Implements `Contender`."""

    def __init__(self, url: str, workload: str, *, is_quick: bool) -> None:
        self._name, self._is_quick = workload, is_quick
        made = workloads.make(workload, "warm-up", is_quick=is_quick)
        options = ("--max-model-len", str(made.max_model_len))
        self._service = Service(url, models.path_of(made.model), f"bench-{workload}", options=options)
        try:
            first_token_s = self._service.seconds_to_first_token()
            idle_share = self._service.idle_cpu_share(QUICK_IDLE_S if is_quick else IDLE_S)
            self._service.run(requests_of(made.head(64, 8)))
        except BaseException:
            self.close()
            raise
        self._summary = {
            "start_to_first_token_s": round(first_token_s, 2),
            "idle_cpu_share_of_a_core": round(idle_share, 5),
        }

    def run_round(self, number: int) -> Figures:
        workload = workloads.make(self._name, number, is_quick=self._is_quick)
        seconds = self._service.run(requests_of(workload))
        return {"seconds": seconds, "tokens_per_s": workload.num_output_tokens / seconds}

    def summary(self) -> Figures:
        return self._summary

    def close(self) -> None:
        self._service.stop()


def requests_of(workload: Workload) -> list[GenerationRequest]:
    """Return the workload as requests to a service."""
    return [
        GenerationRequest(
            prompt_token_ids=request.prompt,
            sampling=SamplingParams(
                temperature=workload.temperature,
                top_p=workload.top_p,
                max_tokens=request.num_output,
                ignore_eos=True,
            ),
        )
        for request in workload.requests
    ]


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload."""
    figures: dict[str, Any] = {}
    for name, limit_s in rounds_of(options.workloads or WORKLOADS, options.limit_s):
        prepare_model(name, is_quick=options.is_quick)
        starts: dict[str, Callable[[], Contender]] = {
            "offline": partial(EngineProcess, MP, name, is_quick=options.is_quick),
            "redis": partial(ServedWorkload, options.url, name, is_quick=options.is_quick),
        }
        figures[name] = run_in_turns(starts, "offline", options.num_rounds, limit_s)
    return figures
