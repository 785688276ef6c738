from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine_service.core import planned_step
from millrace.engine_service.core.block_pool import BlockPool
from millrace.engine_service.core.crash_policy import QUARANTINE_AFTER_CRASHES
from millrace.engine_service.core.host_tier import HostTier
from millrace.engine_service.core.scheduler import Scheduler, SchedulerConfig
from millrace.engine_service.core.sequence import Sequence
from millrace.executor.wire.kv_layout import KVLayout
from millrace.executor.wire.messages import (
    NO_TOKEN,
    RowFailure,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
    WorkerConfig,
    record_bytes,
)
from tests.engine_service.core.integrity import check_scheduler
from tests.engine_service.core.sequences import assert_complete_logprobs, make_sequence, stub_output
from tests.executor.stub import OutOfMemoryError, StubWorker

BLOCK_SIZE = 4
OPERATIONS = [
    "add",
    "add",
    "fork",
    "send",
    "send",
    "collect",
    "step",
    "step",
    "remove",
    "lose",
    "give up",
    "fail",
    "reset",
]


class Bench:
    """A scheduler with the checking stub as its worker. Results come back when they are collected."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 32,
        num_stages: int = 1,
        *,
        run_ahead: bool = False,
        enable_prefix_caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
        num_host_blocks: int = 0,
        swap_s: float = 0.0,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.num_host_blocks = num_host_blocks
        self.layout = KVLayout(BLOCK_SIZE, windows, budget)
        self.num_stages = num_stages
        self.seconds_of: Callable[[StepPlan], float] = lambda plan: 0.0
        """How long the worker says that it took."""
        self.has_failed = False
        """Whether a step has failed since the last plan. The workers may not have applied what it said."""
        self.run_ahead = run_ahead
        self.in_flight: deque[StepResult] = deque()
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, enable_prefix_caching=enable_prefix_caching
        )
        pool = BlockPool(num_blocks, self.layout, host=HostTier(num_host_blocks, swap_s))
        self.scheduler = Scheduler(config, pool, epoch=1)
        self.plans: list[StepPlan] = []
        self.rows: list[list[StepRow]] = []
        """By plan: all rows, also the decode rows that go on."""
        self.start_worker()

    def start_worker(self) -> None:
        model = "candidates-differ,windows=" + "/".join(str(window or 0) for window in self.layout.windows)
        self.worker = StubWorker(self.scheduler.epoch, WorkerConfig(model=model, block_size=BLOCK_SIZE))
        self.worker.initialize_cache(self.num_blocks, self.num_host_blocks)

    def send(self) -> StepPlan | None:
        plan = self.schedule()
        if plan is not None:
            assert self.has_failed or set(plan.finished) <= self.worker._sequences.keys(), (
                "workers pass over such ids; the scheduler has no reason to"
            )
            self.has_failed = False
            self.in_flight.append(self.execute(plan))
            assert plan.depth == len(self.in_flight) <= self.num_stages + self.run_ahead
            assert max(plan.num_tokens, plan.num_sampled) <= self.scheduler.token_budget.tokens
            assert len(self.rows[-1]) <= self.scheduler.stats().num_running <= self.max_num_seqs
        check_scheduler(self.scheduler)
        return plan

    def schedule(self) -> StepPlan | None:
        return self.scheduler.schedule(self.num_stages, run_ahead=self.run_ahead)

    def execute(self, plan: StepPlan) -> StepResult:
        self.worker.launch(plan)
        self.plans.append(plan)
        self.rows.append(self.worker.last_rows)
        result = self.worker.collect()
        assert sum(map(len, result.logprobs + result.prompt_logprobs)) <= vars(planned_step)["MAX_RECORD_BYTES"]
        return msgspec.structs.replace(result, device_s=self.seconds_of(plan))

    def collect(self) -> None:
        if self.in_flight:
            self.scheduler.apply(self.in_flight.popleft())
        check_scheduler(self.scheduler)

    def step(self) -> StepPlan | None:
        """Send what may be in flight, and take in the oldest result; returns what was sent first."""
        first = self.send()
        while self.send():
            pass
        self.collect()
        return first

    def give_up(self) -> None:
        """The next step runs out of memory, and those in flight are given up."""
        plan = self.schedule()
        if plan is not None:
            self.worker._faults["most-tokens"] = 0
            with pytest.raises(OutOfMemoryError):
                self.worker.launch(plan)
            del self.worker._faults["most-tokens"]
            self.corrupt_swapped(plan)
            while (skipped := self.schedule()) is not None:
                with pytest.raises(ValueError, match="an earlier step has failed"):
                    self.worker.launch(skipped)
        self.has_failed = True
        self.in_flight.clear()
        self.scheduler.requeue_in_flight()

    def corrupt_swapped(self, plan: StepPlan) -> None:
        """The step failed while it copied the blocks: nobody knows what they hold."""
        for _, host_block in plan.swap_out:
            self.worker._host[host_block] = dict.fromkeys(range(BLOCK_SIZE), 0)
        for _, device_block in plan.swap_in:
            self.worker._slots |= {(device_block, offset): 0 for offset in range(BLOCK_SIZE)}

    def fail_row(self) -> Sequence | None:
        """A row of the oldest step in flight has no finite logit: neither it nor what it wrote is of use."""
        if not self.in_flight or not self.in_flight[0].token_ids:
            return None
        result = self.in_flight.popleft()
        failed = self.scheduler._in_flight[0].sampled[0]
        failure = RowFailure(failed.seq_id, "nan_logits", "")
        self.scheduler.apply(
            msgspec.structs.replace(result, token_ids=[NO_TOKEN, *result.token_ids[1:]], failures=[failure])
        )
        computed = failed.block_hashes[failed.num_hit_columns :]
        assert not any(self.scheduler.pool.cache.contains(block_hash) for block_hash in computed)
        return failed

    def lose_step(self) -> list[Sequence]:
        """The workers die in the middle of the next step, and of those in flight."""
        self.schedule()
        self.in_flight.clear()
        quarantined = self.scheduler.restart(self.scheduler.epoch + 1)
        self.start_worker()
        return quarantined

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler}")


def assert_undisturbed(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        num_tokens, candidate = sequence.stop_rules.max_tokens, sequence.sampling.candidate
        assert sequence.output_token_ids == stub_output(sequence.prompt_token_ids, num_tokens, candidate)
        assert_complete_logprobs(sequence)


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks() -> None:
    bench = Bench(budget=8)
    sequence = make_sequence(1, prompt_len=20, max_tokens=3)
    bench.scheduler.add(sequence)
    bench.send()
    bench.collect()
    assert bench.scheduler.stats().num_prompt_tokens == 8, "a long prompt shows that it goes on"
    bench.run()
    assert [(row.start, row.num_tokens) for rows in bench.rows for row in rows] == [
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 1),
        (21, 1),
    ]
    assert bench.scheduler.stats().num_prompt_tokens == 20
    assert_undisturbed([sequence])


def test_decodes_go_first_and_prompts_take_what_is_left_of_the_budget() -> None:
    bench = Bench(budget=8)
    decoding, prefilling = make_sequence(1, prompt_len=4, max_tokens=9), make_sequence(2, prompt_len=30, max_tokens=1)
    bench.scheduler.add(decoding)
    bench.step()
    bench.scheduler.add(prefilling)
    bench.step()
    assert [(row.seq_id, row.num_tokens) for row in bench.rows[-1]] == [(1, 1), (2, 7)]


def rows_of(bench: Bench, step: int) -> list[tuple[int, int]]:
    return [(row.seq_id, row.num_tokens) for row in bench.rows[step]]


def test_a_prompt_that_takes_whole_steps_leaves_half_of_them_to_those_that_need_less() -> None:
    bench = Bench(num_blocks=200, budget=16)
    lengths = {1: 100, 2: 3, 3: 11, 4: 90, 5: 2}
    sequences = [make_sequence(number, prompt_len=length, max_tokens=1) for number, length in lengths.items()]
    bench.scheduler.add(sequences[0])
    bench.step()
    for sequence in sequences[1:]:
        bench.scheduler.add(sequence)
    for _ in range(4):
        bench.step()
    assert [rows_of(bench, step) for step in range(5)] == [
        [(1, 16)],
        [(1, 8), (2, 3), (3, 5)],
        [(3, 6), (1, 10)],  # 4 is next in the queue, and needs more than what is left of 1
        [(1, 16)],
        [(1, 16)],
    ]
    bench.run()
    assert_undisturbed(sequences)


def test_a_prompt_leaves_nothing_to_those_that_cannot_begin() -> None:
    bench = Bench(num_blocks=200, budget=16, max_num_seqs=1)
    for number, length in enumerate((100, 9), start=1):
        bench.scheduler.add(make_sequence(number, prompt_len=length, max_tokens=1))
    for step in range(3):
        bench.step()
        assert rows_of(bench, step) == [(1, 16)]


def test_the_plan_of_a_step_in_which_all_rows_go_on_says_just_that() -> None:
    bench = Bench(num_blocks=64)
    for number in range(1, 5):
        bench.scheduler.add(make_sequence(number, prompt_len=5, max_tokens=6))
    bench.run()
    nothing = StepPlan(StepId(2), 1, 1, num_tokens=4, num_sampled=4)
    assert bench.plans[1:4] == [msgspec.structs.replace(nothing, step_id=step_id) for step_id in (2, 3, 4)]
    assert len(bench.plans[4].new_blocks) == 4


def test_a_sequence_is_sent_whole_once_and_later_only_by_its_id() -> None:
    bench = Bench()
    bench.scheduler.add(make_sequence(1, prompt_len=3, max_tokens=4))
    bench.run()
    assert [len(plan.new) for plan in bench.plans] == [1, 0, 0, 0]


def test_a_small_pool_preempts_and_the_output_is_the_same() -> None:
    bench = Bench(num_blocks=13, budget=16)
    sequences = [make_sequence(number, prompt_len=6, max_tokens=30) for number in range(1, 5)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    assert_undisturbed(sequences)
    assert bench.scheduler.pool.num_free == 12


def test_the_oldest_sequence_is_never_preempted() -> None:
    bench = Bench(num_blocks=13, budget=16)
    sequences = [make_sequence(number, prompt_len=6, max_tokens=40) for number in range(1, 4)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    while not sequences[0].finish_reason():
        bench.step()
        assert 1 not in bench.plans[-1].finished
    assert_undisturbed(sequences[:1])


def test_removing_a_sequence_gives_its_blocks_back_and_tells_the_workers() -> None:
    bench = Bench()
    kept, dropped = make_sequence(1, prompt_len=9, max_tokens=5), make_sequence(2, prompt_len=9, max_tokens=5)
    bench.scheduler.add(kept)
    bench.scheduler.add(dropped)
    bench.step()
    bench.scheduler.remove(dropped)
    plan = bench.step()
    assert plan is not None
    assert plan.finished == [2]
    bench.run()
    assert_undisturbed([kept])


def test_a_resumed_sequence_goes_on_after_its_last_token() -> None:
    whole = make_sequence(1, prompt_len=5, max_tokens=10)
    output = stub_output(whole.prompt_token_ids, 10)
    resumed = make_sequence(1, prompt_len=5, max_tokens=10, output=output[:6])
    bench = Bench()
    bench.scheduler.add(resumed)
    bench.run()
    assert resumed.output_token_ids == output


def test_a_lost_step_is_computed_again_from_the_tokens_so_far() -> None:
    bench = Bench(num_blocks=30)
    sequences = [make_sequence(number, prompt_len=6, max_tokens=12) for number in range(1, 6)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    for _ in range(4):
        bench.step()
        assert not bench.lose_step()
    bench.run()
    assert_undisturbed(sequences)


def test_only_the_sequences_of_a_lost_step_carry_the_blame_until_their_next_token() -> None:
    bench = Bench(max_num_seqs=1)
    first, second = make_sequence(1, prompt_len=3, max_tokens=5), make_sequence(2, prompt_len=3, max_tokens=5)
    bench.scheduler.add(first)
    bench.scheduler.add(second)
    bench.lose_step()
    assert (first.crash_count, second.crash_count) == (1, 0)
    bench.step()
    assert first.crash_count == 0


def test_a_poisonous_sequence_ends_alone_and_takes_nobody_along() -> None:
    bench = Bench(max_num_seqs=4)
    sequences = [make_sequence(number, prompt_len=3, max_tokens=6) for number in range(1, 5)]
    poison = sequences[2]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    quarantined: list[Sequence] = []
    for _ in range(200):
        if not bench.scheduler.has_work:
            break
        plan = bench.scheduler.schedule()
        if plan is None:
            continue
        step = bench.scheduler._in_flight[-1]
        if poison in step.sampled:
            if poison.crash_count >= 2:
                assert step.sampled == [poison]
            quarantined += bench.scheduler.restart(bench.scheduler.epoch + 1)
            bench.start_worker()
        else:
            bench.scheduler.apply(bench.execute(plan))
        check_scheduler(bench.scheduler)
    assert quarantined == [poison]
    assert poison.crash_count == QUARANTINE_AFTER_CRASHES
    assert_undisturbed([sequence for sequence in sequences if sequence is not poison])


def test_a_row_that_fails_ends_alone() -> None:
    bench = Bench()
    fine, broken = make_sequence(1, prompt_len=3, max_tokens=4), make_sequence(2, prompt_len=3, max_tokens=4)
    fine.is_followed = True
    bench.scheduler.add(fine)
    bench.scheduler.add(broken)
    plan = bench.scheduler.schedule()
    assert plan is not None
    failure = RowFailure(broken.seq_id, "nan_logits", "no number")
    result = bench.execute(plan)
    kept = StepResult(result.step_id, result.epoch, [result.token_ids[0], NO_TOKEN], [failure])
    advances = bench.scheduler.apply(kept)
    assert [(advance.sequence.seq_id, advance.failure) for advance in advances] == [(1, None), (2, failure)]
    bench.run()
    assert_undisturbed([fine])


# --- order ---


def admission_order(bench: Bench) -> list[int]:
    return [new.seq_id for plan in bench.plans for new in plan.new]


def test_a_prompt_whose_beginning_is_cached_goes_first() -> None:
    bench = Bench(num_blocks=200, max_num_seqs=1, budget=64)
    bench.scheduler.add(make_sequence(1, prompt_len=33, max_tokens=1, shared_len=32))
    bench.run()
    for number in (2, 3, 4):
        bench.scheduler.add(make_sequence(number, prompt_len=33, max_tokens=1))
    bench.scheduler.add(make_sequence(5, prompt_len=33, max_tokens=1, shared_len=32))
    bench.run()
    assert admission_order(bench) == [1, 5, 2, 3, 4]


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"priority": 1}])
def test_a_cached_prompt_does_not_overtake_those_of_another_right(other: dict[str, Any]) -> None:
    bench = Bench(num_blocks=200, max_num_seqs=1, budget=64)
    bench.scheduler.add(make_sequence(1, prompt_len=33, max_tokens=1, shared_len=32))
    bench.run()
    bench.scheduler.add(make_sequence(2, prompt_len=33, max_tokens=1, **other))
    bench.scheduler.add(make_sequence(3, prompt_len=33, max_tokens=1, shared_len=32))
    bench.run()
    assert admission_order(bench) == [1, 2, 3]


def test_a_prompt_is_passed_over_a_limited_number_of_times() -> None:
    bench = Bench(num_blocks=200, max_num_seqs=1, budget=64)
    bench.scheduler.add(make_sequence(1, prompt_len=33, max_tokens=1))
    for number in range(2, 50):
        bench.scheduler.add(make_sequence(number, prompt_len=33, max_tokens=1, shared_len=32))
    bench.run()
    order = admission_order(bench)
    assert order[0] == 1, "nothing is cached yet"
    bench.plans.clear()
    bench.scheduler.add(make_sequence(100, prompt_len=33, max_tokens=1))
    for number in range(101, 150):
        bench.scheduler.add(make_sequence(number, prompt_len=33, max_tokens=1, shared_len=32))
    bench.run()
    assert admission_order(bench).index(100) == 16


def preempted_first(sequences: list[Sequence]) -> int:
    """Return the first one that is preempted when the pool runs short."""
    bench = Bench(num_blocks=13, budget=64)
    for sequence in sequences:
        bench.scheduler.add(sequence)
    while True:
        running = set(bench.scheduler._running)
        bench.step()
        if bench.scheduler.stats().num_preemptions:
            first = next(each for each in sequences if each in running and each not in bench.scheduler._running)
            bench.run()
            assert_undisturbed(sequences)
            return first.seq_id


def test_of_one_tenant_the_youngest_of_the_lowest_priority_is_preempted_first() -> None:
    priorities = {1: 0, 2: 0, 3: 1, 4: 1}
    sequences = [make_sequence(number, 6, 30, priority=priority) for number, priority in priorities.items()]
    assert preempted_first(sequences) == 2


@pytest.mark.parametrize("priority", [0, 1])
def test_the_tenant_with_most_blocks_gives_way_whatever_its_priority(priority: int) -> None:
    tenants = {1: "a", 2: "b", 3: "b", 4: "a", 5: "c"}
    lengths = {1: 4, 2: 10, 3: 10, 4: 4, 5: 4}
    sequences = [
        make_sequence(number, lengths[number], 30, tenant=tenant, priority=priority if tenant == "b" else 0)
        for number, tenant in tenants.items()
    ]
    assert preempted_first(sequences) == 3


# --- prompts beside watched sequences ---


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("is_watched", [False, True])
def test_a_long_prompt_does_not_stall_a_sequence_that_somebody_reads(is_watched: bool, num_stages: int) -> None:
    bench = Bench(num_blocks=2000, budget=1024, num_stages=num_stages)
    bench.seconds_of = lambda plan: 0.01 + 0.001 * plan.num_tokens  # the target is 0.1 s
    reader = make_sequence(1, prompt_len=100, max_tokens=60)
    reader.is_watched = is_watched
    bench.scheduler.add(reader)
    for _ in range(8):
        bench.step()
    bench.plans.clear()
    bench.scheduler.add(make_sequence(2, prompt_len=2000, max_tokens=1))
    for _ in range(30):
        bench.step()
    longest_s = max(bench.seconds_of(plan) for plan in bench.plans)
    assert longest_s <= 0.12 if is_watched else longest_s > 1.0


def test_a_prompt_goes_on_although_decoding_alone_takes_too_long() -> None:
    bench = Bench(num_blocks=2000, budget=1024)
    bench.seconds_of = lambda plan: 0.5 + 0.001 * plan.num_tokens
    reader = make_sequence(1, prompt_len=100, max_tokens=60)
    reader.is_watched = True
    bench.scheduler.add(reader)
    for _ in range(8):
        bench.step()
    bench.scheduler.add(make_sequence(2, prompt_len=100, max_tokens=1))
    bench.step()
    assert bench.plans[-1].num_tokens == 1 + 32
    bench.run()


# --- several steps in flight ---


def test_the_stages_of_a_pipeline_share_the_sequences() -> None:
    bench = Bench(num_stages=2)
    sequences = [make_sequence(number, prompt_len=3, max_tokens=6) for number in range(1, 8)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.send()
    bench.send()
    assert [[row.seq_id for row in rows] for rows in bench.rows] == [[1, 2, 3, 4], [5, 6, 7]]
    bench.run()
    assert_undisturbed(sequences)
    assert max(len(rows) for rows in bench.rows) == 4
    assert [plan.micro_batch for plan in bench.plans[:4]] == [0, 1, 0, 1]


def test_a_pipeline_stays_full_when_more_waits_than_the_pool_holds() -> None:
    bench = Bench(num_blocks=33, max_num_seqs=64, budget=64, num_stages=2)
    sequences = [make_sequence(number, prompt_len=6, max_tokens=6) for number in range(1, 60)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.run()
    assert_undisturbed(sequences)
    alone = [plan.step_id for plan in bench.plans if plan.depth == 1]
    last_admission = max(plan.step_id for plan in bench.plans if plan.new)
    assert [step_id for step_id in alone if step_id <= last_admission] == [bench.plans[0].step_id]


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline() -> None:
    bench = Bench(budget=8, num_stages=3)
    sequence = make_sequence(1, prompt_len=20, max_tokens=2)
    bench.scheduler.add(sequence)
    bench.step()
    assert [(row.start, row.num_tokens) for rows in bench.rows for row in rows] == [(0, 8), (8, 8), (16, 4)]
    bench.run()
    assert_undisturbed([sequence])


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_sequence_in_flight_may_be_preempted_and_keeps_its_pending_tokens(num_stages: int) -> None:
    bench = Bench(num_blocks=9, budget=16, num_stages=num_stages, run_ahead=True)
    sequences = [make_sequence(number, prompt_len=6, max_tokens=20) for number in range(1, 4)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    num_preempted_in_flight = 0
    for _ in range(400):
        in_flight = {each for step in bench.scheduler._in_flight for each in step.sampled}
        plan = bench.send()
        num_preempted_in_flight += len(in_flight & set(bench.scheduler._waiting))
        if plan is None:
            bench.collect()
    assert num_preempted_in_flight > 0
    assert_undisturbed(sequences)


def test_all_that_was_in_flight_is_blamed_and_a_suspect_is_alone_in_the_pipeline() -> None:
    bench = Bench(max_num_seqs=4, num_stages=2)
    sequences = [make_sequence(number, prompt_len=3, max_tokens=4) for number in range(1, 5)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    for _ in range(2):
        bench.send()
        assert not bench.lose_step()
    assert [sequence.crash_count for sequence in sequences] == [2, 2, 2, 2]
    bench.plans.clear()
    for number in range(1, 5):
        assert bench.send() is not None
        assert bench.send() is None
        assert [row.seq_id for row in bench.rows[-1]] == [number]
        bench.collect()
    bench.run()
    assert_undisturbed(sequences)


def test_steps_that_are_given_up_are_computed_again_and_nobody_is_blamed() -> None:
    bench = Bench(num_stages=2)
    sequences = [make_sequence(number, prompt_len=3, max_tokens=8) for number in range(1, 7)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.step()
    bench.send()
    bench.in_flight.clear()
    assert bench.scheduler.requeue_in_flight() == 6
    bench.run()
    assert [sequence.crash_count for sequence in sequences] == [0] * 6
    assert_undisturbed(sequences)


def test_a_sequence_that_is_requeued_and_due_at_the_same_step_again_gets_one_block() -> None:
    bench = Bench(max_num_seqs=4, budget=5, num_stages=2, run_ahead=True, enable_prefix_caching=False)
    sequences = [
        make_sequence(number, prompt_len, max_tokens=5) for number, prompt_len in ((1, 1), (2, 4), (3, 1), (4, 1))
    ]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.give_up()
    bench.give_up()
    bench.run()
    assert all(len(plan.new_blocks) == len({seq_id for seq_id, _ in plan.new_blocks}) for plan in bench.plans)
    assert_undisturbed(sequences)


# --- shared beginnings ---------------------------------------------------------------------------------------------


def num_fed(bench: Bench) -> int:
    """Tokens that all steps have computed."""
    return sum(plan.num_tokens for plan in bench.plans)


def test_sequences_that_arrive_together_compute_their_shared_beginning_once() -> None:
    bench = Bench(num_blocks=200, budget=64)
    sequences = [make_sequence(number, prompt_len=34, max_tokens=1, shared_len=32) for number in range(1, 7)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.run()
    assert len(bench.plans) == 1
    assert num_fed(bench) == 34 + 5 * 2
    assert [sequence.num_cached_tokens for sequence in sequences] == [0] + [32] * 5
    assert_undisturbed(sequences)


def test_a_shared_beginning_larger_than_the_budget_is_computed_once() -> None:
    bench = Bench(num_blocks=200, budget=10)
    sequences = [make_sequence(number, prompt_len=42, max_tokens=2, shared_len=40) for number in range(1, 5)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.run()
    assert num_fed(bench) == 40 + 4 * 2 + 4
    assert_undisturbed(sequences)


def test_the_last_token_of_a_prompt_that_is_cached_as_a_whole_is_computed() -> None:
    bench = Bench()
    for number in (1, 2):
        bench.scheduler.add(make_sequence(number, prompt_len=16, max_tokens=1, shared_len=16))
        bench.run()
    assert [(row.start, row.num_tokens) for rows in bench.rows for row in rows] == [(0, 16), (12, 4)]


def test_a_sequence_with_another_salt_shares_nothing() -> None:
    bench = Bench(budget=64)
    for number, salt in enumerate(("", "a", "b", "a"), start=1):
        bench.scheduler.add(make_sequence(number, prompt_len=17, max_tokens=1, shared_len=17, cache_salt=salt))
    bench.run()
    assert sorted((row.start, row.num_tokens) for rows in bench.rows for row in rows) == [(0, 17)] * 3 + [(17, 0)]


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    bench = Bench()
    first = make_sequence(1, prompt_len=8, max_tokens=9)
    bench.scheduler.add(first)
    bench.run()
    second = make_sequence(2, prompt_len=20, max_tokens=1)
    second.prompt_token_ids[:17] = first.prompt_token_ids + first.output_token_ids
    bench.scheduler.add(second)
    bench.run()
    assert second.num_cached_tokens == 16


def test_a_preempted_sequence_computes_only_what_was_evicted() -> None:
    bench = Bench(num_blocks=14)
    sequences = [make_sequence(number, prompt_len=16, max_tokens=12) for number in (1, 2)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    assert num_fed(bench) < 2 * (16 + 12) + 16
    assert_undisturbed(sequences)


def test_a_step_that_failed_has_cached_nothing() -> None:
    bench = Bench()
    bench.scheduler.add(make_sequence(1, prompt_len=17, max_tokens=2))
    bench.give_up()
    assert bench.scheduler.pool.stats().num_cached == 0
    bench.run()


def test_a_step_that_failed_has_cached_nothing_of_a_plan_without_rows_behind_it() -> None:
    bench = Bench(num_blocks=5, run_ahead=True)
    preempted = make_sequence(2, prompt_len=5, max_tokens=8)
    for sequence in (make_sequence(1, prompt_len=5, max_tokens=4), preempted):
        bench.scheduler.add(sequence)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.stats().num_preemptions == 0
    bench.give_up()
    assert bench.scheduler.stats().num_preemptions == 1
    bench.scheduler.remove(preempted)
    beginning = preempted.prompt_token_ids + preempted.output_token_ids
    follower = make_sequence(3, prompt_len=0, prompt=[*beginning, 5], max_tokens=1)
    bench.scheduler.add(follower)
    bench.run()
    assert follower.num_cached_tokens == 4
    assert_undisturbed([follower])


def test_without_prefix_caching_everything_is_computed() -> None:
    bench = Bench(enable_prefix_caching=False)
    for number in (1, 2):
        bench.scheduler.add(make_sequence(number, prompt_len=17, max_tokens=1, shared_len=17))
    bench.run()
    assert num_fed(bench) == 34
    assert bench.scheduler.pool.stats().num_cached == 0


def test_the_pool_counts_what_was_asked_for_and_what_was_found() -> None:
    bench = Bench(num_blocks=200, budget=64)
    for number in (1, 2):
        bench.scheduler.add(make_sequence(number, prompt_len=18, max_tokens=1, shared_len=16))
    bench.run()
    stats = bench.scheduler.pool.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (36, 16)


# --- forks ---------------------------------------------------------------------------------------------------------


def add_candidates(bench: Bench, num_candidates: int, prompt_len: int, max_tokens: int = 9) -> list[Sequence]:
    """Candidates of one prompt, one after the other."""
    prompt = list(range(1, prompt_len + 1))
    candidates = [
        make_sequence(number + 1, prompt_len, max_tokens, prompt=prompt, candidate=number)
        for number in range(num_candidates)
    ]
    for candidate in candidates:
        bench.scheduler.add(candidate)
    return candidates


@pytest.mark.parametrize("windows", [(None,), (9,), (None, 9, 1)])
@pytest.mark.parametrize("prompt_len", [1, 3, 8, 10, 45])
def test_candidates_compute_their_prompt_once_and_copy_the_block_that_is_not_full(
    prompt_len: int, windows: tuple[int | None, ...]
) -> None:
    bench = Bench(num_blocks=400, windows=windows)
    candidates = add_candidates(bench, 4, prompt_len)
    while not candidates[0].output_token_ids:
        bench.step()
    assert num_fed(bench) == prompt_len
    assert [row.num_tokens for row in bench.rows[-1]] == [prompt_len % 32, 0, 0, 0]
    has_partial_block = prompt_len % BLOCK_SIZE > 0
    assert len(bench.plans[-1].copy) == 3 * has_partial_block * len(windows)
    bench.run()
    assert num_fed(bench) == prompt_len + 4 * 8
    assert_undisturbed(candidates)
    assert len({tuple(each.output_token_ids) for each in candidates}) == 4


def test_candidates_of_which_some_wait_for_a_place_are_the_same() -> None:
    bench = Bench(max_num_seqs=3)
    candidates = add_candidates(bench, 7, prompt_len=10)
    bench.run()
    assert_undisturbed(candidates)
    assert sum(len(plan.copy) for plan in bench.plans) > 2


def test_a_resumed_candidate_goes_on_with_its_own_tokens() -> None:
    bench = Bench()
    candidates = add_candidates(bench, 2, prompt_len=10)
    output = stub_output(candidates[0].prompt_token_ids, 9, 2)
    for number in (2, 3):
        options: dict[str, Any] = {"prompt": candidates[0].prompt_token_ids, "output": output[: 2 * number]}
        candidates.append(make_sequence(number + 1, 10, 9, candidate=2, **options))
        bench.scheduler.add(candidates[-1])
    bench.run()
    assert sum(len(plan.copy) for plan in bench.plans) == 1
    assert_undisturbed(candidates)


def test_forks_of_a_lost_step_fork_again() -> None:
    bench = Bench()
    candidates = add_candidates(bench, 3, prompt_len=10)
    bench.give_up()
    bench.lose_step()
    bench.run()
    assert num_fed(bench) == 10 + 3 * 8
    assert_undisturbed(candidates)


def test_forks_leave_the_token_budget_to_nobody_else() -> None:
    """A step has memory for as many logits as it has tokens."""
    bench = Bench(budget=12)
    candidates = add_candidates(bench, 5, prompt_len=10)
    bench.run()
    assert all(plan.num_sampled <= 12 for plan in bench.plans)
    assert len(bench.rows[0]) == 3
    assert_undisturbed(candidates)


def test_without_prefix_caching_each_candidate_computes_its_prompt() -> None:
    bench = Bench(enable_prefix_caching=False, budget=64)
    candidates = add_candidates(bench, 3, prompt_len=10, max_tokens=1)
    bench.run()
    assert num_fed(bench) == 30
    assert_undisturbed(candidates)


def test_prompts_with_different_salts_do_not_fork() -> None:
    bench = Bench()
    for number, salt in enumerate(("a", "b"), start=1):
        bench.scheduler.add(make_sequence(number, 10, 1, prompt=list(range(1, 11)), cache_salt=salt))
    bench.run()
    assert num_fed(bench) == 20


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(9,), (None, 9)])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_long_sequence_holds_of_a_window_what_the_window_sees(
    windows: tuple[int | None, ...], run_ahead: bool
) -> None:
    num_full = windows.count(None)
    bench = Bench(num_blocks=6 + num_full * 50, budget=8, windows=windows, run_ahead=run_ahead)
    sequence = make_sequence(1, prompt_len=100, max_tokens=100)
    assert bench.scheduler.fits(sequence)
    bench.scheduler.add(sequence)
    while bench.scheduler.has_work or bench.in_flight:
        bench.step()
        held = [block_id for block_id in sequence.block_ids[num_full :: len(windows)] if block_id]
        assert len(held) <= 5  # the window and a chunk
    assert_undisturbed([sequence])
    assert bench.scheduler.stats().num_preemptions == 0


def num_together(windows: tuple[int | None, ...]) -> int:
    """Most sequences that run at a time in a pool of 80 blocks."""
    bench = Bench(num_blocks=81, budget=16, windows=windows)
    for number in range(1, 9):
        bench.scheduler.add(make_sequence(number, prompt_len=60, max_tokens=40))
    most = 0
    while bench.scheduler.has_work:
        bench.step()
        most = max(most, bench.scheduler.stats().num_running)
    return most


def test_more_sequences_run_together_when_a_group_has_a_window() -> None:
    assert num_together((None, None)) == 2
    assert num_together((None, 9)) == 3
    assert num_together((9, 9)) >= 6


def test_a_prompt_is_found_after_the_windows_have_passed_it() -> None:
    bench = Bench(num_blocks=60, windows=(None, 9))
    first = make_sequence(1, prompt_len=30, max_tokens=20, shared_len=24)
    second = make_sequence(2, prompt_len=30, max_tokens=20, shared_len=24)
    for sequence in (first, second):
        bench.scheduler.add(sequence)
        bench.run()
    assert second.num_cached_tokens == 24
    assert [block_id == 0 for block_id in bench.rows[20][0].new_blocks[:12]] == [False, True] * 4 + [False] * 4
    assert_undisturbed([first, second])


def test_a_prompt_is_computed_from_where_a_window_still_sees_all() -> None:
    """The full group has the whole beginning, but the window's group has lost a block of it."""
    bench = Bench(num_blocks=60, windows=(None, 9))
    first = make_sequence(1, prompt_len=30, max_tokens=1, shared_len=24)
    bench.scheduler.add(first)
    bench.step()
    lost = bench.rows[0][0].new_blocks[5 * 2 + 1]
    bench.run()
    bench.scheduler.pool.unregister([lost])
    second = make_sequence(2, prompt_len=30, max_tokens=4, shared_len=24)
    bench.scheduler.add(second)
    bench.run()
    assert second.num_cached_tokens == 20
    assert_undisturbed([second])


