"""A real shortage of GPU memory while an engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace import LLM
from millrace.producer import SamplingParams
from tests.worker.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_memory,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

MIB = 1 << 20
LEFT_BYTES = 640 * MIB
"""A step of 2,048 tokens needs several times 512 MiB for the intermediate values of an MLP."""


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_step_that_runs_out_of_a_gpus_memory_is_done_in_smaller_ones(executor: str, tmp_path: Path) -> None:
    make_model("llama", tmp_path, intermediate_size=1 << 16)
    prompts = [[(7 * number + index) % 500 for index in range(256)] for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    # Without graphs: one of 2,048 tokens would be captured before the memory is short.
    options: dict[str, Any] = {"dtype": "float32", "executor": executor, "num_blocks": 256, "enforce_eager": True}
    with LLM(tmp_path, device="cuda", **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.metrics().token_budget == 2048
        # The worker's allocator keeps freed memory until the worker sleeps.
        llm.sleep(1)
        llm.wake_up()
        ballast = torch.empty(torch.cuda.mem_get_info()[0] - LEFT_BYTES, dtype=torch.uint8, device="cuda")
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        del ballast
        torch.cuda.empty_cache()
        figures = llm.metrics()
        assert outputs == expected
        assert figures.token_budget < 2048, "it was not short enough"
        assert figures.executor.num_restarts == 0
