"""Millrace's `LLM`, with the engine's defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.engines import runner
from benchmarks.environment import version_of
from benchmarks.workloads import Workload
from millrace import LLM, SamplingParams


class Millrace:
    def __init__(self, path: Path, workload: Workload, options: argparse.Namespace) -> None:
        self._llm = LLM(
            model=path,
            device="cpu",
            executor=options.executor,
            max_model_len=workload.max_model_len,
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
        )

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

    def facts(self) -> dict[str, Any]:
        facts = self._llm._engine.facts
        return {"dtype": facts.dtype, **{name: version_of(name) for name in ("millrace", "torch", "transformers")}}

    def counts(self) -> dict[str, int]:
        stats, executor = self._llm.stats(), self._llm.metrics().executor
        return {
            "prefill_tokens": stats.pool.num_queried_tokens - stats.pool.num_hit_tokens,
            "preemptions": stats.num_preemptions,
            "steps": executor.num_steps,
            "plan_bytes": executor.plan_bytes,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--executor", default="mp")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    runner.run(Millrace, parser)