def test_what_a_failed_sequence_has_computed_is_not_found_though_its_window_has_passed_it() -> None:
    bench = Bench(budget=8, windows=(9,))
    bench.scheduler.add(make_sequence(1, prompt_len=40, max_tokens=4, shared_len=40))
    for _ in range(4):
        bench.step()
    assert bench.send() is not None
    assert bench.fail_row() is not None
    assert bench.scheduler.pool.stats().num_cached == 0


def test_what_no_windows_hide_is_needed_to_the_end() -> None:
    bench = Bench(num_blocks=20, budget=8, windows=(None, 9))
    assert bench.scheduler.fits(make_sequence(1, prompt_len=50, max_tokens=6))
    assert not bench.scheduler.fits(make_sequence(1, prompt_len=50, max_tokens=7))


# --- the host tier -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_preempted_sequence_comes_back_from_the_host_tier(enable_prefix_caching: bool) -> None:
    num_fed_by_tier = {}
    for num_host_blocks in (0, 100):
        bench = Bench(num_blocks=14, num_host_blocks=num_host_blocks, enable_prefix_caching=enable_prefix_caching)
        sequences = [make_sequence(number, prompt_len=15, max_tokens=25) for number in (1, 2, 3)]
        for sequence in sequences:
            bench.scheduler.add(sequence)
        bench.run()
        assert_undisturbed(sequences)
        stats = bench.scheduler.stats()
        assert stats.num_preemptions > 0
        num_fed_by_tier[num_host_blocks] = num_fed(bench)
        assert (stats.pool.num_swapped_in > 0) == (num_host_blocks > 0)
    # Each preemption costs less than two blocks: that with pending tokens, and the last one, which is not full.
    assert num_fed_by_tier[100] <= 3 * (15 + 25) + stats.num_preemptions * 2 * BLOCK_SIZE < num_fed_by_tier[0]


