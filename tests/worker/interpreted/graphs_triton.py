"""Steps as graphs, with a double that runs the same function again, and watches what a GPU's graph relies on."""

from __future__ import annotations

import gc
import importlib
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from millrace.executor.wire.messages import NewSequence, RowSampling, SeqId, StepId, StepPlan, StepRow
from millrace.worker import graph_kinds, graphs, rank, rank_model, sampling_triton
from millrace.worker import runner as runner_module
from millrace.worker.attention.triton import TritonAttention
from millrace.worker.capture import Replay
from millrace.worker.fusion.device import DeviceOperations
from millrace.worker.graph_kinds import LEAST_CHUNKS, Kind
from millrace.worker.graphs import StepGraphs
from millrace.worker.input_batch import NO_SLOT, InputBatch
from millrace.worker.kernels import rows_torch
from millrace.worker.kv_pool import KVPool
from millrace.worker.linear import linear_triton
from millrace.worker.linear.linear_triton import FewRowsLinear
from millrace.worker.rank import Rank
from millrace.worker.runner import Runner
from millrace.worker.transfer import FixedBuffer
from tests.worker.driver import GREEDY, Driver, start_worker
from tests.worker.models import VOCAB_SIZE, make_model
from tests.worker.test_no_waiting import ROWS, run_ahead

MAX_NUM_SEQS, MAX_TOKENS = 6, 4
SPACE = LEAST_CHUNKS
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
DRAWN, LIMITED = RowSampling(0.9, 0, 1.0, 0.01, 7, 0, 0, []), RowSampling(0.9, 20, 0.9, 0.0, 7, 0, 0, [])
SAMPLING = [GREEDY, LIMITED, DRAWN]


@pytest.fixture(autouse=True, scope="module")
def triton_on_this_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_worker(patch)
        yield


@pytest.fixture(scope="module")
def started(triton_on_this_cpu: None, tmp_path_factory: pytest.TempPathFactory) -> Rank:
    """A worker that tests use one after the other, since a start runs kernels too."""
    path = tmp_path_factory.mktemp("llama")
    make_model("llama", path, **SMALL)
    return start_worker(path, max_num_seqs=MAX_NUM_SEQS, num_blocks=1000)


