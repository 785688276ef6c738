"""Models whose layers attend to the last positions only: tokens are those of `transformers`, and blocks are given back."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from millrace import LLM, SamplingParams
from tests.e2e.models import Oracle, assert_equal_where_sure, make_prompts, make_servable

WINDOW = 12
MAX_TOKENS = 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},  # all layers
    "gemma2": {"num_hidden_layers": 4},  # every other layer
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None},  # all but each sixth layer
    "qwen2": {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 3},  # the last layer
}
FEW_BLOCKS = {"mistral": 26, "gemma2": 52, "gemma3_text": 100, "qwen2": 150}
SHARED = make_prompts(1, seed=9, longest=1)[0] * 40 + make_prompts(30, seed=8)[0]
PROMPTS = [SHARED + prompt for prompt in make_prompts(6, seed=4)] + make_prompts(3, seed=5, longest=100)
OPTIONS: dict[str, Any] = {"device": "cpu", "executor": "uni", "dtype": "float32", "block_size": 4, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_servable(name, root, sliding_window=WINDOW, **changes) for name, changes in MODELS.items()}


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    """By model: tokens of the plain path, compared with those of `transformers`."""
    tokens: dict[str, list[list[int]]] = {}
    for name, path in models.items():
        with LLM(path, **OPTIONS, enable_prefix_caching=False) as llm:
            tokens[name] = generate(llm)
        assert_equal_where_sure(Oracle(path), PROMPTS, tokens[name], MAX_TOKENS)
    return tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("run_ahead", "caching", "is_short"), list(product((False, True), repeat=3)))
def test_tokens_are_the_same_however_the_steps_are_planned(
    name: str,
    run_ahead: bool,
    caching: bool,
    is_short: bool,
    models: dict[str, Path],
    expected: dict[str, list[list[int]]],
) -> None:
    """`is_short`: of memory, and of tokens in a step, so prompts are cut into chunks. Sequences are preempted then, unless
    all layers have windows: such a sequence hardly needs more than at its admission."""
    few: dict[str, Any] = {"num_blocks": FEW_BLOCKS[name], "max_num_batched_tokens": 16} if is_short else {}
    with LLM(models[name], **OPTIONS, run_ahead=run_ahead, enable_prefix_caching=caching, **few) as llm:
        assert generate(llm) == expected[name]
        if caching:
            assert generate(llm) == expected[name]
        assert (llm.stats().num_preemptions > 0) == (is_short and name != "mistral")


def test_a_pool_that_holds_the_window_serves_a_sequence_of_any_length(models: dict[str, Path]) -> None:
    path, prompts = models["mistral"], make_prompts(3, seed=6, longest=400)
    with LLM(path, **OPTIONS, num_blocks=9, max_num_batched_tokens=16) as llm:
        outputs = generate(llm, prompts)
    assert max(map(len, prompts)) > 20 * WINDOW
    assert_equal_where_sure(Oracle(path), prompts, outputs, MAX_TOKENS)