def run_one(bench: Bench, number: int, **options: Any) -> Sequence:
    sequence = make_sequence(number, **{"prompt_len": 33, "max_tokens": 1, "shared_len": 32} | options)
    bench.scheduler.add(sequence)
    bench.run()
    assert_undisturbed([sequence])
    return sequence


def test_a_prompt_finds_in_the_host_tier_what_the_device_has_evicted() -> None:
    bench = Bench(num_blocks=14, budget=64, num_host_blocks=100)
    run_one(bench, 1)
    run_one(bench, 2, shared_len=0)  # takes nearly the whole pool
    found = run_one(bench, 3)
    assert found.num_cached_tokens == 32
    assert bench.plans[-1].num_tokens == 1 and len(bench.plans[-1].swap_in) >= 4
    stats = bench.scheduler.stats().pool
    assert stats.num_host_blocks == 100
    assert stats.num_swapped_out == sum(len(plan.swap_out) for plan in bench.plans) >= stats.num_host_cached > 0
    assert stats.num_swapped_in == sum(len(plan.swap_in) for plan in bench.plans)


def test_a_reset_and_another_salt_find_nothing_in_the_host_tier() -> None:
    bench = Bench(num_blocks=14, budget=64, num_host_blocks=100)
    run_one(bench, 1)
    run_one(bench, 2, shared_len=0)
    assert run_one(bench, 3, cache_salt="another").num_cached_tokens == 0
    bench.scheduler.pool.reset_cache()
    assert bench.scheduler.stats().pool.num_host_cached == 0
    assert run_one(bench, 4).num_cached_tokens == 0


