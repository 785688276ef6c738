"""Tests that need a GPU: its memory is released, a long prompt stays within the profiled memory, and no step waits."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from millrace.executor.wire.messages import NewSequence, RowSampling, SeqId, StepId, StepPlan, StepRow
from millrace.worker.host_tier import HostBlocks
from millrace.worker.rank import Rank
from tests.worker.driver import GREEDY, Driver, execute, pool_bytes, start_worker
from tests.worker.models import VOCAB_SIZE, make_model
from tests.worker.test_batch_invariant import check_bits
from tests.worker.test_no_waiting import BLOCKS_PER_SEQUENCE, CPU, NUM_STEPS, ROWS, make_runner, run_ahead

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

MIB = 1 << 20
LONGEST = 32768
CHUNK = 2048
POSITIONS: dict[str, Any] = {
    "max_position_embeddings": LONGEST,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def feed(worker: Rank, step_id: int, tokens: list[int], start: int = 0, num_tokens: int | None = None) -> list[int]:
    """Run one row of one sequence, from `start`, in consecutive blocks. Return its token, if it yields one."""
    size = worker._config.block_size
    end = len(tokens) if num_tokens is None else start + num_tokens
    blocks = list(range(1 + -(-start // size), 1 + -(-end // size)))
    new = [NewSequence(SeqId(1), tokens, len(tokens), GREEDY)] if start == 0 else []
    row = StepRow(SeqId(1), start, end - start, blocks)
    num_sampled = int(end == len(tokens))
    plan = StepPlan(StepId(step_id), worker._epoch, 1, end - start, num_sampled, [row], new)
    return execute(worker, plan).token_ids


def test_blocks_move_to_pinned_memory_and_back_in_the_order_of_the_stream() -> None:
    parts = [torch.randn(1900, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    before = [part.clone() for part in parts]
    tier = HostBlocks(parts, 2000)
    assert tier._blocks.is_pinned()
    out = [(block, 2 * block % 1999) for block in range(1, 900)]
    tier.swap_out(out)
    for part in parts:
        part[1:900].zero_()
    tier.swap_in([(host_block, 1899 - block) for block, host_block in out])
    for part, kept in zip(parts, before, strict=True):
        assert torch.equal(part[1000:1899].flip(0), kept[1:900])
        assert torch.equal(part[900:1000], kept[900:1000])
    assert 0 < tier.measure() < 1
    blocks = tier._blocks
    del tier
    assert not blocks.is_pinned()


@pytest.mark.gpu_memory
@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_that_sleeps_gives_pool_and_weights_back(level: int, tmp_path: Path) -> None:
    make_model("qwen3", tmp_path, intermediate_size=1 << 16)  # 150 MB of weights
    worker = start_worker(tmp_path, device="cuda", num_blocks=None, kv_cache_memory_bytes=1024 * MIB)
    prompt = list(range(1, 40))
    before = feed(worker, 1, prompt)
    held = pool_bytes(worker) + worker._model.facts.weight_bytes
    assert held > 1150 * MIB
    free_awake = torch.cuda.mem_get_info()[0]
    worker.sleep(level)
    assert torch.cuda.mem_get_info()[0] - free_awake > held - 32 * MIB
    worker.wake_up(["weights", "kv_cache"], 2)
    assert feed(worker, 2, prompt) == before
    worker.shutdown()


@pytest.mark.gpu_memory
def test_the_end_of_a_long_prompt_takes_no_more_than_was_profiled(tmp_path: Path) -> None:
    make_model("llama", tmp_path, **POSITIONS)
    share = 0.15
    worker = start_worker(
        tmp_path,
        device="cuda",
        attention="reference",  # which takes memory for the scores of a chunk
        block_size=16,
        num_blocks=None,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=CHUNK // 2,  # so many that they can use all the share
        gpu_memory_utilization=share,
    )
    free, total = torch.cuda.mem_get_info()
    used_by_others = total - free - torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    prompt = [index % VOCAB_SIZE for index in range(LONGEST)]
    for number, start in enumerate(range(0, LONGEST, CHUNK), 1):
        yielded = feed(worker, number, prompt, start, CHUNK)
    assert len(yielded) == 1
    held = pool_bytes(worker)
    assert held > share * total - 4096 * MIB, "the profile takes more than a long prompt needs"
    assert torch.cuda.max_memory_allocated() - held > 1024 * MIB, "the prompt is too short to show anything"
    assert torch.cuda.max_memory_allocated() + used_by_others <= share * total + 16 * MIB
    worker.shutdown()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(name: str, dtype: str, tmp_path: Path) -> None:
    check_bits(name, tmp_path, device="cuda", dtype=dtype)


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize(("name", "batch_invariant"), [("qwen3", False), ("gemma3_text", False), ("gemma3_text", True)])
def test_graphs_yield_the_tokens_of_eager_steps(
    name: str, batch_invariant: bool, is_idle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are captured in the steps, and those that are captured before."""
    monkeypatch.setattr("millrace.worker.graphs.CAPTURE_PAUSE_STEPS", 0)
    make_model(name, tmp_path)
    prompts = [[index, index + 1, index + 2] for index in range(1, 21)]
    kinds = [GREEDY, *(RowSampling(0.9, top_k, 0.9, 0.0, 7, 0, 0, []) for top_k in (0, 20)), ROWS["penalties"]]
    sampling = [kinds[index % (4 if index < 4 else 3)] for index in range(len(prompts))]
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 24, "num_blocks": 500}
    options["batch_invariant"] = batch_invariant
    expected: list[list[int]] = []
    found: list[list[int]] = []
    for enforce_eager, outputs in ((True, expected), (False, found)):
        worker = start_worker(tmp_path, enforce_eager=enforce_eager, **options)
        driver = Driver(worker, 1, preempts=False, num_blocks=500, keeps_logits=False)
        runner = worker.runner
        assert runner is not None and (runner._graphs is None) == enforce_eager
        while is_idle and worker.has_idle_work:
            worker.do_idle_work()
        outputs += [request.output for request in driver.run(prompts, 30, sampling)]
        if runner._graphs is not None:
            assert {kind.num_rows for kind in runner._graphs.kinds} >= {1, 2, 4, 8, 16, 24}
            assert {kind.draws for kind in runner._graphs.kinds} == {True, False}
            assert {kind.is_decode for kind in runner._graphs.kinds} == {True, False}
        worker.shutdown()
    assert found == expected


