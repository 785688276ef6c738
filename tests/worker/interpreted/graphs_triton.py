"""Steps as graphs, with a double that runs the same function again, and watches what a GPU's graph relies on."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.executor.wire.messages import NewSequence, SeqId, StepId, StepPlan, StepRow
from millrace.worker import graphs, rank_model, sampling_triton
from millrace.worker.attention.triton import TritonAttention
from millrace.worker.capture import Replay
from millrace.worker.fusion.device import DeviceOperations
from millrace.worker.graph_kinds import Kind
from millrace.worker.linear import linear_triton
from millrace.worker.linear.linear_triton import FewRowsLinear
from millrace.worker.rank import Rank
from millrace.worker.recurrent import states
from millrace.worker.recurrent.mixer_triton import TritonMixer
from millrace.worker.runner import Runner
from tests.worker.driver import GREEDY, Driver, start_worker
from tests.worker.interpreted.graph_steps import (
    DRAWN,
    LIMITED,
    MAX_NUM_SEQS,
    SAMPLING,
    SMALL,
    SPACE,
    add_graphs,
    ahead,
    count,
    finish_all,
    generate,
    use_graphs,
)
from tests.worker.models import VOCAB_SIZE, WINDOW, make_model

pytestmark = pytest.mark.usefixtures("triton_on_this_cpu")


@pytest.mark.usefixtures("for_all_steps")
@pytest.mark.parametrize(
    ("arch", "batch_invariant"),
    [("llama", False), ("gemma3_text", False), ("gemma3_text", True), ("attention sinks", False)],
)
def test_tokens_are_those_of_eager_steps(
    arch: str, batch_invariant: bool, worker: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random batches with preemptions and forks, with full attention and sliding windows."""
    monkeypatch.setattr(TritonAttention.__init__, "__kwdefaults__", {"batch_invariant": batch_invariant})
    if arch == "attention sinks":
        make_model("llama", tmp_path, **SMALL, model_type="granite_swa", rope_parameters=None, sliding_window=WINDOW)
    elif arch != "llama":
        make_model(arch, tmp_path, **SMALL, layer_types=["sliding_attention"])
    if arch != "llama":
        worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    expected = generate(worker, 1, 4)
    found, double = use_graphs(worker)
    assert generate(worker, 1, 4) == expected
    assert double.num_replays > len(found.kinds) >= 3
    assert {kind.num_rows for kind in found.kinds} <= {1, 2, 4, MAX_NUM_SEQS}
    assert {kind.is_decode for kind in found.kinds} == {True, False}


@pytest.mark.usefixtures("for_all_steps")
def test_decode_steps_of_recurrent_layers_are_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside eager steps of prompts, with sequences that come and go."""
    monkeypatch.setattr(states, "_find_operation", lambda _, rounds: TritonMixer)
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    make_model("qwen3_5", tmp_path, **SMALL | layers)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)

    def outputs() -> list[list[int]]:
        prompts = [[5, 9, 30], [7], [200, 300], [8, 8], [41]]
        rows = [SAMPLING[index % len(SAMPLING)] for index in range(len(prompts))]
        return [request.output for request in Driver(worker, 1, keeps_logits=False).run(prompts, 6, rows)]

    expected = outputs()
    found, double = use_graphs(worker, decodes_only=True)
    assert outputs() == expected
    assert double.num_replays > len(found.kinds) >= 2
    assert all(kind.is_decode for kind in found.kinds)


def chunks(worker: Rank, lengths: list[int], steps: list[list[tuple[int, int]]]) -> list[list[int]]:
    """Run steps of chunks (index of the prompt, tokens), and of a decode row for each prompt that is over. Return the tokens
    of each step."""
    results, fed = list[list[int]](), [0] * len(lengths)
    for number, step in enumerate(steps):
        num_tokens = num_sampled = sum(count == length for count, length in zip(fed, lengths, strict=True))
        new, rows = list[NewSequence](), list[StepRow]()
        for index, num_fed in step:
            if fed[index] == 0:
                tokens = [(7 * index + 3 * place) % VOCAB_SIZE for place in range(lengths[index])]
                new.append(NewSequence(SeqId(index), tokens, len(tokens), SAMPLING[index % len(SAMPLING)]))
            blocks = [] if fed[index] else list(range(1 + 30 * index, 31 + 30 * index))
            rows.append(StepRow(SeqId(index), fed[index], num_fed, blocks))
            fed[index] += num_fed
            num_tokens, num_sampled = num_tokens + num_fed, num_sampled + (fed[index] == lengths[index])
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
    monkeypatch.setattr(found, "_most_tiled", 1)
    assert chunks(worker, *few) == expected[1]
    assert double.num_replays == len(steps) - 1, "this one has too many prompts"


@pytest.mark.usefixtures("for_all_steps")
def test_the_head_of_a_step_with_prompts_has_as_many_rows_as_a_graph(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA loads the kernel for another number of rows when it is first launched, and waits for all steps meanwhile."""
    lengths, steps = [4, 5, 3, 2, 6], [[(0, 4), (1, 5), (2, 3)], [(3, 2), (4, 5)], [(4, 1)]]
    expected, num_rows = chunks(worker, lengths, steps), list[int]()
    use_graphs(worker)
    assert worker.runner is not None and worker.runner.decoder is not None
    decoder = worker.runner.decoder
    logits = decoder.logits

    def count_rows(hidden: Tensor) -> Tensor:
        num_rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(decoder, "logits", count_rows)
    assert chunks(worker, lengths, steps) == expected
    assert set(num_rows) <= {1, 2, 4, MAX_NUM_SEQS}


@pytest.mark.usefixtures("for_all_steps")
def test_batch_invariant_steps_with_prompts_have_graphs_however_many_decode_rows_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows are tiles there too, and the limit for prompts is none for them."""
    monkeypatch.setattr(TritonAttention.__init__, "__kwdefaults__", {"batch_invariant": True})
    monkeypatch.setattr(graphs, "MOST_TILED", 1)
    make_model("llama", tmp_path, **SMALL)
    worker = start_worker(tmp_path, max_num_seqs=MAX_NUM_SEQS)
    lengths, steps = [4, 5, 3], [[(0, 4)], [(1, 5)], [(2, 3)]]
    expected = chunks(worker, lengths, steps)
    found, double = use_graphs(worker)
    assert chunks(worker, lengths, steps) == expected
    assert double.num_replays == len(steps) and found.kinds


@pytest.mark.usefixtures("for_all_steps")
@pytest.mark.parametrize("kind", [RuntimeError, TypeError])
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
    error = RuntimeError("Triton Error [CUDA]: out of memory")
    failures = [error]

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        if failures:
            raise failures.pop()
        return double(compute)

    monkeypatch.setattr(found, "_capture", capture)
    assert ahead(worker, [GREEDY]) == expected
    worker.do_idle_work()
    assert not found.kinds and not worker.has_idle_work, "neither in a step nor while there is nothing to do"
    assert f"no more graphs for the next 7 decode steps: those that have none are slower: {error}" in caplog.text
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


def test_the_graphs_from_before_a_capture_that_fails_are_used_further(
    worker: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ahead(worker, [LIMITED])
    assert worker.runner is not None
    found, double = add_graphs(worker.runner, max_num_seqs=2)
    worker.do_idle_work()

    def fails(*_: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(found, "_inputs", fails)
    worker.do_idle_work()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", fails)
        worker.do_idle_work()  # compiles draws
    assert not worker.has_idle_work
    assert ahead(worker, [LIMITED]) == expected
    assert (double.num_captures, double.num_replays, double.num_padded) == (1, 3, 3)