def test_without_prefix_caching_a_sequence_finds_no_blocks_of_another_one_in_the_host_tier() -> None:
    bench = Bench(num_blocks=14, budget=64, num_host_blocks=100, enable_prefix_caching=False)
    run_one(bench, 1)
    run_one(bench, 2, shared_len=0)
    assert run_one(bench, 3).num_cached_tokens == 0
    assert bench.scheduler.stats().pool.num_swapped_in == 0


def test_after_a_loss_of_the_workers_the_host_tier_is_empty() -> None:
    bench = Bench(num_blocks=14, budget=64, num_host_blocks=100)
    run_one(bench, 1)
    run_one(bench, 2, shared_len=0)
    bench.lose_step()
    assert run_one(bench, 3).num_cached_tokens == 0


def test_a_step_that_failed_has_swapped_nothing() -> None:
    bench = Bench(num_blocks=14, budget=64, num_host_blocks=100)
    run_one(bench, 1)
    run_one(bench, 2, shared_len=0)
    num_kept = bench.scheduler.stats().pool.num_host_cached
    sequence = make_sequence(3, prompt_len=33, max_tokens=1, shared_len=32)
    bench.scheduler.add(sequence)
    bench.give_up()  # other tokens are in all blocks that this step was to move
    assert bench.scheduler.stats().pool.num_host_cached < num_kept
    bench.run()
    assert_undisturbed([sequence])


