"""transformers: `generate` on static batches, greedy and on the CPU, or its continuous batching."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import runner
from benchmarks.workloads import Request, Workload

PAGE_TOKENS = 32
KV_TOKENS = 65_536


class StaticBatches(runner.Engine):
    """Prompts are padded on the left. A batch runs until its longest request has ended; tokens past a request's own length
    are not counted."""

    packages = ("transformers", "torch")

    def __init__(self, path: Path, workload: Workload, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, workload.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
        self._batch_size = batch_size

    def generate(self, requests: Sequence[Request]) -> list[int]:
        for begin in range(0, len(requests), self._batch_size):
            self._generate_batch(requests[begin : begin + self._batch_size])
        return [request.num_output for request in requests]

    def _generate_batch(self, requests: Sequence[Request]) -> None:
        import torch

        width = max(len(request.prompt) for request in requests)
        length = max(request.num_output for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **options)
        assert out.shape[1] == width + length


class ContinuousBatches(StaticBatches):
    """One manager for the whole process. Its thread runs the steps."""

    def __init__(
        self,
        path: Path,
        workload: Workload,
        batch_size: int,
        device: str = "cpu",
        temperature: float = 0.0,
        limit_s: float = math.inf,
    ) -> None:
        """`limit_s`: after which requests are cancelled. The tokens that they have got count."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        super().__init__(path, workload, batch_size)
        self._limit_s, self.is_complete = limit_s, limit_s == math.inf
        self._model.to(device)
        sizes: dict[str, Any] = {}  # on a GPU transformers chooses its own, and captures graphs
        if device == "cpu":
            # transformers 5.17, the oldest supported version, has the older name.
            size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
            sizes = {size: PAGE_TOKENS, "num_blocks": KV_TOKENS // PAGE_TOKENS, "max_batch_tokens": 512}
            sizes |= {"use_cuda_graph": False, "use_async_batching": False}
        config = ContinuousBatchingConfig(max_requests_per_batch=batch_size, **sizes)
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        generation = GenerationConfig(**draw, max_new_tokens=16, eos_token_id=-1, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self._manager.start()
        self._num_requests = 0

    def generate(self, requests: Sequence[Request]) -> list[int]:
        names = [str(self._num_requests + number) for number in range(len(requests))]
        self._num_requests += len(requests)
        for name, request in zip(names, requests, strict=True):
            # With streaming each token yields an output, which takes far less than a step.
            options = {"max_new_tokens": request.num_output, "eos_token_id": -1, "streaming": not self.is_complete}
            self._manager.add_request(request.prompt, request_id=name, **options)
        counts, running, end_s = dict.fromkeys(names, 0), set(names), time.monotonic() + self._limit_s
        while running and time.monotonic() < end_s:
            output = self._manager.get_result(timeout=1)
            if output is None:
                assert self._manager.is_running(), "the thread of continuous batching has ended"
            elif output.error:
                raise SystemExit(f"a request has failed: {output.error}")
            elif output.request_id in counts:
                counts[output.request_id] = len(output.generated_tokens)
                if output.is_finished():
                    running.discard(output.request_id)
        for name in running:
            self._manager.cancel_request(name)
        return list(counts.values())


def _load(path: Path, workload: Workload, is_continuous: bool, **options: Any) -> runner.Engine:
    return (ContinuousBatches if is_continuous else StaticBatches)(path, workload, **options)


if __name__ == "__main__":
    runner.run(_load)