@pytest.fixture
def worker(started: Rank, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A worker without graphs. Those that it is given are for decode rows only."""
    assert started.runner is not None
    started.runner._graphs = None
    monkeypatch.setattr(graphs, "MOST_TOKENS", 0)
    return started


@pytest.fixture
def for_all_steps(worker: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_TOKENS", 60)


def patch_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker of this process run on the CPU what it runs on a GPU."""

    def choose(_: TritonAttention, dtype: torch.dtype, device: torch.device, **options: Any) -> DeviceOperations:
        return DeviceOperations(TritonAttention(), dtype, device, rows_torch)

    monkeypatch.setattr(rank, "choose_attention", lambda *_, **options: TritonAttention())
    monkeypatch.setattr(rank_model, "choose_operations", choose)
    monkeypatch.setattr(runner_module, "to_host", torch.clone)  # the copy of a GPU's memory
    monkeypatch.setattr(graphs, "CAPTURE_PAUSE_STEPS", 0)
    monkeypatch.setattr(graphs, "MOST_TILED", MAX_NUM_SEQS)  # each unused place takes the interpreter time
    monkeypatch.setattr(graph_kinds, "LEAST_TOKENS", 8)  # and so does each token that pads a step


class CaptureDouble:
    """Runs the function again. Its buffers must stay where they are, nothing else may have changed them since, and rows that
    pad a step must change no slot and no block but block 0."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.num_captures = self.num_replays = self.num_padded = 0
        self._inputs: dict[Any, list[int]] = {}
        """By replay: the addresses that its graph reads."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        try:
            return self._record(compute)
        except Exception as error:  # the graphs would go on without this one
            pytest.fail(f"the capture has failed: {error!r}")

    def _record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        before = self._state()
        compute()
        buffers, result = self._addresses(), compute()
        assert self._addresses() == buffers, "a capture allocates"
        self.num_captures += 1
        assert self._changed(before) == (set(), set()), "a capture has no rows"

        def replay() -> None:
            assert self._addresses() == buffers, "the graph writes to buffers that are gone"
            batch = next(one.batch for one in self._graphs()._graphs.values() if one.replay is replay)
            slots, blocks = (
                set(batch.sampled.slots.tolist()) - {NO_SLOT},
                set(batch.token_blocks.flatten().tolist()),
            )
            rows = [part for each in batch.derived.values() for part in (each.decodes, each.chunks, each.tiles)]
            inputs = [batch.input_ids, batch.positions, batch.token_blocks, batch.block_tables, batch.sampled.slots]
            addresses = [each.data_ptr() for each in inputs + rows]
            assert self._inputs.setdefault(replay, addresses) == addresses, "a graph reads what has moved"
            self.num_padded += len(slots) < batch.num_rows or NO_SLOT in batch.sampled.slots
            before = self._state()
            result.copy_(compute())
            changed_slots, changed_blocks = self._changed(before)
            assert changed_slots <= slots and changed_blocks <= blocks - {0}, "padding writes"
            assert self._addresses() == buffers, "a replay allocates"
            self.num_replays += 1

        return result, replay

    def _graphs(self) -> StepGraphs:
        assert self._runner._graphs is not None
        return self._runner._graphs

    def _state(self) -> list[Tensor]:
        pool = self._runner._pool.layers.values()
        tensors = [
            self._runner._sequences.last_tokens[:-1],
            *(part[1:] for one in pool for part in (one.keys, one.values)),
        ]
        return [tensor.clone() for tensor in tensors]

    def _changed(self, before: list[Tensor]) -> tuple[set[int], set[int]]:
        """Return the slots and the blocks that have changed."""
        slots, *blocks = [
            set(
                (one != other)
                .flatten(1 if one.dim() > 1 else 0)
                .reshape(len(one), -1)
                .any(1)
                .nonzero()
                .flatten()
                .tolist()
            )
            for one, other in zip(self._state(), before, strict=True)
        ]
        return slots, {1 + index for part in blocks for index in part}

    def _addresses(self) -> dict[str, int]:
        decoder = self._runner.decoder
        assert decoder is not None
        found = {name: buffer.data_ptr() for name, buffer in decoder._workspace._buffers.items()}
        return found | {"last tokens": self._runner._sequences.last_tokens.data_ptr()}


def use_graphs(worker: Rank, *, is_alone: bool = True) -> tuple[StepGraphs, CaptureDouble]:
    assert worker.runner is not None
    return add_graphs(worker.runner, is_alone=is_alone)


def add_graphs(
    runner: Runner, *, max_num_seqs: int = MAX_NUM_SEQS, is_alone: bool = True, width: int = 32
) -> tuple[StepGraphs, CaptureDouble]:
    assert runner.decoder is not None
    for layer in runner._pool.layers.values():  # what it has not been given may be NaN, which equals nothing
        layer.keys.nan_to_num_()
        layer.values.nan_to_num_()
    double = CaptureDouble(runner)
    runner._graphs = StepGraphs(
        *(runner.decoder, TritonAttention(), runner._sequences, max_num_seqs, 16, width, double),
        all_logits=runner._all_logits,
        is_alone=is_alone,
    )
    return runner._graphs, double


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Return a list to which each call of a method adds its name."""
    calls, method = list[str](), getattr(owner, name)

    def call(*args: Any) -> Any:
        calls.append(name)
        return method(*args)

    monkeypatch.setattr(owner, name, call)
    return calls


def ahead(worker: Rank, rows: list[RowSampling]) -> list[list[int]]:
    """Run a prompt for each row, and decode steps, 3 of them of all rows. Each is launched before the one before it is
    collected. Return the tokens of each step."""
    assert worker.runner is not None
    results = [each.token_ids for each in run_ahead(worker.runner, rows, 4, num_more=1)]
    finish_all(worker)
    return results


def finish_all(worker: Rank) -> None:
    worker.launch(StepPlan(StepId(100), 1, 1, 0, 0, finished=[SeqId(index) for index in range(MAX_NUM_SEQS + 1)]))
    worker.collect()


def generate(
    worker: Rank,
    seed: int,
    num_prompts: int = 6,
    longest: int = 3,
    sampling: list[RowSampling] = SAMPLING,
    **options: Any,
) -> list[list[int]]:
    """Return the outputs of prompts, the last of which is there twice."""
    source = random.Random(1)
    prompts = [
        [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, longest))] for _ in range(num_prompts - 1)
    ]
    prompts.append(prompts[-1])
    driver = Driver(worker, seed, keeps_logits=False, **options)
    rows = [sampling[index % len(sampling)] for index in range(num_prompts)]
    return [request.output for request in driver.run(prompts, MAX_TOKENS, rows)]


@pytest.mark.usefixtures("for_all_steps")
@pytest.mark.parametrize(("arch", "batch_invariant"), [("llama", False), ("gemma3_text", False), ("gemma3_text", True)])
def test_tokens_are_those_of_eager_steps(
    arch: str, batch_invariant: bool, worker: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random batches with preemptions and forks, with full attention and sliding windows."""
    monkeypatch.setattr(TritonAttention.__init__, "__kwdefaults__", {"batch_invariant": batch_invariant})
    if arch != "llama":
        make_model(arch, tmp_path, **SMALL, layer_types=["sliding_attention"])
        worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 1, 4)
    found, double = use_graphs(worker)
    assert generate(worker, 1, 4) == expected
    assert double.num_replays > len(found.kinds) >= 3
    assert {kind.num_rows for kind in found.kinds} <= {1, 2, 4, MAX_NUM_SEQS}
    assert {kind.is_decode for kind in found.kinds} == {True, False}