@pytest.fixture
def options_afterwards() -> Iterator[None]:
    yield
    importlib.import_module("millrace.worker.launch_triton").launch_options.cache_clear()


@pytest.mark.usefixtures("options_afterwards")
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 12])
def test_kernels_that_start_before_earlier_ones_have_ended_change_no_bit(
    num_rows: int, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 4 rows all products are Triton's; of more rows they are torch's, which wait for all that is before them."""
    launch_triton = importlib.import_module("millrace.worker.launch_triton")
    monkeypatch.setattr("millrace.worker.graphs.CAPTURE_PAUSE_STEPS", 0)
    make_model("qwen3", tmp_path, max_position_embeddings=512)
    rows = [ROWS["random" if index % 3 else "logprobs"] for index in range(num_rows)]
    options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 1 + (num_rows + 1) * BLOCKS_PER_SEQUENCE}
    outputs = []
    for least in (launch_triton.LEAST_CAPABILITY, sys.maxsize):
        monkeypatch.setattr(launch_triton, "LEAST_CAPABILITY", least)
        launch_triton.launch_options.cache_clear()
        worker = start_worker(tmp_path, device="cuda", max_num_seqs=16, enforce_eager=enforce_eager, **options)
        assert worker.runner is not None
        outputs.append([(each.token_ids, each.logprobs) for each in run_ahead(worker.runner, rows, 40)])
        worker.shutdown()
    assert outputs[0] == outputs[1]


@pytest.fixture
def default_afterwards() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("default_afterwards")
@pytest.mark.parametrize("name", [*ROWS, "all"])
def test_a_step_does_not_wait_for_the_device(name: str) -> None:
    rows = list(ROWS.values()) if name == "all" else [ROWS[name], GREEDY]
    num_steps = NUM_STEPS if name in ("all", "penalties") else 12
    expected = run_ahead(make_runner(CPU), rows, num_steps)
    run_ahead(make_runner(torch.device("cuda")), rows)  # compiles the kernels
    runner = make_runner(torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    results = run_ahead(runner, rows, num_steps)
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]


@pytest.mark.usefixtures("default_afterwards")
@pytest.mark.parametrize("kind", ["plain", "random", "penalties"])
def test_a_step_of_a_model_does_not_wait_for_the_device(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.worker.graphs.CAPTURE_PAUSE_STEPS", 0)
    make_model("qwen3", tmp_path, max_position_embeddings=512)
    rows = [ROWS[kind], structs.replace(GREEDY, temperature=0.9)]
    outputs: list[list[list[int]]] = []
    for is_checked in (False, True):  # the first run compiles kernels
        runner = start_worker(tmp_path, device="cuda", num_blocks=1000).runner
        assert runner is not None and runner._graphs is not None
        if is_checked:
            torch.cuda.set_sync_debug_mode("error")
        outputs.append([each.token_ids for each in run_ahead(runner, rows)])
        assert runner._graphs.kinds, "no step was a graph"
    assert outputs[0] == outputs[1]
