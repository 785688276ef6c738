"""Greedy tokens are those of `transformers`, however the batch is formed."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace import LLM, Client, GenerationRequest, SamplingParams
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S
from tests.e2e.models import Oracle, assert_equal_where_sure, make_prompts, make_servable

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma3_text"]
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_in_batches_of_mixed_lengths_with_chunked_prefill(arch: str, models: Path) -> None:
    path, prompts = make_servable(arch, models), make_prompts(12)
    with LLM(path, device="cpu", executor="uni", max_num_batched_tokens=16, block_size=4, max_num_seqs=8) as llm:
        outputs = tokens_of(llm, prompts)
    assert_equal_where_sure(Oracle(path), prompts, outputs, MAX_TOKENS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_with_a_pool_so_small_that_sequences_are_preempted(arch: str, models: Path) -> None:
    path, prompts = make_servable(arch, models), make_prompts(8, seed=1, longest=30)
    num_blocks = 80 if arch == "gemma3_text" else 30  # its three groups of layers each take blocks of their own
    with LLM(path, device="cpu", executor="uni", block_size=4, num_blocks=num_blocks, max_model_len=100) as llm:
        outputs = tokens_of(llm, prompts)
        assert llm.stats().num_preemptions > 0
    assert_equal_where_sure(Oracle(path), prompts, outputs, MAX_TOKENS)


def test_in_a_worker_process(models: Path) -> None:
    path, prompts = make_servable("llama", models), make_prompts(8, seed=2)
    with LLM(path, device="cpu", executor="mp", max_num_batched_tokens=24) as llm:
        outputs = tokens_of(llm, prompts)
    assert_equal_where_sure(Oracle(path), prompts, outputs, MAX_TOKENS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_through_redis(arch: str, models: Path, start_engine: StartEngine, client: Client) -> None:
    path, prompts = make_servable(arch, models), make_prompts(12, seed=3)
    start_engine("--max-num-batched-tokens", "32", "--block-size", "4", "--num-blocks", "80", model=path)
    ids = client.submit_many(GenerationRequest(prompt_token_ids=prompt, sampling=GREEDY) for prompt in prompts)
    outputs = [client.wait(job_id, LIMIT_S).token_ids for job_id in ids]
    assert_equal_where_sure(Oracle(path), prompts, outputs, MAX_TOKENS)
