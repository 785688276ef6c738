"""The log-probabilities of a batch are those of a plain forward pass over each of its sequences."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from millrace.executor.wire.messages import RowSampling
from tests.worker.driver import GREEDY, Driver, start_worker
from tests.worker.logprobs import WANTED, check_logprobs, with_logprobs
from tests.worker.models import VOCAB_SIZE, make_model

LENGTHS = (1, 5, 16, 30, 47, 70, 71)
NOT_BELOW = 4
DRAWN = RowSampling(0.8, 0, 0.95, 0.0, 7, 0, NOT_BELOW, list(range(100)))
"""Temperature, top-p and forbidden ids change the draw, and not the log-probabilities."""


def generate(path: Path, sampling: list[RowSampling], **options: Any) -> Driver:
    source = random.Random(3)
    prompts = [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    driver = Driver(start_worker(path, **options), seed=1)
    check_logprobs(path, driver.run(prompts, 8, sampling))
    return driver


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_rows_with_and_without_log_probabilities_share_a_batch(arch: str, attention: str, tmp_path: Path) -> None:
    make_model(arch, tmp_path)
    sampling = [with_logprobs(DRAWN if row % 2 else GREEDY, *wanted) for row, wanted in enumerate(WANTED)]
    assert generate(tmp_path, sampling, attention=attention).num_preemptions > 3


def test_all_ids_of_the_vocabulary_and_more_tokens_than_are_scored_at_once(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    generate(tmp_path, [with_logprobs(GREEDY, VOCAB_SIZE, VOCAB_SIZE)] * len(LENGTHS))


@pytest.mark.parametrize(
    "overrides",
    [
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
        {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 32},
        {"model_type": "gpt_neox", "rope_parameters": None},
        {"model_type": "granite", "logits_scaling": 0.5, "rope_parameters": None},
        {"model_type": "cohere", "logit_scale": 0.3, "rope_parameters": None},
    ],
    ids=lambda overrides: overrides["model_type"],
)
def test_prompts_of_models_whose_head_expects_other_layers(overrides: dict[str, Any], tmp_path: Path) -> None:
    make_model("llama", tmp_path, **overrides)
    generate(tmp_path, [with_logprobs(GREEDY, *wanted) for wanted in WANTED])


def test_a_model_whose_head_does_not_run_alone_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model("llama", tmp_path)
    with caplog.at_level(logging.INFO), patch("millrace.worker.logprobs._HiddenStates", side_effect=TypeError("no")):
        worker = start_worker(tmp_path)
    assert not worker._model.facts.scores_prompts
    assert (
        "LlamaForCausalLM has no log-probabilities of prompts, since its head does not run alone: TypeE" in caplog.text
    )
    assert start_worker(tmp_path)._model.facts.scores_prompts


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make_model("llama", tmp_path)
    sampling = [with_logprobs(DRAWN if row % 2 else GREEDY, *wanted) for row, wanted in enumerate(WANTED)]
    generate(tmp_path, sampling, device="cuda", dtype="float32")
