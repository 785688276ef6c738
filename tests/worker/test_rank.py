"""A rank from start to shutdown, its KV pool, and unusual plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from millrace.engine_service.build import build_executor
from millrace.engine_service.config import EngineConfig
from millrace.engine_service.engine import Engine
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import (
    NO_TOKEN,
    NewSequence,
    RowSampling,
    SeqId,
    StepId,
    StepPlan,
    StepRow,
    WorkerConfig,
)
from millrace.worker import create_worker
from millrace.worker.errors import ConfigError, ModelError, PlanError, StepSkipped
from millrace.worker.fusion.workspace import Workspace
from millrace.worker.rank import Rank
from millrace.worker.runner import LaunchedStep, StepOutput, largest_prefill
from millrace.worker.sampler import sample
from tests.worker.driver import GREEDY, Driver, execute, host_tier_bytes, num_sequences, pool_bytes, start_worker
from tests.worker.models import make_model
from tests.worker.rows import sampling_rows
from tests.worker.test_cgroup import write_files

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path)
    return path


def new(seq_id: int = 0, tokens: list[int] = PROMPT, sampling: RowSampling = GREEDY) -> NewSequence:
    return NewSequence(SeqId(seq_id), tokens, len(PROMPT), sampling)


def prefill(seq_id: int = 0, blocks: tuple[int, ...] = (3, 1), count: int = len(PROMPT)) -> StepRow:
    return StepRow(SeqId(seq_id), 0, count, list(blocks))


def run(
    worker: Rank, step_id: int, rows: list[StepRow], num_decodes: int = 0, **changes: Any
) -> tuple[list[int], list[str]]:
    """Run a step. `num_decodes`: the decode rows that go on."""
    num_tokens = num_decodes + sum(row.num_tokens for row in rows)
    result = execute(worker, StepPlan(StepId(step_id), 1, 1, num_tokens, num_tokens, rows, **changes))
    assert (result.step_id, result.epoch) == (step_id, 1)
    return result.token_ids, [failure.kind for failure in result.failures]


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, millrace.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_rank_announces_its_phases_and_lives_to_its_shutdown(model: Path) -> None:
    worker = create_worker(0, 1, 1, WorkerConfig(model=str(model), device="cpu", num_blocks=10), "")
    phases: list[str] = []
    worker.start(phases.append)
    assert phases == ["device", "load_model"]
    with pytest.raises(PlanError, match="no KV pool yet"):
        execute(worker, StepPlan(StepId(1), 1, 1, 0, 0))
    assert worker.determine_num_available_blocks() == (10, 0)
    worker.initialize_cache(10, 0)
    worker.check_health()
    assert isinstance(worker, Rank) and worker._pool is not None and worker._pool.num_blocks == 10
    worker.shutdown()


def test_plans_of_another_epoch_are_refused(model: Path) -> None:
    worker = start_worker(model)
    with pytest.raises(PlanError, match="epoch 2, this rank is in epoch 1"):
        execute(worker, StepPlan(StepId(1), 2, 1, 0, 0))


def test_swaps_are_refused_without_a_host_tier(model: Path) -> None:
    worker = start_worker(model)
    for plan in (
        StepPlan(StepId(1), 1, 1, 0, 0, swap_in=[(0, 1)]),
        StepPlan(StepId(1), 1, 1, 0, 0, swap_out=[(1, 0)]),
    ):
        with pytest.raises(PlanError, match="no host memory tier"):
            execute(worker, plan)


def test_a_block_comes_back_from_the_host_tier_as_it_was(model: Path) -> None:
    expected = generate_swapped(start_worker(model), swaps=False)
    worker = start_worker(model, swap_space_bytes=1 << 20, force_swap=True)
    assert generate_swapped(worker, swaps=True) == expected
    assert 0 < host_tier_bytes(worker) <= 1 << 20
    worker.sleep(1)
    assert host_tier_bytes(worker) == 0
    worker.wake_up(["weights", "kv_cache"], 1)
    assert generate_swapped(worker, swaps=True) == expected


def generate_swapped(worker: Rank, *, swaps: bool) -> list[int]:
    """Compute a prompt of two blocks. `swaps`: move them to other blocks, through the host tier, while another prompt takes
    their own. Return the next tokens."""
    tokens, _ = run(worker, 1, [prefill()], new=[new()])
    if swaps:
        other: dict[str, Any] = {"new": [new(1, tokens=[1, 2, 3, 4, 5])], "finished": [0], "swap_out": [(3, 0), (1, 7)]}
        run(worker, 2, [prefill(1)], **other)
        row = StepRow(SeqId(0), len(PROMPT), 1, [5, 8])
        plan: dict[str, Any] = {"new": [new(0, tokens=PROMPT + tokens)], "finished": [1], "swap_in": [(7, 8), (0, 5)]}
        tokens += run(worker, 3, [row], **plan)[0]
    else:
        tokens += run(worker, 2, [], num_decodes=1)[0]
    return tokens + run(worker, 4, [], num_decodes=1, finished=[])[0]


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (100, r"swap_space_gib is 9\.31322575e-08 = 100 bytes, but one KV block has 3,072 bytes: raise it"),
        (
            1 << 60,
            r"swap_space_gib is 1\.07\d+e\+09 = 1,152,921,504,606,846,976 bytes for each rank, but this",
        ),
    ],
)
def test_a_host_tier_that_cannot_be_is_refused_with_the_arithmetic(model: Path, num_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_worker(model, swap_space_bytes=num_bytes, force_swap=True)


def test_on_a_cpu_a_host_tier_is_ignored_and_the_log_says_so(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = start_worker(model, swap_space_bytes=1 << 20)
    assert host_tier_bytes(worker) == 0
    assert "swap_space_gib is ignored" in caplog.text


def test_an_empty_plan_is_answered(model: Path) -> None:
    worker = start_worker(model)
    assert run(worker, 1, []) == ([], [])
    assert run(worker, 2, [prefill()], new=[new()])[1] == []
    assert num_sequences(worker) == 1
    assert run(worker, 3, [], finished=[0]) == ([], [])
    assert num_sequences(worker) == 0


def test_what_was_never_here_can_be_forgotten(model: Path) -> None:
    """The plan that was to bring it may have been interrupted."""
    worker = start_worker(model)
    assert run(worker, 1, [prefill()], finished=[5], new=[new()])[1] == []
    assert run(worker, 2, [], num_decodes=1, finished=[5])[1] == []
    assert num_sequences(worker) == 1


def test_a_rank_whose_rows_are_not_the_engines_refuses_the_step(model: Path) -> None:
    worker = start_worker(model)
    run(worker, 1, [prefill()], new=[new()])
    with pytest.raises(PlanError, match="step 2 has 2 tokens, but this rank has 1"):
        run(worker, 2, [], num_decodes=2)


def test_a_row_that_feeds_unknown_tokens_is_refused(model: Path) -> None:
    with pytest.raises(AssertionError, match="5 tokens are known"):
        run(start_worker(model), 1, [prefill(count=7)], new=[new()])


def test_a_row_without_a_block_is_refused(model: Path) -> None:
    with pytest.raises(AssertionError, match="without a block"):
        run(start_worker(model), 1, [prefill(blocks=(3,))], new=[new()])


def test_a_paused_row_goes_on_where_it_stopped(model: Path) -> None:
    undisturbed = Driver(start_worker(model), 1, preempts=False).run([PROMPT], 3)[0].output
    worker = start_worker(model)
    outputs = run(worker, 1, [prefill()], new=[new()])[0]
    assert run(worker, 2, [], paused=[0]) == ([], [])
    outputs += run(worker, 3, [StepRow(SeqId(0), 5, 1, [])])[0]
    outputs += run(worker, 4, [], num_decodes=1)[0]
    assert outputs == undisturbed


def test_a_step_may_feed_tokens_that_nobody_has_collected(model: Path) -> None:
    undisturbed = Driver(start_worker(model), 1, preempts=False).run([PROMPT], 4)[0].output
    worker = start_worker(model)
    worker.launch(StepPlan(StepId(1), 1, 1, 5, 1, [prefill()], [new()]))
    for step_id in (2, 3, 4):
        worker.launch(StepPlan(StepId(step_id), 1, 2, 1, 1))
    assert [worker.collect().token_ids[0] for _ in range(4)] == undisturbed


def test_after_a_failed_step_those_that_were_planned_before_it_was_known_are_skipped(model: Path) -> None:
    worker = start_worker(model)
    worker.launch(StepPlan(StepId(1), 1, 1, 5, 1, [prefill()], [new()]))
    with pytest.raises(PlanError, match="step 2 has 9 tokens"):
        worker.launch(StepPlan(StepId(2), 1, 2, 9, 1))
    assert len(worker.collect().token_ids) == 1, "the step before the failed one is good"
    with pytest.raises(StepSkipped):
        worker.launch(StepPlan(StepId(3), 1, 2, 1, 1))
    with pytest.raises(StepSkipped):
        worker.collect()
    assert len(run(worker, 4, [prefill()], finished=[0], new=[new()])[0]) == 1


def test_a_preempted_sequence_returns_in_the_plan_that_ends_it(model: Path) -> None:
    worker = start_worker(model)
    outputs = run(worker, 1, [prefill()], new=[new()])[0]
    outputs += run(worker, 2, [], num_decodes=1)[0]
    again = new(tokens=PROMPT + outputs)
    resumed = run(worker, 3, [prefill(blocks=(7, 2), count=7)], finished=[0], new=[again])[0]
    undisturbed = Driver(start_worker(model), 1, preempts=False).run([PROMPT], 3)[0].output
    assert outputs + resumed == undisturbed


def test_copied_blocks_hold_the_same_keys_and_values(model: Path) -> None:
    worker = start_worker(model)
    first = run(worker, 1, [prefill(blocks=(3, 1))], new=[new()])[0]
    expected = run(worker, 2, [], num_decodes=1, copy=[(3, 11), (1, 12)])[0]
    # A second sequence starts from copies of the first one's blocks, which were made after the step.
    actual = run(worker, 3, [StepRow(SeqId(1), 5, 1, [11, 12])], paused=[0], new=[new(1, PROMPT + first)])[0]
    assert actual == expected


def test_a_row_without_finite_logits_fails_alone_and_stays_failed(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    worker = start_worker(tmp_path)
    poison = 500
    worker._model.module.model.embed_tokens.weight[poison] = float("nan")
    healthy = Driver(start_worker(tmp_path), 1, preempts=False).run([PROMPT], 4)[0].output
    rows = [prefill(0, (3, 1)), prefill(1, (5, 6, 7), count=8)]
    tokens, failures = run(worker, 1, rows, new=[new(0), new(1, [1, 2, poison, 3, 4, 5, 6, 7])])
    assert (tokens, failures) == ([healthy[0], NO_TOKEN], ["nan_logits"])
    # The next plans were already under way when the row failed.
    assert run(worker, 2, [], num_decodes=2) == ([healthy[1], NO_TOKEN], ["nan_logits"])
    assert run(worker, 3, [], num_decodes=1, paused=[0]) == ([NO_TOKEN], ["nan_logits"])
    # Its blocks hold NaN, and do no harm to the next owner.
    rows = [prefill(2, (5, 6)), StepRow(SeqId(0), 6, 1, [])]
    assert run(worker, 4, rows, finished=[1], new=[new(2)]) == ([healthy[0], healthy[2]], [])
    assert run(worker, 5, [], num_decodes=1, paused=[0]) == ([healthy[1]], [])


def test_more_sequences_than_promised_are_taken(model: Path) -> None:
    worker = start_worker(model, max_num_seqs=1)
    blocks = [(2 * index + 1, 2 * index + 2) for index in range(5)]
    rows = [prefill(index, blocks[index]) for index in range(5)]
    tokens, _ = run(worker, 1, rows, new=[new(index) for index in range(5)])
    assert len(set(tokens)) == 1


def test_seeded_draws_do_not_depend_on_chunks_or_neighbours(model: Path) -> None:
    sampling = [RowSampling(1.0, 0, 1.0, 0.0, seed, 0, 0, []) for seed in range(4)]
    prompts = [[*PROMPT, index] for index in range(4)]
    together = Driver(start_worker(model), 1).run(prompts, 10, sampling)
    for index in range(4):
        alone = Driver(start_worker(model), 2 + index).run([prompts[index]], 10, [sampling[index]])[0]
        assert alone.output == together[index].output
        rows = sampling_rows([(sampling[index], position) for position in range(10)])
        assert sample(torch.stack(alone.logits), rows).tolist() == alone.output


def blocks_of(model: Path, **options: object) -> int:
    worker = Rank(0, 1, 1, WorkerConfig(model=str(model), device="cpu", **options))  # type: ignore[arg-type]
    worker.start(lambda _: None)
    return worker.determine_num_available_blocks()[0]


def test_the_pool_is_sized_by_what_the_configuration_says(model: Path) -> None:
    block_bytes = 16 * 3 * 2 * 2 * 16 * 4
    assert blocks_of(model, num_blocks=7, kv_cache_memory_bytes=1 << 30) == 7
    assert blocks_of(model, kv_cache_memory_bytes=100 * block_bytes + 5) == 100
    assert blocks_of(model, max_num_seqs=8) == 8 * 512 // 16 + 1
    assert blocks_of(model, max_num_seqs=8, max_model_len=20) == 8 * 2 + 1


@pytest.mark.parametrize(
    ("max_num_seqs", "num_tokens", "purpose"),
    [
        (2, 2 * 4096, "for 2 sequences of 4096 tokens"),
        (8, 8 * 4096, "for 8 sequences of 4096 tokens"),
        (63, 8 * 4096, "for 8 sequences of 4096 tokens"),
        (65, 65 * 512, "for 65 sequences of 512 tokens"),
    ],
)
def test_the_default_pool_holds_the_usual_sequences_and_some_of_the_longest(
    max_num_seqs: int, num_tokens: int, purpose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen2", tmp_path, max_position_embeddings=4096)
    block_bytes = 16 * 3 * 2 * 2 * 16 * 4
    worker = Rank(0, 1, 1, WorkerConfig(model=str(tmp_path), device="cpu", max_num_seqs=max_num_seqs))
    worker.start(lambda _: None)
    monkeypatch.setattr("millrace.worker.kv_budget.free_host_bytes", lambda: 1 << 34)
    assert worker.determine_num_available_blocks()[0] == num_tokens // 16 + 1
    assert worker.stats()["pool_budget"].endswith(f" MiB of host memory, {purpose}")
    monkeypatch.setattr("millrace.worker.kv_budget.free_host_bytes", lambda: 400 * block_bytes)
    assert worker.determine_num_available_blocks()[0] == 100
    assert worker.stats()["pool_budget"].endswith(
        f", 25 % of the free memory over all ranks, less than {purpose[4:]} need"
    )


def test_the_default_pool_leaves_most_of_the_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 16 * 3 * 2 * 2 * 16 * 4
    monkeypatch.setattr("millrace.worker.kv_budget.free_host_bytes", lambda: 400 * block_bytes)
    assert blocks_of(model, max_num_seqs=256) == 100


def test_a_pool_too_small_for_one_sequence_is_refused_with_numbers(model: Path) -> None:
    block_bytes = 16 * 3 * 2 * 2 * 16 * 4
    with pytest.raises(
        ModelError, match=r"one sequence of 500 tokens needs a KV pool of 33 blocks x 12,288 bytes = .* at most 144"
    ):
        blocks_of(model, kv_cache_memory_bytes=10 * block_bytes, max_model_len=500)
    with pytest.raises(ModelError, match="and 100 are available: give the pool more memory"):
        blocks_of(model, kv_cache_memory_bytes=100)
    for options in {"num_blocks": 1 << 30}, {"kv_cache_memory_bytes": 1 << 50}:
        with pytest.raises(
            ConfigError, match=r"blocks x 12,288 bytes = [\d,]+ bytes is larger than the [\d,]+ bytes of memory"
        ):
            blocks_of(model, **options)
    with pytest.raises(ConfigError, match="at least 2"):
        blocks_of(model, num_blocks=1)
    wanted = (
        r"num_blocks: \(10 - 1\) blocks x 16 tokens in 1 .* hold 144 tokens .* max_model_len = 500 .* at least 33, "
    )
    with pytest.raises(ConfigError, match=wanted):
        blocks_of(model, num_blocks=10, max_model_len=500)


def test_a_pool_larger_than_the_memory_of_the_container_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.worker.cgroup.ROOT", tmp_path)
    write_files(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(1 << 30)})
    write_files(tmp_path, {"sys/fs/cgroup/memory.current": "0"})
    with pytest.raises(ConfigError, match=r"is larger than the 1,073,741,824 bytes of memory of this cpu"):
        blocks_of(model, num_blocks=(1 << 30) // 12288 + 1)


def test_sequences_end_where_the_pool_does_unless_their_length_was_asked_for(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = 10 * 16 * 3 * 2 * 2 * 16 * 4
    config = EngineConfig(model=str(model), device="cpu", kv_cache_memory=memory)
    engine = Engine(build_executor(config, model, is_service=False), config.for_scheduler())
    assert engine.start().max_model_len == engine.facts.max_model_len == 144
    assert "the KV pool holds 144 tokens, so sequences end there and not at the model's 512" in caplog.text
    engine.shutdown()


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_the_profiled_step_is_as_heavy_as_a_step_can_be(attention: str, model: Path) -> None:
    plan = largest_prefill(KVLayout(4, max_step_tokens=100), max_num_seqs=6, longest=500)
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(405, 95), *[(0, 1)] * 5]
    assert [len(row.new_blocks) for row in plan.rows] == [125, *[1] * 5]
    worker = start_worker(model, num_blocks=2, attention=attention)
    assert worker.runner is not None
    worker.runner.launch(plan)
    assert len(worker.runner.collect().token_ids) == 6


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["allocator", "driver", "cublas", "host"],
)
def test_a_step_without_memory_leaves_no_larger_buffers(
    error: Exception, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else smaller steps had less memory than before it."""
    worker = start_worker(model, num_blocks=40)
    assert worker.runner is not None and worker.runner.decoder is not None
    workspace, rows = worker.runner.decoder._workspace, Workspace.rows
    num_made = workspace.num_made
    small, large = (largest_prefill(KVLayout(4, max_step_tokens=size), 1, longest=size) for size in (20, 100))

    def short_rows(workspace: Workspace, name: str, num_rows: int, *shape: Any) -> torch.Tensor:
        if name == "activated" and num_rows > 64:
            raise error
        return rows(workspace, name, num_rows, *shape)

    monkeypatch.setattr(Workspace, "rows", short_rows)
    worker.runner.launch(small)
    expected = worker.runner.collect().token_ids
    kept = dict(workspace._buffers)
    with pytest.raises(type(error)):
        worker.runner.launch(structs.replace(large, finished=[SeqId(0)]))
    assert kept and not workspace._buffers and workspace.num_made > num_made
    worker.runner.launch(structs.replace(small, finished=[SeqId(0)]))
    assert worker.runner.collect().token_ids == expected
    assert {key: buffer.shape for key, buffer in workspace._buffers.items()} == {
        key: buffer.shape for key, buffer in kept.items()
    }


