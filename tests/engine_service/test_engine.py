"""The engine over real worker processes that run the stub: losses, restarts, quarantine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.engine_service.core.scheduler import Scheduler, SchedulerConfig
from millrace.engine_service.core.sequence import Sequence, StopReason
from millrace.engine_service.engine import Engine, Progress
from millrace.engine_service.errors import ConfigurationError, EngineDead, WorkersLost
from millrace.engine_service.generation import Generation, TextRules
from millrace.executor.base import Executor
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.calls import PendingCall
from millrace.executor.wire.channel import Channel
from millrace.executor.wire.messages import FromWorker, StepPlan, WorkerConfig
from tests.engine_service.core.integrity import check_scheduler
from tests.engine_service.core.sequences import assert_complete_logprobs, make_sequence, stub_output
from tests.executor.kinds import STUB
from tests.executor.stub import StubWorker

Build = Callable[..., Engine]

stages = pytest.mark.parametrize("num_stages", [1, 2])


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    monkeypatch.setattr("millrace.engine_service.worker_group.RESTART_BACKOFF_S", (0.0, 0.0, 0.0))
    engines: list[Engine] = []

    def make(
        faults: str = "",
        kind: type[Executor] = MultiprocExecutor,
        num_blocks: int = 64,
        worker_module: str = STUB,
        run_ahead: bool | None = None,
        is_pool_automatic: bool = False,
        **options: int,
    ) -> Engine:
        config = WorkerConfig(model=faults, num_blocks=num_blocks, block_size=4, **options)  # type: ignore[arg-type]
        executor = kind(config, worker_module=worker_module)
        limits = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, run_ahead=run_ahead, is_pool_automatic=is_pool_automatic
        )
        engines.append(Engine(executor, limits))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def generation(seq_id: int, prompt_len: int = 5, max_tokens: int = 12, **options: Any) -> Generation:
    sequence = make_sequence(seq_id, prompt_len, max_tokens, **options)
    return Generation(sequence, TextRules(is_text_wanted=False), tokenizer=None)


def run(engine: Engine, generations: list[Generation]) -> list[Progress]:
    """All that ended, in order."""
    for one in generations:
        engine.add(one)
    ended: list[Progress] = []
    for _ in range(500):
        if not engine.has_work:
            return ended
        ended += [one for one in engine.step() if one.finish_reason or one.failure]
        check_scheduler(engine.scheduler)
    raise AssertionError(f"not done: {engine}")


def assert_undisturbed(generations: list[Generation]) -> None:
    for one in generations:
        sequence: Sequence = one.sequence
        assert one.token_ids == stub_output(sequence.prompt_token_ids, sequence.stop_rules.max_tokens)


@pytest.mark.parametrize("kind", [UniprocExecutor, MultiprocExecutor])
def test_a_batch_runs_to_its_end(build: Build, kind: type[Executor]) -> None:
    engine = build(kind=kind)
    engine.start()
    generations = [generation(number) for number in range(1, 12)]
    ended = run(engine, generations)
    assert {one.finish_reason for one in ended} == {"length"}
    assert len(ended) == 11
    assert_undisturbed(generations)


@pytest.mark.parametrize("kind", [UniprocExecutor, MultiprocExecutor])
def test_the_time_without_work_is_not_the_hosts(build: Build, kind: type[Executor]) -> None:
    engine = build(kind=kind, run_ahead=False)
    engine.start()
    run(engine, [generation(1)])
    dropped = generation(2)
    engine.add(dropped)
    engine.step()
    engine.step()
    engine.abort(dropped)
    run(engine, [generation(3)])
    figures = engine.metrics().executor
    assert figures.host_s.count == figures.num_steps - 3, "all but the first step of each"


@stages
def test_a_worker_that_dies_in_a_step_is_replaced_and_the_output_is_the_same(
    build: Build, tmp_path: Path, num_stages: int
) -> None:
    engine = build(f"die-at-step=6,once={tmp_path / 'died'}", pipeline_parallel_size=num_stages)
    engine.start()
    generations = [generation(number) for number in range(1, 6)]
    run(engine, generations)
    assert_undisturbed(generations)


@pytest.mark.parametrize("kind", [UniprocExecutor, MultiprocExecutor])
def test_a_step_that_raises_is_done_again_by_a_fresh_worker(build: Build, kind: type[Executor], tmp_path: Path) -> None:
    engine = build(f"raise-at-step=6,once={tmp_path / 'raised'}", kind=kind)
    engine.start()
    generations = [generation(number) for number in range(1, 6)]
    run(engine, generations)
    assert_undisturbed(generations)


@stages
def test_a_poisonous_prompt_is_quarantined_alone(build: Build, num_stages: int) -> None:
    generations = [generation(number) for number in range(1, 6)]
    poison = generations[3]
    engine = build(f"die-on-token={poison.sequence.prompt_token_ids[-1]}", pipeline_parallel_size=num_stages)
    engine.start()
    ended = run(engine, generations)
    failed = [one for one in ended if one.failure is not None]
    assert [one.generation for one in failed] == [poison]
    assert failed[0].failure is not None
    assert failed[0].failure.kind == "crashed"
    assert_undisturbed([one for one in generations if one is not poison])


@stages
def test_log_probabilities_that_exceed_a_reply_are_spread_over_steps(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    monkeypatch.setattr("millrace.executor.wire.channel.MAX_MESSAGE_BYTES", 2**14)
    monkeypatch.setattr("millrace.engine_service.core.planned_step.MAX_RECORD_BYTES", 2**13)
    engine = build(pipeline_parallel_size=num_stages)
    engine.start()
    generations = [generation(number, 20, logprobs=300, prompt_logprobs=300) for number in range(1, 7)]
    run(engine, [*generations, generation(7)])
    assert_undisturbed(generations)
    for one in generations:
        assert_complete_logprobs(one.sequence)
    assert engine.metrics().executor.num_restarts == 0


@pytest.mark.parametrize(("kind", "num_stages"), [(UniprocExecutor, 1), (MultiprocExecutor, 1), (MultiprocExecutor, 2)])
def test_a_sequence_waits_for_its_grammar_and_others_go_on(
    build: Build, kind: type[Executor], num_stages: int, tmp_path: Path
) -> None:
    engine = build(kind=kind, pipeline_parallel_size=num_stages)
    engine.start()
    (tmp_path / "known").touch()
    slow = [generation(number, grammar=str(tmp_path / "slow")) for number in (1, 2)]
    others = [generation(3), generation(4, grammar=str(tmp_path / "known")), generation(5, max_tokens=30)]
    for one in (*slow, *others[:1], *others[2:]):
        engine.add(one)
    run_until(engine, lambda: others[0].finish_reason is not None)
    engine.add(others[1])  # announced behind the slow one
    run_until(engine, lambda: others[2].finish_reason is not None)
    engine.abort(slow[1])
    assert engine.has_work
    assert not slow[0].token_ids
    for _ in range(3):
        assert engine.step() == []
    (tmp_path / "slow").touch()
    run_until(engine, lambda: not engine.has_work)
    assert_undisturbed([slow[0], *others])
    assert not slow[1].token_ids
    again = generation(6, grammar=str(tmp_path / "slow"))
    run(engine, [again])
    assert_undisturbed([again])


def test_new_workers_compile_the_grammars_of_all_sequences_anew(build: Build, tmp_path: Path) -> None:
    engine = build()
    engine.start()
    grammar = tmp_path / "grammar"
    grammar.touch()
    bound = [generation(number, grammar=str(grammar), max_tokens=30) for number in (1, 2)]
    free = generation(3, max_tokens=60)
    for one in (*bound, free):
        engine.add(one)
    run_until(engine, lambda: all(one.token_ids for one in bound))
    grammar.unlink()
    executor = engine._executor
    assert isinstance(executor, MultiprocExecutor)
    os.kill(executor.worker_pids()[0], signal.SIGKILL)
    run_until(engine, lambda: free.finish_reason is not None)
    assert not any(one.finish_reason for one in bound)
    grammar.touch()
    run_until(engine, lambda: not engine.has_work)
    assert_undisturbed([*bound, free])


def run_until(engine: Engine, is_reached: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_reached():
            return
        engine.step()
        check_scheduler(engine.scheduler)
    raise AssertionError(f"not reached: {engine}")


def test_workers_that_die_without_end_stop_the_engine(build: Build) -> None:
    engine = build("die-at-step=1")
    engine.start()
    generations = [generation(number) for number in range(1, 9)]
    with pytest.raises(EngineDead, match="one token"):
        run(engine, generations)
    assert all(one.finish_reason is None for one in generations)


def test_a_worker_that_dies_while_idle_is_replaced_by_the_next_check(build: Build) -> None:
    engine = build()
    engine.start()
    executor = engine._executor
    assert isinstance(executor, MultiprocExecutor)
    os.kill(executor.worker_pids()[0], signal.SIGKILL)
    assert executor._handles[0].wait(60)
    engine.check_workers()
    generations = [generation(1)]
    run(engine, generations)
    assert_undisturbed(generations)


def test_a_start_that_can_never_work_is_not_tried_again(build: Build) -> None:
    with pytest.raises(ConfigurationError, match="load_model"):
        build("raise-at-start").start()


def test_a_start_that_is_killed_every_time_gives_up(build: Build) -> None:
    with pytest.raises(EngineDead, match="do not start"):
        build("die-at-start").start()


def test_a_worker_that_exits_in_a_start_without_a_message_is_tried_again(build: Build, tmp_path: Path) -> None:
    """Also in mid-life: it is a crash, not a wrong configuration."""
    engine = build(f"exit-at-start,once={tmp_path / 'done'}")
    engine.start()
    (tmp_path / "done").unlink()
    executor = engine._executor
    assert isinstance(executor, MultiprocExecutor)
    os.kill(executor.worker_pids()[0], signal.SIGKILL)
    generations = [generation(1)]
    run(engine, generations)
    assert_undisturbed(generations)


def test_the_context_is_what_the_pool_can_hold(build: Build) -> None:
    assert build(num_blocks=11).start().max_model_len == 40


@stages
def test_an_aborted_generation_gives_its_blocks_back(build: Build, num_stages: int) -> None:
    engine = build(pipeline_parallel_size=num_stages)
    engine.start()
    aborted, kept = generation(1, max_tokens=50), generation(2)
    engine.add(aborted)
    engine.add(kept)
    engine.step()
    engine.abort(aborted)
    engine.abort(aborted)
    while engine.has_work:
        engine.step()
    assert_undisturbed([kept])
    assert engine.scheduler.stats().pool.num_free == 63


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_stage_of_a_pipeline_has_work_and_the_next_step_waits_for_it(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_stages: int, run_ahead: bool
) -> None:
    plans: list[StepPlan] = []
    execute_model = MultiprocExecutor.execute_model

    def note(executor: MultiprocExecutor, plan: StepPlan) -> PendingCall:
        plans.append(plan)
        return execute_model(executor, plan)

    monkeypatch.setattr(MultiprocExecutor, "execute_model", note)
    engine = build(pipeline_parallel_size=num_stages, run_ahead=run_ahead)
    engine.start()
    generations = [generation(number) for number in range(1, 9)]
    run(engine, generations)
    assert_undisturbed(generations)
    most, num_steps = num_stages + run_ahead, 12 * num_stages
    assert [plan.depth for plan in plans] == [*range(1, most), *[most] * (num_steps - most + 1)]
    assert {plan.num_sampled for plan in plans} == {8 // num_stages}


def test_steps_in_flight_are_collected_before_the_engine_sleeps(build: Build) -> None:
    engine = build(pipeline_parallel_size=2)
    engine.start()
    generations = [generation(number) for number in range(1, 5)]
    for one in generations:
        engine.add(one)
    engine.step()
    engine.sleep(1)
    engine.wake_up()
    run(engine, [])
    assert_undisturbed(generations)
    assert engine.metrics().executor.num_restarts == 0


def test_a_pipeline_that_runs_out_of_memory_starts_anew_and_nobody_is_blamed(build: Build) -> None:
    engine = build("most-tokens=20", pipeline_parallel_size=2)
    engine.start()
    generations = [generation(number, prompt_len=10) for number in range(1, 9)]
    run(engine, generations)
    assert_undisturbed(generations)
    assert engine.metrics().executor.num_restarts > 0
    assert all(one.sequence.crash_count == 0 for one in generations)


@stages
def test_after_an_interruption_the_engine_can_be_used_again(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    engine = build(pipeline_parallel_size=num_stages)
    engine.start()
    for first_id, method in ((1, "execute_model"), (11, "process_messages")):
        with monkeypatch.context() as patch:
            patch.setattr(MultiprocExecutor, method, interrupt)
            run_into_interruption(engine, first_id)
    run_undisturbed(engine)
    assert engine.metrics().executor.num_restarts == 0


def run_into_interruption(engine: Engine, first_id: int = 1) -> None:
    """Four generations, given up when the interruption has come."""
    interrupted = [generation(number) for number in range(first_id, first_id + 4)]
    with pytest.raises(KeyboardInterrupt):
        run(engine, interrupted)
    for one in interrupted:
        engine.abort(one)


def run_undisturbed(engine: Engine) -> None:
    generations = [generation(number) for number in range(21, 25)]
    run(engine, generations)
    assert_undisturbed(generations)


@stages
@pytest.mark.parametrize("moment", ["send", "receive"])
def test_ranks_that_an_interruption_left_out_of_step_are_replaced(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_stages: int, moment: str
) -> None:
    """The last rank has not got what the others have, or a reply of it has been taken in and is in nobody's hands."""
    send, receive = Channel.send, Channel.receive

    def send_to_all_but_the_last(channel: Channel, rank: int, payload: bytes) -> None:
        if rank == num_stages - 1:
            raise KeyboardInterrupt
        send(channel, rank, payload)

    def receive_and_stop(channel: Channel) -> Iterator[tuple[int, FromWorker]]:
        for _ in receive(channel):
            raise KeyboardInterrupt
        yield from ()

    engine = build(pipeline_parallel_size=num_stages)
    engine.start()
    with monkeypatch.context() as patch:
        patch.setattr(Channel, moment, {"send": send_to_all_but_the_last, "receive": receive_and_stop}[moment])
        run_into_interruption(engine)
    run_undisturbed(engine)
    assert engine.metrics().executor.num_restarts == 1


