"""In which order waiting sequences are admitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine_service.core.sequence import Sequence
from millrace.engine_service.core.waiting_queue import WaitingQueue
from millrace.executor.wire.kv_layout import KVLayout
from tests.engine_service.core.integrity import check_queue
from tests.engine_service.core.sequences import make_sequence
from tests.engine_service.core.test_scheduler import Bench, admission_order, assert_undisturbed


class Place:
    """A queue, and the sequences that run. Nothing is cached but for what a test says."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(KVLayout(4))
        self.running: list[Sequence] = []
        self.cached: dict[int, int] = {}
        """Blocks that the prefix cache has, by sequence."""

    def push(self, *seq_ids: int, is_first: bool = False, **options: Any) -> None:
        for seq_id in seq_ids:
            self.queue.push(make_sequence(seq_id, prompt_len=5, max_tokens=3, **options), is_first=is_first)
        self.check()

    def admit(self) -> Sequence:
        """Admit the next sequence."""
        sequence, _ = self.queue.choose(lambda each, _: [1] * self.cached.get(each.seq_id, 0), lambda each: False)
        self.queue.admit(sequence)
        self.running.append(sequence)
        self.check()
        return sequence

    def admit_all(self) -> list[int]:
        return [self.admit().seq_id for _ in range(len(self.queue))]

    def end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.queue.count_stopped(sequence)
        self.check()

    def waiting(self, seq_id: int) -> Sequence:
        return next(each for each in self.queue if each.seq_id == seq_id)

    def check(self) -> None:
        check_queue(self.queue, self.running)


@pytest.fixture
def place() -> Place:
    """Both tenants have a running sequence."""
    place = Place()
    for number, tenant in enumerate("ab"):
        place.push(1000 + number, tenant=tenant)
        place.admit()
    return place


def test_equal_sequences_are_admitted_in_the_order_of_arrival() -> None:
    place = Place()
    place.push(*range(1, 30))
    assert place.admit_all() == list(range(1, 30))


def test_a_higher_priority_goes_first_within_a_tenant(place: Place) -> None:
    for seq_id, priority in enumerate((0, 0, 5, -1, 7, 5), start=1):
        place.push(seq_id, tenant="a", priority=priority)
    assert [each.seq_id for each in place.queue] == [5, 3, 6, 1, 2, 4]
    assert place.admit_all() == [5, 3, 6, 1, 2, 4]


def test_a_priority_takes_no_turn_of_another_tenant(place: Place) -> None:
    place.push(1, tenant="a")
    place.push(2, 3, tenant="b")
    place.push(4, tenant="a", priority=100)
    place.push(5, tenant="b", priority=1)
    assert [each.seq_id for each in place.queue] == [4, 5, 2, 1, 3]
    assert place.admit_all() == [4, 5, 2, 1, 3]


def test_a_tenant_with_nothing_running_goes_first_and_then_takes_its_turns(place: Place) -> None:
    place.push(1, 2, tenant="a", priority=9)
    place.push(3, 4, tenant="c")
    place.push(5, tenant="a")
    assert [each.seq_id for each in place.queue] == [3, 1, 2, 4, 5]
    of_c = place.admit()
    assert place.admit().seq_id == 1
    place.end(of_c)
    assert place.admit_all() == [4, 2, 5]


def test_tenants_with_nothing_running_go_in_the_order_of_arrival(place: Place) -> None:
    place.push(1, tenant="a")
    place.push(2, tenant="b")
    place.push(3, tenant="c")
    for sequence in list(reversed(place.running)):
        place.end(sequence)
    assert place.admit_all() == [1, 2, 3]


def test_what_was_preempted_goes_before_better_priorities_and_tenants_with_nothing_running(place: Place) -> None:
    place.push(1, tenant="a", priority=9)
    place.push(2, tenant="c")
    place.push(3, tenant="b", is_first=True)
    place.push(4, tenant="a", priority=-9, is_first=True)
    assert [each.seq_id for each in place.queue] == [4, 3, 2, 1]
    assert place.admit_all() == [4, 3, 2, 1]


def test_when_one_is_dropped_the_others_of_its_tenant_move_up(place: Place) -> None:
    place.push(1, 2, tenant="a")
    place.push(3, tenant="b")
    place.push(4, tenant="a")
    place.queue.remove(place.waiting(1))
    place.queue.remove(make_sequence(99, 1, 1))  # is not there
    assert place.admit_all() == [2, 4, 3]


def test_one_that_is_admitted_out_of_order_takes_the_next_turn_of_its_tenant(place: Place) -> None:
    place.push(1, 2, tenant="a")
    place.push(3, tenant="b")
    place.push(4, tenant="a")
    last = place.waiting(4)  # such as a suspect, which has to run alone
    place.queue.admit(last)
    place.running.append(last)
    assert place.admit_all() == [1, 3, 2]


@pytest.mark.parametrize(("other", "order"), [({"tenant": "b"}, [4, 2, 1, 3]), ({"priority": 1}, [2, 4, 1, 3])])
def test_a_cached_prompt_overtakes_those_of_equal_right_only(
    place: Place, other: dict[str, Any], order: list[int]
) -> None:
    place.push(1, tenant="a")
    place.push(2, **{"tenant": "a"} | other)
    place.push(3, 4, tenant="a")
    place.cached[4] = 1
    assert place.admit_all() == order


