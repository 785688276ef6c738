"""transformers on the CPU, greedy: `generate` on static batches, or its continuous batching."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engines import runner
from benchmarks.workloads import Workload

PAGE_TOKENS = 32
KV_TOKENS = 65_536


class _Transformers(runner.Engine):
    """Owns the model."""

    packages = ("transformers", "torch")

    def __init__(self, path: Path, workload: Workload, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, workload.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
        self._batch_size = batch_size


class StaticBatches(_Transformers):
    """Prompts are padded on the left. A batch runs until its longest request has ended; tokens past a request's own length
    are not counted."""

    def generate(self, workload: Workload) -> list[int]:
        import torch

        with torch.inference_mode():
            for begin in range(0, len(workload.requests), self._batch_size):
                requests = workload.requests[begin : begin + self._batch_size]
                width = max(len(request.prompt) for request in requests)
                ids = torch.zeros(len(requests), width, dtype=torch.int64)
                mask = torch.zeros_like(ids)
                for row, request in enumerate(requests):
                    ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
                    mask[row, width - len(request.prompt) :] = 1
                length = max(request.num_output for request in requests)
                limits = {"max_new_tokens": length, "min_new_tokens": length}
                out = self._model.generate(
                    ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0, **limits
                )
                assert out.shape[1] == width + length
        return [request.num_output for request in workload.requests]


class ContinuousBatches(_Transformers):
    """One manager for the whole process. Its thread runs the steps."""

    def __init__(self, path: Path, workload: Workload, batch_size: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(path, workload, batch_size)
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=KV_TOKENS // PAGE_TOKENS,
            max_batch_tokens=512,
            max_requests_per_batch=batch_size,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        generation = GenerationConfig(do_sample=False, max_new_tokens=16, eos_token_id=-1, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self._manager.start()
        self._num_requests = 0

    def generate(self, workload: Workload) -> list[int]:
        first = self._num_requests
        self._num_requests += len(workload.requests)
        for number, request in enumerate(workload.requests, first):
            self._manager.add_request(
                request.prompt, request_id=str(number), max_new_tokens=request.num_output, eos_token_id=-1
            )
        counts: dict[int, int] = {}
        while len(counts) < len(workload.requests):
            output = self._manager.get_result(timeout=1)
            if output is None:
                assert self._manager.is_running(), "the thread of continuous batching has ended"
            elif output.error:
                raise SystemExit(f"a request has failed: {output.error}")
            elif output.is_finished():
                counts[int(output.request_id)] = len(output.generated_tokens)
        return [counts[number] for number in range(first, self._num_requests)]


def _load(path: Path, workload: Workload, batch_size: int, is_continuous: bool = False) -> runner.Engine:
    return (ContinuousBatches if is_continuous else StaticBatches)(path, workload, batch_size)


if __name__ == "__main__":
    runner.run(_load)
