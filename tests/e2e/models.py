"""Random-weight models with the tiny model's tokenizer, and the reference outputs of `transformers`."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.e2e.engines import TINY
from tests.worker.models import VOCAB_SIZE, make_model

MARGIN = 1e-3
"""If the best two logits are closer than this, rounding decides, and the comparison ends there."""


@cache
def make_servable(arch: str, directory: Path, **changes: Any) -> Path:
    """Return the directory of a new model of this family, ready to be served."""
    path = directory / arch
    make_model(arch, path, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, path / name)
    return path


def make_prompts(num_prompts: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Return prompts of mixed lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, longest))] for _ in range(num_prompts)]


class Oracle:
    """Generates greedily with `transformers`, one prompt at a time, in float32."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Return the tokens, and how many of them do not depend on rounding."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best_two = torch.stack(output.logits).squeeze(1).topk(2).values
        is_close = (best_two[:, 0] - best_two[:, 1]) < MARGIN
        num_sure = int(is_close.nonzero()[0]) if is_close.any() else len(is_close)
        return output.sequences[0, len(prompt) :].tolist(), num_sure


def assert_equal_where_sure(
    oracle: Oracle, prompts: list[list[int]], outputs: list[list[int]], max_tokens: int
) -> None:
    """Check every output up to the first token that depends on rounding, and that most tokens were compared."""
    num_compared = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, num_sure = oracle.generate(prompt, max_tokens)
        assert len(output) == max_tokens
        assert output[:num_sure] == expected[:num_sure]
        num_compared += num_sure
    assert num_compared > 0.5 * max_tokens * len(prompts)