def test_the_profiled_step_of_short_sequences_is_as_large_as_a_step_can_be() -> None:
    plan = largest_prefill(KVLayout(4, max_step_tokens=100), max_num_seqs=6, longest=60)
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(0, 60), (0, 36), *[(0, 1)] * 4]


@pytest.mark.gpu
@pytest.mark.gpu_memory
def test_the_gpu_pool_fills_the_share_that_it_may_take(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make_model("llama", tmp_path, max_position_embeddings=1 << 18)  # 256 such sequences can use all the memory
    worker = Rank(0, 1, 1, WorkerConfig(model=str(tmp_path), device="cuda", gpu_memory_utilization=0.3))
    worker.start(lambda _: None)
    worker.initialize_cache(*worker.determine_num_available_blocks())
    total = torch.cuda.mem_get_info()[1]
    assert 0.2 * total < pool_bytes(worker) < 0.3 * total
    assert run(worker, 1, [prefill(blocks=(1,))], new=[new()])[1] == []


class LostEvent:
    """An event of a device that is lost."""

    def query(self) -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    synchronize = query


def test_a_step_on_a_lost_device_is_ready_and_its_result_is_the_error() -> None:
    output, lost = StepOutput(torch.zeros(1)), LostEvent()
    step = LaunchedStep(StepPlan(StepId(1), 1, 1, 1, 1), None, None, output, lost, lost, 0.0)  # type: ignore[arg-type]
    assert step.is_ready()
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        step.result()
