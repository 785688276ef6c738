"""What the tests of graphs share: a worker that runs on the CPU what it runs on a GPU, and the double of a capture. Their
fixtures are in `conftest.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.executor.wire.messages import RowSampling, SeqId, StepId, StepPlan
from millrace.worker import graph_kinds, graphs, rank, rank_model
from millrace.worker import runner as runner_module
from millrace.worker.attention import triton as triton_attention
from millrace.worker.attention.triton import TritonAttention
from millrace.worker.capture import Replay
from millrace.worker.fusion.device import DeviceOperations
from millrace.worker.graph_kinds import LEAST_CHUNKS
from millrace.worker.graphs import StepGraphs
from millrace.worker.input_batch import NO_SLOT, StepBatch
from millrace.worker.kernels import rows_torch
from millrace.worker.kv_pool import LayerCache
from millrace.worker.rank import Rank
from millrace.worker.runner import Runner
from tests.worker.driver import GREEDY, Driver
from tests.worker.models import VOCAB_SIZE
from tests.worker.test_no_waiting import run_ahead

MAX_NUM_SEQS, MAX_TOKENS = 6, 4
SPACE = LEAST_CHUNKS
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 192,
}
DRAWN, LIMITED = RowSampling(0.9, 0, 1.0, 0.01, 7, 0, 0, []), RowSampling(0.9, 20, 0.9, 0.0, 7, 0, 0, [])
SAMPLING = [GREEDY, LIMITED, DRAWN]


def patch_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker of this process run on the CPU what it runs on a GPU."""

    def choose(_: TritonAttention, dtype: torch.dtype, device: torch.device, **options: Any) -> DeviceOperations:
        return DeviceOperations(TritonAttention(), dtype, device, rows_torch)

    monkeypatch.setattr(TritonAttention, "forward_projected", rotate_in_torch)
    monkeypatch.setattr(triton_attention, "_num_resident", lambda *_: 1)
    monkeypatch.setattr(rank, "choose_attention", lambda *_, **options: TritonAttention())
    monkeypatch.setattr(rank_model, "choose_operations", choose)
    monkeypatch.setattr(runner_module, "to_host", torch.clone)  # the copy of a GPU's memory
    monkeypatch.setattr(graphs, "CAPTURE_PAUSE_STEPS", 0)
    monkeypatch.setattr(graphs, "MOST_TILED", MAX_NUM_SEQS)  # each unused place takes the interpreter time
    monkeypatch.setattr(graph_kinds, "LEAST_TOKENS", 8)  # and so does each token that pads a step


def rotate_in_torch(
    self: TritonAttention,
    projected: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    num_heads: int,
    layer: LayerCache,
    scaling: float,
    window: int | None,
    softcap: float | None,
    batch: StepBatch,
    sinks: Tensor | None = None,
) -> Tensor:
    """Do what `forward_projected` does, without its kernel, which would take a third of the time of these tests."""
    num_kv_heads, dim = layer.keys.shape[2:]
    self._cut_rows(projected.dtype, num_heads, layer, window, batch)
    rotated = projected.new_empty(len(projected), (num_heads + num_kv_heads) * dim)
    rows_torch.norm_and_rotate(projected, batch.positions[0], tables, norms, epsilon, num_heads, dim, rotated)
    heads = torch.cat([rotated, projected[:, rotated.shape[1] :]], 1).view(len(projected), -1, dim).transpose(0, 1)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads])
    slots = batch.token_blocks[:, layer.group].long() * batch.block_size + batch.positions[0] % batch.block_size
    layer.write(key, value, slots)
    return self.attend(query, layer, scaling, window, softcap, batch, sinks)


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

    def _addresses(self) -> dict[Any, int]:
        decoder = self._runner.decoder
        assert decoder is not None
        found: dict[Any, int] = {key: buffer.data_ptr() for key, buffer in decoder._workspace._buffers.items()}
        return found | {"last tokens": self._runner._sequences.last_tokens.data_ptr()}


def use_graphs(worker: Rank, **options: bool) -> tuple[StepGraphs, CaptureDouble]:
    assert worker.runner is not None
    return add_graphs(worker.runner, **options)


def add_graphs(
    runner: Runner,
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    is_alone: bool = True,
    decodes_only: bool = False,
    width: int = 32,
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
        decodes_only=decodes_only,
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