def test_moves_of_an_interrupted_plan_are_undone_with_the_steps_in_flight() -> None:
    bench = Bench(num_blocks=14, budget=64, num_host_blocks=100)
    run_one(bench, 1)
    run_one(bench, 2, shared_len=0)
    bench.scheduler.add(make_sequence(3, prompt_len=33, max_tokens=1, shared_len=32))
    plan = bench.send()
    assert plan is not None and plan.swap_in
    host, key = bench.scheduler.pool.host, (0, b"evicted")
    host.swap_out(key, 5)
    bench.scheduler.requeue_in_flight()
    assert key not in host
    check_scheduler(bench.scheduler)


def test_where_computing_is_faster_nothing_is_swapped() -> None:
    for token_s, is_swapped in ((0.001, False), (0.01, True)):
        bench = Bench(num_blocks=14, budget=64, num_host_blocks=100, swap_s=0.02)
        bench.seconds_of = partial(seconds_by_tokens, token_s)
        for number in (1, 2, 3):
            run_one(bench, number, shared_len=0)
        assert (bench.scheduler.stats().pool.num_swapped_out > 0) == is_swapped


def seconds_by_tokens(token_s: float, plan: StepPlan) -> float:
    return token_s * plan.num_tokens


@pytest.fixture
def three_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may return three records of one alternative."""
    monkeypatch.setattr(planned_step, "MAX_RECORD_BYTES", 3 * record_bytes(1))


@pytest.mark.usefixtures("three_records")
def test_a_prompt_whose_log_probabilities_exceed_a_reply_is_computed_in_smaller_chunks() -> None:
    bench = Bench()
    sequence = make_sequence(1, prompt_len=9, max_tokens=2, logprobs=1, prompt_logprobs=1)
    bench.scheduler.add(sequence)
    bench.run()
    assert [[row.num_tokens for row in rows] for rows in bench.rows] == [[3], [3], [3], [1]]
    assert_undisturbed([sequence])


@pytest.mark.usefixtures("three_records")
def test_decode_rows_whose_log_probabilities_exceed_a_reply_wait_and_other_rows_go_on() -> None:
    bench = Bench()
    sequences = [make_sequence(number, 5, 3, logprobs=1) for number in range(1, 6)]
    sequences.append(make_sequence(6, 5, 3))
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.run()
    assert [len(rows) for rows in bench.rows] == [6, 4, 4, 2, 2, 2]
    assert_undisturbed(sequences)


@pytest.mark.usefixtures("three_records")
def test_candidates_whose_log_probabilities_exceed_a_reply_do_not_all_fork_at_once() -> None:
    bench = Bench()
    sequences = [
        make_sequence(number, 6, 2, prompt=[1, 2, 3, 4, 5, 6], candidate=number, logprobs=1) for number in range(5)
    ]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    first = bench.step()
    assert first is not None and [row.num_tokens for row in first.rows] == [6, 0, 0, 1, 1]
    bench.run()
    assert_undisturbed(sequences)


@pytest.mark.usefixtures("three_records")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_suspect_that_wants_log_probabilities_goes_on_alone(num_stages: int) -> None:
    bench = Bench(num_stages=num_stages, run_ahead=True)
    sequences = [make_sequence(number, 7, 4, logprobs=1, prompt_logprobs=0) for number in range(1, 6)]
    for sequence in sequences:
        bench.scheduler.add(sequence)
    for _ in range(2):
        bench.step()
        bench.lose_step()
    bench.run()
    assert_undisturbed(sequences)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_blocks_are_whole_and_the_output_is_the_undisturbed_one(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        num_records = data.draw(st.sampled_from([1, 4, 100]), "records")
        patch.setattr(planned_step, "MAX_RECORD_BYTES", num_records * record_bytes(1))
        run_history(data.draw)


def run_history(draw: Callable[..., Any]) -> None:
    windows = draw(st.sampled_from([(None,), (6,), (None, 5), (None, 1, 9), (8, 3)]), "windows")
    bench = Bench(
        num_blocks=draw(st.integers(14, 40), "blocks") * len(windows),
        max_num_seqs=draw(st.integers(1, 6), "seqs"),
        budget=draw(st.integers(1, 24), "budget"),
        num_stages=draw(st.integers(1, 3), "stages"),
        run_ahead=draw(st.booleans(), "run ahead"),
        enable_prefix_caching=draw(st.integers(0, 3), "caching") > 0,
        windows=windows,
        num_host_blocks=draw(st.sampled_from([0, 1, 5, 60]), "host blocks"),
    )
    sequences: list[Sequence] = []
    removed: list[Sequence] = []
    for number in range(1, draw(st.integers(1, 25), "operations") + 1):
        match draw(st.sampled_from(OPERATIONS), "operation"):
            case "add":
                prompt_len, max_tokens = draw(st.integers(1, 24)), draw(st.integers(1, 20))
                shared_len = draw(st.sampled_from([0, 4, 9, 24]))
                options: dict[str, Any] = {"tenant": draw(st.sampled_from("ab")), "priority": draw(st.integers(0, 1))}
                options |= {name: draw(st.sampled_from([None, None, 0, 1])) for name in ("logprobs", "prompt_logprobs")}
                sequences.append(make_sequence(number, prompt_len, max_tokens, shared_len=shared_len, **options))
                bench.scheduler.add(sequences[-1])
            case "fork" if sequences:
                prompt, max_tokens = draw(st.sampled_from(sequences)).prompt_token_ids, draw(st.integers(1, 20))
                options = {"prompt": prompt, "logprobs": draw(st.sampled_from([None, 1]))}
                for candidate in range(draw(st.integers(2, 4))):
                    seq_id = number + 100 * (candidate + 1)
                    sequences.append(make_sequence(seq_id, len(prompt), max_tokens, candidate=candidate, **options))
                    bench.scheduler.add(sequences[-1])
            case "remove" if sequences:
                removed.append(draw(st.sampled_from(sequences)))
                bench.scheduler.remove(removed[-1])
            case "lose":
                removed += bench.lose_step()
            case "give up":
                bench.give_up()
            case "fail" if failed := bench.fail_row():
                removed.append(failed)
            case "reset":
                bench.scheduler.pool.reset_cache()
            case "send":
                bench.send()
            case "collect":
                bench.collect()
            case _:
                bench.step()
        check_scheduler(bench.scheduler)
    bench.run()
    assert_undisturbed([sequence for sequence in sequences if sequence not in removed])
    assert bench.scheduler.pool.num_free == bench.num_blocks - 1
