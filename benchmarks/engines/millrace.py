"""Millrace's `LLM`, with the engine's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.engines import runner
from benchmarks.workloads import Workload
from millrace import LLM, SamplingParams


class Millrace(runner.Engine):
    packages = ("millrace", "torch", "transformers")

    def __init__(self, path: Path, workload: Workload, **options: Any) -> None:
        self._llm = LLM(model=path, device="cpu", max_model_len=workload.max_model_len, **options)

    def generate(self, workload: Workload) -> list[int]:
        params = [
            SamplingParams(
                max_tokens=request.num_output,
                temperature=workload.temperature,
                top_p=workload.top_p,
                ignore_eos=True,
            )
            for request in workload.requests
        ]
        outputs = self._llm.generate([request.prompt for request in workload.requests], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def counts(self) -> dict[str, int]:
        stats, executor = self._llm.stats(), self._llm.metrics().executor
        return {
            "prefill_tokens": stats.pool.num_queried_tokens - stats.pool.num_hit_tokens,
            "preemptions": stats.num_preemptions,
            "steps": executor.num_steps,
            "plan_bytes": executor.plan_bytes,
        }


if __name__ == "__main__":
    runner.run(Millrace)
