"""What a rank's own process leaves out of transformers, and that models still load there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.models import make_model

MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(("arch", "changes"), [("llama", {}), ("gemma3_text", {}), ("qwen3", MOE)])
def test_a_rank_finds_a_model_without_the_names_of_all_models(
    arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make_model(arch, tmp_path, **changes)
    script = f"""
from millrace.executor.wire.messages import WorkerConfig
from millrace.worker import create_worker, import_modules
import_modules()
import gc, transformers
assert "LlamaForCausalLM" not in dir(transformers), "all models were listed"
assert gc.isenabled() and gc.get_freeze_count() > 0
facts = create_worker(0, 1, 1, WorkerConfig(model={str(tmp_path)!r}, device="cpu"), "").start(lambda _: None)
assert facts.weight_bytes > 0
from transformers import PreTrainedTokenizerFast
from transformers.models.mistral import MistralForCausalLM
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