def test_a_released_sequence_goes_to_the_end_and_a_resumed_one_before_all_others(place: Place) -> None:
    place.push(1, tenant="a", grammar="x")
    place.push(2, tenant="a", grammar="y", output=[7])
    place.push(3, tenant="a")
    assert [each.seq_id for each in place.queue] == [3, 1, 2]
    place.queue.release(2)
    assert place.admit_all() == [2, 3, 1]


def test_num_admissible_counts_the_first_ones_in_the_order_of_admission(place: Place) -> None:
    place.push(1, tenant="a")
    place.queue.push(make_sequence(2, prompt_len=40, max_tokens=1, tenant="a", priority=1))
    place.push(3, tenant="c")
    assert [place.queue.num_admissible(num_free, 3) for num_free in (1, 2, 12, 13, 14, 15)] == [0, 1, 1, 2, 2, 3]
    assert place.queue.num_admissible(100, 2) == 2


def test_a_late_sequence_runs_next_if_its_priority_is_higher_or_its_tenant_has_nothing_running() -> None:
    bench = Bench(max_num_seqs=4, num_blocks=200)
    bulk = [make_sequence(number, 5, 5 * number, tenant="bulk") for number in range(1, 9)]
    for sequence in bulk:
        bench.scheduler.add(sequence)
    bench.step()
    urgent, other = make_sequence(9, 5, 9, tenant="bulk", priority=100), make_sequence(10, 5, 9, tenant="other")
    bench.scheduler.add(urgent)
    bench.scheduler.add(other)
    bench.run()
    assert admission_order(bench) == [1, 2, 3, 4, 10, 9, 5, 6, 7, 8]
    assert_undisturbed([*bulk, urgent, other])


class Model:
    """The order again, by its definition, where it need not be fast."""

    def __init__(self) -> None:
        self.first: list[Sequence] = []
        self.others: list[Sequence] = []
        """By age."""
        self.turns: dict[str, list[int]] = {}
        self.num_turns = 0

    def push(self, sequence: Sequence, *, is_first: bool = False) -> None:
        if is_first:
            self.first.insert(0, sequence)
        else:
            self.others.append(sequence)
            self.num_turns += 1
            self.turns.setdefault(sequence.tenant, []).append(self.num_turns)

    def remove(self, sequence: Sequence, turn: int) -> None:
        if sequence in self.first:
            self.first.remove(sequence)
        elif sequence in self.others:
            self.others.remove(sequence)
            del self.turns[sequence.tenant][turn]

    def next(self, running: list[Sequence]) -> Sequence:
        if self.first:
            return self.first[0]
        started = {each.tenant for each in running}
        tenants = [tenant for tenant, turns in self.turns.items() if turns]
        tenant = min(tenants, key=lambda each: (each in started, self.turns[each]))
        return max((each for each in self.others if each.tenant == tenant), key=lambda each: each.priority)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_happens_none_is_lost_or_admitted_twice_and_the_order_is_that_of_the_rules(
    data: st.DataObject,
) -> None:
    run_history(data.draw)


def run_history(draw: Callable[..., Any]) -> None:
    place, model = Place(), Model()
    pushed, over, held = 0, set[int](), dict[int, Sequence]()
    for _ in range(draw(st.integers(1, 60))):
        match draw(st.sampled_from(["push", "push", "push", "admit", "admit", "end", "preempt", "drop", "release"])):
            case "push":
                pushed += 1
                options = {"tenant": draw(st.sampled_from("abc")), "priority": draw(st.integers(-1, 1))}
                grammar = draw(st.sampled_from(["", "", "", str(pushed)]))
                place.push(pushed, grammar=grammar, **options)
                sequence = place.waiting(pushed)
                if grammar:
                    held[pushed] = sequence
                else:
                    model.push(sequence)
            case "admit" if place.queue.has_ready:
                expected = model.next(place.running)
                assert place.admit() is expected
                model.remove(expected, 0)
            case "end" | "preempt" as how if place.running:
                sequence = draw(st.sampled_from(place.running))
                place.end(sequence)
                if how == "end":
                    over.add(sequence.seq_id)
                else:
                    place.queue.push(sequence, is_first=True)
                    model.push(sequence, is_first=True)
            case "drop" if place.queue:
                sequence = draw(st.sampled_from(list(place.queue)))
                place.queue.remove(sequence)
                model.remove(sequence, -1)
                held.pop(sequence.seq_id, None)
                over.add(sequence.seq_id)
            case "release":
                place.queue.release(place.queue.grammars._last_number)
                for sequence in held.values():
                    model.push(sequence)
                held.clear()
            case _:
                continue
        place.check()
        ids = [each.seq_id for each in (*place.queue, *place.running)]
        assert sorted([*ids, *over]) == list(range(1, pushed + 1))
    ready = [each for each in place.queue if each.seq_id not in held]
    assert [place.admit() for _ in ready] == ready