def chunks(worker: Rank, lengths: list[int], steps: list[list[tuple[int, int]]]) -> list[list[int]]:
    """Run steps of chunks (index of the prompt, tokens), and of a decode row for each prompt that is over. Return the tokens
    of each step."""
    results, fed = list[list[int]](), [0] * len(lengths)
    for number, step in enumerate(steps):
        num_tokens = num_sampled = sum(count == length for count, length in zip(fed, lengths, strict=True))
        new, rows = list[NewSequence](), list[StepRow]()
        for index, count in step:
            if fed[index] == 0:
                tokens = [(7 * index + 3 * place) % VOCAB_SIZE for place in range(lengths[index])]
                new.append(NewSequence(SeqId(index), tokens, len(tokens), SAMPLING[index % len(SAMPLING)]))
            blocks = [] if fed[index] else list(range(1 + 30 * index, 31 + 30 * index))
            rows.append(StepRow(SeqId(index), fed[index], count, blocks))
            fed[index] += count
            num_tokens, num_sampled = num_tokens + count, num_sampled + (fed[index] == lengths[index])
        worker.launch(StepPlan(StepId(number), 1, 1, num_tokens, num_sampled, rows, new))
        results.append(worker.collect().token_ids)
    finish_all(worker)
    return results


@pytest.mark.usefixtures("for_all_steps")
def test_steps_with_rows_of_several_tokens_have_graphs_by_their_tokens(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that yield a token and that do not, alone and beside decode rows, and more than a graph has space for."""
    lengths = [43, 20, 61, 4, 4]
    steps = [[(0, 5)], [(0, 38)], [(1, 20)], [(2, 61)], [(3, 4), (4, 4)], []]
    few = ([4, 4], [[(0, 4), (1, 4)]])
    expected = chunks(worker, lengths, steps), chunks(worker, *few)
    found, double = use_graphs(worker)
    assert chunks(worker, lengths, steps) == expected[0]
    assert {kind.num_tokens for kind in found.kinds} == {0, 8, 16, 32, 64}
    assert double.num_replays == len(steps) - 1, "one step has too many tokens"
    monkeypatch.setattr(graphs, "MOST_TILED", 1)
    assert chunks(worker, *few) == expected[1]
    assert double.num_replays == len(steps) - 1, "this one has too many prompts"


@pytest.mark.usefixtures("for_all_steps")
@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, TypeError])
def test_decode_steps_have_graphs_also_where_the_capture_of_others_fails(
    kind: type[Exception], worker: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's compiler raises errors of its own."""
    lengths, steps = [4, 5], [[(0, 4)], [(1, 5)], []]
    expected = chunks(worker, lengths, steps)
    found, double = use_graphs(worker)
    failures = [kind("not permitted")]

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        if failures:
            raise failures.pop()
        return double(compute)

    monkeypatch.setattr(found, "_capture", capture)
    assert chunks(worker, lengths, steps) == expected
    assert [kind.is_decode for kind in found.kinds] == [True] * len(found.kinds) != []
    assert "no more graphs for steps with prompts: those that have none are slower: not permitted" in caplog.text


def test_graphs_for_which_memory_was_short_are_captured_some_steps_later(
    worker: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ahead(worker, [GREEDY])
    found, double = use_graphs(worker)
    monkeypatch.setattr(graphs, "NO_MEMORY_PAUSE_STEPS", 7)
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        if failures:
            raise failures.pop()
        return double(compute)

    monkeypatch.setattr(found, "_capture", capture)
    assert ahead(worker, [GREEDY]) == expected
    worker.do_idle_work()
    assert not found.kinds and not worker.has_idle_work, "neither in a step nor while there is nothing to do"
    assert "no more graphs for the next 7 decode steps: those that have none are slower: CUDA out" in caplog.text
    assert ahead(worker, [GREEDY]) == ahead(worker, [GREEDY]) == expected
    assert found.kinds and double.num_replays > 0


def test_few_rows_yield_the_tokens_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, and with norms behind attention and MLP."""
    make_model("gemma3_text", tmp_path, **SMALL, layer_types=["sliding_attention"], attention_bias=True)
    kernels, calls = importlib.import_module("millrace.worker.kernels.rows_triton"), list[bool]()
    multiply_few = FewRowsLinear.multiply_few

    def multiply(layer: FewRowsLinear, *given: Any, **options: Any) -> bool:
        calls.append(multiply_few(layer, *given, **options))
        return calls[-1]

    monkeypatch.setattr(FewRowsLinear, "multiply_few", multiply)
    monkeypatch.setattr(
        *(rank_model, "choose_operations"),
        lambda _, dtype, device, **options: DeviceOperations(TritonAttention(), dtype, device, kernels),
    )
    worker = start_worker(tmp_path, max_num_seqs=1)
    with monkeypatch.context() as patch:
        patch.setattr(linear_triton, "MOST_FEW_ROWS", 0)
        expected = ahead(worker, [GREEDY])
    calls.clear()
    assert ahead(worker, [GREEDY]) == expected
    assert calls.count(True) == 5 * 5 - 1, "four layers and the head in each step, but one where five rows begin"


@pytest.mark.usefixtures("for_all_steps")
def test_what_most_steps_need_is_captured_while_nothing_is_to_do(worker: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ahead(worker, [LIMITED, DRAWN]), ahead(worker, [GREEDY])
    assert worker.runner is not None and not worker.has_idle_work
    found, double = add_graphs(worker.runner, max_num_seqs=2)
    draws = count(monkeypatch, sampling_triton, "sample")
    while worker.has_idle_work:
        before = double.num_captures
        assert not draws
        worker.do_idle_work()
        assert double.num_captures + bool(draws) == before + 1, "the next step waits for one capture at most"
    assert len(draws) == 3, "greedy, by temperature and by top_k"
    decodes = [Kind(size, SPACE, True, has_limits) for size in (1, 2) for has_limits in (False, True)]
    prompts = [Kind(2, SPACE, False, False, num_tokens) for num_tokens in (8, 16)]
    assert found.kinds == sorted([*decodes, *prompts])
    num_captures = double.num_captures
    assert (ahead(worker, [LIMITED, DRAWN]), ahead(worker, [GREEDY])) == expected
    assert (double.num_captures, double.num_replays) == (num_captures, 10), "a step ran without a graph of its own"


def test_a_runner_with_graphs_is_gone_at_once(worker: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lives, a rank that sleeps gives no memory back."""
    monkeypatch.setattr("millrace.worker.capture.CudaCapture", lambda: None)
    monkeypatch.setattr(rank_model.RankModel, "uses_graphs", True)
    runner = Runner(worker._model, worker.runner._pool, 2)  # type: ignore[union-attr]
    runner._device = torch.device("cuda")
    runner._graphs = runner._make_graphs(worker._model, 2)
    reference = weakref.ref(runner)
    gc.disable()
    try:
        assert runner._graphs is not None
        del runner
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["_inputs", "_capture"])
def test_the_graphs_from_before_a_capture_that_fails_are_used_further(
    where: str, worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ahead(worker, [LIMITED])
    assert worker.runner is not None
    found, double = add_graphs(worker.runner, max_num_seqs=2)
    worker.do_idle_work()

    def fails(_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(found, where, fails)
    for _ in range(2):  # the second one compiles draws
        worker.do_idle_work()
    assert not worker.has_idle_work
    assert ahead(worker, [LIMITED]) == expected
    assert (double.num_captures, double.num_replays, double.num_padded) == (1, 3, 3)


@pytest.mark.parametrize(("num_rows", "first"), [(1, DRAWN), (3, LIMITED), (5, DRAWN), (6, GREEDY)])
def test_steps_of_each_size_yield_the_tokens_of_eager_steps(
    num_rows: int, first: RowSampling, worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [first, *([GREEDY, DRAWN] * num_rows)][:num_rows]
    expected = ahead(worker, rows)
    found, double = use_graphs(worker)
    eager, copies = count(monkeypatch, InputBatch, "send"), count(monkeypatch, FixedBuffer, "filling")
    assert ahead(worker, rows) == expected
    assert (len(eager), len(copies)) == (2, 3), "a step with a graph is one copy to the device"
    size = min(1 << (num_rows - 1).bit_length(), MAX_NUM_SEQS)
    kinds = {Kind(rows, SPACE, draws=True, has_limits=first is LIMITED) for rows in (size, MAX_NUM_SEQS)}
    assert found.kinds == sorted(kinds)  # the largest one was captured in the first step
    assert (double.num_captures, double.num_replays) == (len(kinds), 3)
    assert double.num_padded == (3 if num_rows < size else len(kinds) - 1)


@pytest.mark.parametrize("name", ["penalties", "min_tokens", "logprobs"])
def test_rows_with_processors_are_drawn_behind_the_graph(name: str, worker: Rank) -> None:
    rows = [DRAWN, ROWS[name], LIMITED]
    expected = ahead(worker, rows)
    found, double = use_graphs(worker)
    assert ahead(worker, rows) == expected
    assert found.kinds == [Kind(size, SPACE, draws=False) for size in (4, MAX_NUM_SEQS)]
    assert double.num_padded == 3


@pytest.mark.parametrize("most_chunks", [8192, 12])
def test_long_rows_have_graphs_of_their_own(most_chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_CHUNKS", most_chunks)
    monkeypatch.setattr(graph_kinds, "LEAST_CHUNKS", 1)
    monkeypatch.setattr(graphs, "MOST_TOKENS", 0)
    for module in ("attention.triton", "graphs", "graph_kinds"):
        monkeypatch.setattr(f"millrace.worker.{module}.CHUNK", 32)
    make_model("mistral", tmp_path, **SMALL)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 2, 3, 40, preempts=False)
    found, _ = use_graphs(worker)
    assert generate(worker, 2, 3, 40, preempts=False) == expected
    assert {kind.num_chunks for kind in found.kinds} == {1, 4}


def test_graphs_are_captured_again_when_a_buffer_has_grown_and_not_again_and_again_where_that_fails(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(worker, 3, 2)
    found, double = use_graphs(worker)
    assert generate(worker, 3, 2) == expected
    assert worker.runner is not None and worker.runner.decoder is not None

    def grow_slots() -> None:
        sequences = worker.runner._sequences  # type: ignore[union-attr]
        taken = [sequences._take_slot() for _ in range(sequences.num_slots + 1)]
        sequences._free_slots += taken

    for change in (worker.runner.decoder._workspace.clear, grow_slots):
        num_replays = double.num_replays
        change()
        assert generate(worker, 3, 2) == expected
        assert double.num_replays > num_replays and found.kinds
    calls = []

    def fails(compute: Callable[[], Tensor]) -> Any:
        calls.append(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(found, "_capture", fails)
    worker.runner.decoder._workspace.clear()
    assert generate(worker, 3, 2) == expected
    assert (len(calls), found.kinds) == (1, [])


def test_while_captures_pause_a_larger_graph_runs_and_steps_with_too_many_chunks_run_none(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ahead(worker, [LIMITED] * 5), ahead(worker, [GREEDY] * 2)
    monkeypatch.setattr(graphs, "CAPTURE_PAUSE_STEPS", 1000)
    found, double = use_graphs(worker)
    assert (ahead(worker, [LIMITED] * 5), ahead(worker, [GREEDY] * 2)) == expected
    assert len(found.kinds) == 1 and double.num_replays == 6
    monkeypatch.setattr(graphs, "MOST_CHUNKS", 0)
    assert ahead(worker, [GREEDY] * 2) == expected[1]
    assert double.num_replays == 6


def test_steps_behind_an_error_and_a_sleep_yield_the_same_tokens(worker: Rank) -> None:
    rows = [GREEDY, LIMITED, DRAWN]
    expected = ahead(worker, rows)
    found, _ = use_graphs(worker)
    ahead(worker, rows)

    def fails() -> None:
        raise torch.OutOfMemoryError

    captured = dict(found._graphs)
    found._graphs.update({kind: replace(graph, replay=fails) for kind, graph in captured.items()})
    with pytest.raises(torch.OutOfMemoryError):
        ahead(worker, rows)
    found._graphs.update(captured)
    finish_all(worker)
    assert ahead(worker, rows) == expected
    for level in (1, 2):
        worker.sleep(level)
        worker.wake_up(["weights", "kv_cache"], 1)
        _, double = use_graphs(worker)
        assert ahead(worker, rows) == expected
        assert double.num_replays == 3


@pytest.mark.usefixtures("for_all_steps")
def test_the_memory_profile_has_the_largest_graph_and_the_pool_no_more_than_sequences_can_use(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, made = worker._model.facts, list[Any]()
    total, used, reserved, peak = 4 << 20, 1 << 20, 1 << 19, 2 << 20
    figures: dict[str, Any] = {
        "mem_get_info": (total - used, total),
        "memory_reserved": reserved,
        "max_memory_reserved": peak + 2 * facts.kv_bytes_per_block,
        "get_device_properties": SimpleNamespace(total_memory=total),
    }
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, figure=figure: figure)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    make_runner, add, captured = worker._make_runner, StepGraphs._add, list[Kind]()

    def record_and_add(found: StepGraphs, kind: Kind, *others: Any) -> None:
        captured.append(kind)
        add(found, kind, *others)

    monkeypatch.setattr(StepGraphs, "_add", record_and_add)

    def make_with_graphs(pool: KVPool) -> Runner:
        made.append(make_runner(pool))
        add_graphs(made[0], width=128)
        return made[0]

    monkeypatch.setattr(worker, "_make_runner", make_with_graphs)
    monkeypatch.setattr(worker, "_device", torch.device("cuda"))
    monkeypatch.setattr(worker, "_config", structs.replace(worker._config, num_blocks=None))
    layout = structs.replace(facts.kv_layout, max_step_tokens=8)
    monkeypatch.setattr(worker._model, "facts", structs.replace(facts, kv_layout=layout))
    assert worker._profile_gpu() == int(total * 0.9) - (used - reserved) - peak
    kinds = [(False, False, 8), (True, True, 0)]
    assert captured == [Kind(MAX_NUM_SEQS, SPACE, *others) for others in kinds]
    made.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    assert worker._num_device_blocks() == MAX_NUM_SEQS * layout.num_blocks(facts.max_model_len) + 1
