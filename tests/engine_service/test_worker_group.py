"""An engine with less memory or fewer ranks than it asked for, and an engine that sleeps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from millrace.engine_service.core.token_budget import FLOOR_TOKENS, GROW_EVERY_STEPS, TokenBudget
from millrace.engine_service.engine import Engine
from millrace.engine_service.errors import Asleep, EngineDead, EngineError
from millrace.executor.base import Executor
from millrace.executor.errors import WorkerDied
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.sizes import smaller_sizes, why_impossible
from tests.engine_service.core.integrity import check_scheduler
from tests.engine_service.test_engine import Build, assert_undisturbed, build, generation, run

__all__ = ["build"]

both_kinds = pytest.mark.parametrize("kind", [UniprocExecutor, MultiprocExecutor])


# --- memory ---


@both_kinds
def test_a_step_that_runs_out_of_memory_is_done_again_in_smaller_ones(build: Build, kind: type[Executor]) -> None:
    engine = build("most-tokens=20", kind=kind)
    engine.start()
    generations = [generation(number, prompt_len=10) for number in range(1, 9)]
    run(engine, generations)
    assert_undisturbed(generations)
    figures = engine.metrics()
    assert (figures.executor.num_restarts, figures.token_budget) == (0, FLOOR_TOKENS)
    assert all(one.sequence.crash_count == 0 for one in generations)


@pytest.mark.parametrize(("is_automatic", "most_cached"), [(True, 14), (False, 62)])
def test_cached_prompts_fill_a_quarter_of_an_automatic_pool_on_a_cpu(
    build: Build, is_automatic: bool, most_cached: int
) -> None:
    engine = build(kind=UniprocExecutor, is_pool_automatic=is_automatic)
    engine.start()
    for number in range(1, 41):  # one after the other
        run(engine, [generation(number, prompt_len=12, max_tokens=4)])
    stats = engine.scheduler.stats().pool
    assert (stats.num_free, stats.num_cached) == (63, most_cached)
    generations = [generation(number, prompt_len=20, max_tokens=8) for number in range(41, 49)]
    run(engine, generations)  # 8 x 7 blocks at the same time
    assert_undisturbed(generations)
    assert engine.scheduler.stats().num_preemptions == 0


def test_without_memory_for_the_smallest_step_the_engine_ends(build: Build) -> None:
    engine = build("most-tokens=0")
    engine.start()
    with pytest.raises(EngineDead):
        run(engine, [generation(1)])


def test_a_rank_that_does_not_come_out_of_it_is_restarted(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.engine._HEALTH_CHECK_S", 0.5)
    fault = f"oom-at-step=3,on-rank=1,once={tmp_path / 'done'},barrier={tmp_path}"
    engine = build(fault, tensor_parallel_size=2)
    engine.start()
    generations = [generation(number) for number in range(1, 4)]
    run(engine, generations)
    assert_undisturbed(generations)
    assert engine.metrics().executor.num_restarts == 1


def test_the_budget_halves_and_grows_back_slowly() -> None:
    budget = TokenBudget(2048)
    assert budget.shrink(1000)
    assert budget.tokens == 500
    for _ in range(GROW_EVERY_STEPS):
        budget.count_good_step()
    assert budget.tokens == 625
    while budget.shrink(budget.tokens):
        pass
    assert budget.tokens == FLOOR_TOKENS
    for _ in range(30 * GROW_EVERY_STEPS):
        budget.count_good_step()
    assert budget.tokens == 2048


# --- ranks ---


def test_when_a_rank_does_not_come_back_fewer_do_the_work(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.worker_group.GROW_AFTER_S", 0.0)
    engine = build(f"never-start-rank=1,unless={tmp_path / 'back'}", tensor_parallel_size=2)
    engine.start()
    generations = [generation(number) for number in range(1, 4)]
    run(engine, generations)
    assert_undisturbed(generations)
    figures = engine.metrics().executor
    assert (figures.world_size, figures.wanted_world_size) == (1, 2)
    (tmp_path / "back").touch()
    engine.check_workers()
    assert engine.metrics().executor.world_size == 2
    more = [generation(number) for number in range(4, 7)]
    run(engine, more)
    assert_undisturbed(more)


def test_a_rank_that_is_lost_in_a_step_and_stays_away_costs_nobody_a_token(build: Build, tmp_path: Path) -> None:
    """The file that lets rank 1 start is taken away once it has."""
    (allowed := tmp_path / "allowed").touch()
    engine = build(
        f"never-start-rank=1,unless={allowed},die-at-step=4,on-rank=1,barrier={tmp_path}", tensor_parallel_size=2
    )
    engine.start()
    allowed.unlink()
    generations = [generation(number) for number in range(1, 4)]
    run(engine, generations)
    assert_undisturbed(generations)
    assert engine.metrics().executor.world_size == 1


def test_one_rank_alone_has_nothing_to_fall_to(build: Build) -> None:
    engine = build("die-at-start")
    with pytest.raises(EngineDead):
        engine.start()


FRAGILE = "tests.executor.fragile_worker"


def kill_rank(engine: Engine, rank: int) -> None:
    executor = engine._executor
    assert isinstance(executor, MultiprocExecutor)
    os.kill(executor.worker_pids()[rank], signal.SIGKILL)
    assert executor._handles[rank].wait(60)


def test_what_fewer_ranks_refuse_is_no_wrong_option(build: Build, tmp_path: Path) -> None:
    """What was asked for has worked: the engine ends by the loss that has made it small."""
    (allowed := tmp_path / "allowed").touch()
    engine = build(f"never-start-rank=1,unless={allowed},fewest-ranks=2", worker_module=FRAGILE, tensor_parallel_size=2)
    engine.start()
    allowed.unlink()
    kill_rank(engine, 1)
    with pytest.raises(EngineDead, match=r"rank 1 .* SIGKILL.*; with fewer ranks: .* does not fit on 1") as caught:
        engine.check_workers()
    assert caught.value.cause == "error"


def test_what_fewer_ranks_refuse_in_the_first_start_is_no_wrong_option_either(build: Build) -> None:
    engine = build("oom-at-start,on-rank=1,fewest-ranks=2", worker_module=FRAGILE, tensor_parallel_size=2)
    with pytest.raises(EngineDead, match=r"no memory.*; lower kv_cache_memory, .* a smaller model$") as caught:
        engine.start()
    assert caught.value.cause == "out_of_memory"


@both_kinds
def test_options_that_have_worked_once_are_not_to_blame_later(
    build: Build, kind: type[Executor], tmp_path: Path
) -> None:
    (broken := tmp_path / "broken").touch()
    engine = build(f"raise-at-start,once={broken}", kind=kind)
    engine.start()
    broken.unlink()
    with pytest.raises(EngineDead, match=r"load_model: .* told to raise"):
        engine._workers.restart(WorkerDied(0, "for a test"))


@both_kinds
def test_a_gpu_that_is_gone_after_the_start_is_a_lost_device_and_no_reason_to_take_the_cpu(
    build: Build, kind: type[Executor], tmp_path: Path
) -> None:
    engine = build(f"lose-gpu={tmp_path / 'gone'}", kind=kind, worker_module=FRAGILE)
    assert engine.start().device == "cuda:0"
    with pytest.raises(EngineDead, match="torch sees no GPU for cuda") as caught:
        engine._workers.restart(WorkerDied(0, "for a test"))
    assert caught.value.cause == "device_lost"


def test_sizes_to_fall_to_begin_with_the_largest_and_divide_the_heads_as_before() -> None:
    assert smaller_sizes(4, 2) == [(4, 1), (2, 2), (2, 1), (1, 2), (1, 1)]
    assert smaller_sizes(1, 1) == []


def test_impossible_sizes_are_refused_with_what_would_work() -> None:
    model = {"num_heads": 8, "num_kv_heads": 4, "num_layers": 6}
    assert why_impossible(4, 6, **model) is None
    assert "one of 1, 2, 4, got 3" in str(why_impossible(3, 1, **model))
    assert "at most" in str(why_impossible(1, 7, **model))


# --- sleep ---


@both_kinds
def test_after_a_nap_everything_goes_on_where_it_was(build: Build, kind: type[Executor]) -> None:
    engine = build(kind=kind)
    engine.start()
    generations = [generation(number) for number in range(1, 4)]
    for one in generations:
        engine.add(one)
    for _ in range(3):
        engine.step()
    engine.sleep(1)
    with pytest.raises(Asleep):
        engine.step()
    engine.wake_up()
    check_scheduler(engine.scheduler)
    while engine.has_work:
        engine.step()
    assert_undisturbed(generations)
    assert all(one.sequence.crash_count == 0 for one in generations)


@pytest.mark.parametrize("is_asleep", [True, False])
def test_workers_that_come_back_with_other_weights_end_the_engine(
    build: Build, tmp_path: Path, is_asleep: bool
) -> None:
    (weights := tmp_path / "weights").write_text("as they were")
    engine = build(f"weights={weights}", tensor_parallel_size=2)
    engine.start()
    one = generation(1)
    engine.add(one)
    engine.step()
    if is_asleep:
        engine.sleep(1)
    weights.write_text("noise")
    kill_rank(engine, 1)
    with pytest.raises(EngineDead, match="rank 0: the weights are not what they were"):
        go_on(engine)
    with pytest.raises(EngineDead, match="rank 0: the weights are not what they were"):
        engine.check_workers()
    weights.write_text("as they were")
    engine.check_workers()
    run(engine, [])
    assert_undisturbed([one])


def go_on(engine: Engine) -> None:
    engine.wake_up()
    run(engine, [])


def test_weights_are_compared_with_those_that_were_divided_by_the_same_sizes(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.worker_group.GROW_AFTER_S", 0.0)
    (weights := tmp_path / "weights").write_text("as they were")
    (allowed := tmp_path / "allowed").touch()
    engine = build(f"weights={weights},never-start-rank=1,unless={allowed}", tensor_parallel_size=2)
    engine.start()
    allowed.unlink()
    kill_rank(engine, 0)
    engine.check_workers()
    assert engine.metrics().executor.world_size == 1
    allowed.touch()
    engine.check_workers()
    assert engine.metrics().executor.world_size == 2


def test_a_rank_that_dies_falling_asleep_is_replaced(build: Build, tmp_path: Path) -> None:
    engine = build(f"die-at-sleep,once={tmp_path / 'died'}")
    engine.start()
    with pytest.raises(EngineError, match="restarted"):
        engine.sleep()
    generations = [generation(1)]
    run(engine, generations)
    assert_undisturbed(generations)