@stages
def test_an_interruption_while_a_step_is_taken_in_costs_no_later_one(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    engine = build(pipeline_parallel_size=num_stages)
    engine.start()
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "apply", interrupt)
        run_into_interruption(engine)
    run_undisturbed(engine)


@stages
def test_an_interruption_between_two_sequences_of_a_step_leaves_none_behind(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    engine = build(pipeline_parallel_size=num_stages)
    engine.start()
    generations = [generation(number) for number in range(1, 7)]
    append, num_calls = Sequence.append, 0

    def append_one(sequence: Sequence, token_id: int) -> StopReason | None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt
        return append(sequence, token_id)

    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "append", append_one)
        with pytest.raises(KeyboardInterrupt):
            run(engine, generations)
    check_scheduler(engine.scheduler)
    assert len(run(engine, [])) == len(generations)
    assert_undisturbed(generations)


def test_a_step_that_hangs_in_this_process_is_unhealthy_within_seconds(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(kind=UniprocExecutor)
    engine.start()
    run(engine, [generation(1)])
    launch, reasons = StubWorker.launch, []

    def check_meanwhile(worker: StubWorker, plan: StepPlan) -> None:
        reasons.append([engine.unhealthy_reason(time.monotonic() + seconds) for seconds in (0, 9, 11)])
        launch(worker, plan)

    monkeypatch.setattr(StubWorker, "launch", check_meanwhile)
    run(engine, [generation(2, max_tokens=1)])
    assert reasons == [[None, None, "a step has lasted 11 s"]]


def test_what_workers_are_to_forget_outlives_an_interruption(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    engine.start()
    first = [generation(1, max_tokens=1), generation(2, max_tokens=20)]
    for one in first:
        engine.add(one)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(MultiprocExecutor, "execute_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort(first[1])
    run(engine, [generation(number) for number in range(21, 25)])
    engine.add(generation(30, max_tokens=2))
    engine.step()
    (stats,) = engine._executor.worker_stats()
    assert stats["num_sequences"] == 1


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_lost_workers_of_a_draining_engine_are_not_replaced(build: Build) -> None:
    engine = build()
    engine.start()
    engine.add(generation(1, max_tokens=50))
    engine.step()
    engine.begin_drain()
    executor = engine._executor
    assert isinstance(executor, MultiprocExecutor)
    os.kill(executor.worker_pids()[0], signal.SIGKILL)
    with pytest.raises(WorkersLost, match="SIGKILL"):
        run(engine, [])
    engine.check_workers()
    assert engine.metrics().executor.num_restarts == 0
