"""A step on a GPU does not wait for the device, whatever its rows want. A double takes the place of the GPU, and the tokens
are those of the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from msgspec import structs
from torch import Tensor

from millrace.executor.wire.messages import (
    LogitsSettings,
    NewSequence,
    RowSampling,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
    StepRow,
    ThinkingLimit,
)
from millrace.worker import runner as runner_module
from millrace.worker.grammars import Grammars
from millrace.worker.input_batch import StepBatch
from millrace.worker.kv_pool import KVPool, LayerSpec
from millrace.worker.processors.penalties import WIDTH_UNIT
from millrace.worker.runner import Runner
from millrace.worker.sampler import sample
from millrace.worker.sampling_rows import SamplingRows
from millrace.worker.transfer import FixedBuffer, HostCopy, to_device
from tests.worker.device_double import DEVICE, DeviceDouble, DeviceTensor, Waited

VOCAB_SIZE = 257
NUM_STEPS = 2 * WIDTH_UNIT + 20
BLOCK_SIZE = 4
PROMPT = [5, 9, 9, 200]
BLOCKS_PER_SEQUENCE = -(-(len(PROMPT) + NUM_STEPS + 40) // BLOCK_SIZE)
CPU = torch.device("cpu")

GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])


def greedy(**settings: Any) -> RowSampling:
    return RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [], LogitsSettings(**settings))


ROWS = {
    "plain": GREEDY,
    "random": RowSampling(0.9, 20, 0.9, 0.01, 7, 0, 0, []),
    "penalties": greedy(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "output_penalties": greedy(presence_penalty=2.0),
    "bad_words": greedy(bad_words=[[3], [4, 5], [6, 7, 8]]),
    "logit_bias": greedy(logit_bias={3: 4.0, 9: -100.0}),
    "allowed": greedy(allowed_token_ids=[1, 2, 3, 50, 60]),
    "thinking": greedy(thinking=ThinkingLimit(3, 9, 11)),
    "min_tokens": RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 50, [3, 4]),
    "logprobs": RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [], None, 3, 2),
    "grammar": structs.replace(GREEDY, grammar=LLMatcher.grammar_from_regex("[a-z ]{500,}")),
}


class TableDecoder:
    """A model whose logits depend on the last token alone."""

    has_argmax = False
    num_buffers_made = 0

    def __init__(self, device: torch.device) -> None:
        table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
        self._table = DeviceTensor(table) if device == DEVICE else table.to(device)

    def run(self, batch: StepBatch, received: None) -> Tensor:
        return self._table[batch.input_ids[0]][batch.sample_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


def make_runner(device: torch.device) -> Runner:
    grammars = Grammars(lambda: LLTokenizer("byte"), 1)
    facts = SimpleNamespace(max_model_len=BLOCKS_PER_SEQUENCE * BLOCK_SIZE)
    module = SimpleNamespace(device=device)
    pool = KVPool([LayerSpec(0, 1, 2, 2, None)], 4, BLOCK_SIZE, torch.float32, device)
    parts = {"module": module, "attention": None, "decoder": None, "states": None, "facts": facts, "grammars": grammars}
    model: Any = SimpleNamespace(**parts)
    with torch.inference_mode():
        runner = Runner(model, pool, 2)
        runner.decoder = TableDecoder(device)  # type: ignore[assignment]
    return runner


def run_ahead(runner: Runner, rows: list[RowSampling], num_steps: int = 12, *, num_more: int = 3) -> list[StepResult]:
    """Run the prompts and decode steps. Each step is launched before the one before it is collected. Each prompt has
    `num_more` tokens more than the one before it. In the middle the first sequence is replaced by one with the same
    settings and more tokens. In a small pool sequences share blocks."""
    results, count = [], BLOCKS_PER_SEQUENCE
    blocks = [1 + i % (runner._pool.num_blocks - 1) for i in range((len(rows) + 1) * count)]
    for number in range(num_steps + 1):
        starts = {0: range(len(rows)), num_steps // 2: [len(rows)]}.get(number, [])
        tokens = {index: PROMPT + list(range(20, 20 + index * num_more)) for index in starts}
        new = [NewSequence(SeqId(i), tokens[i], len(PROMPT), rows[i % len(rows)]) for i in starts]
        listed = [StepRow(SeqId(i), 0, len(tokens[i]), blocks[i * count : (i + 1) * count]) for i in starts]
        finished = [SeqId(0)] if number == num_steps // 2 else []
        num_tokens = sum(map(len, tokens.values())) + (len(rows) - len(starts))
        plan = StepPlan(StepId(number), 1, 1 if number == 0 else 2, num_tokens, len(rows), listed, new, finished)
        runner.launch(plan)
        if number:
            results.append(runner.collect())
    return [*results, runner.collect()]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceDouble:
    device = DeviceDouble()
    device.install(monkeypatch)

    def draw(logits: Tensor, rows: SamplingRows) -> Tensor:
        """As the Triton kernels: processors on the device, settings of the draw on the host."""
        if not isinstance(logits, DeviceTensor):
            return sample(logits, rows)
        logits = logits if rows.processors is None else rows.processors.apply(logits.contiguous())
        assert isinstance(logits, DeviceTensor)
        return DeviceTensor(sample(logits.on_host.clone(), rows.select(torch.arange(rows.num_rows))))

    monkeypatch.setattr(runner_module, "sample", draw)
    return device


@pytest.mark.parametrize("name", [*ROWS, "all"])
def test_a_step_does_not_wait_and_yields_the_tokens_of_the_cpu(name: str, device: DeviceDouble) -> None:
    rows = list(ROWS.values()) if name == "all" else [ROWS[name], GREEDY]
    num_steps = NUM_STEPS if name in ("all", "penalties") else 12
    expected = run_ahead(make_runner(CPU), rows, num_steps)
    with device:
        results = run_ahead(make_runner(DEVICE), rows, num_steps)
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]
    assert [each.failures for each in results] == [each.failures for each in expected]
    assert [each.logprobs for each in results] == [each.logprobs for each in expected]
    assert [each.prompt_logprobs for each in results] == [each.prompt_logprobs for each in expected]


def test_a_step_is_one_copy_and_its_processors_another_one(device: DeviceDouble) -> None:
    for name, per_step in {"plain": 1, "penalties": 2}.items():
        with device:
            runner = make_runner(DEVICE)
            before = device.num_uploads
            num_steps = len(run_ahead(runner, [ROWS[name], GREEDY]))
        num_starts = 2 * (2 if name == "penalties" else 1)  # the first tokens, and the tables of penalties
        assert device.num_uploads - before == per_step * num_steps + num_starts


def test_tensors_that_stay_are_filled_by_one_copy(device: DeviceDouble) -> None:
    with device:
        buffer = FixedBuffer(DEVICE, [((3,), torch.int64), ((2, 1), torch.float32)])
        for number in (1, 2):
            before = device.num_uploads
            with buffer.filling() as (ids, weights):
                ids[number:], weights[:] = number, number / 2
            assert device.num_uploads == before + 1
            values = [each.on_host.tolist() for each in buffer.tensors if isinstance(each, DeviceTensor)]
            assert values == [[0, number * (number < 2), number], [[number / 2]] * 2]


def test_blocks_are_copied_without_waiting(device: DeviceDouble) -> None:
    with torch.inference_mode(), device:
        pool = KVPool([LayerSpec(0, 1, 2, 2, None)], 4, BLOCK_SIZE, torch.float32, DEVICE)
        pool.copy_blocks([(1, 2), (3, 0)])


def test_the_double_notices_each_way_to_wait(device: DeviceDouble) -> None:
    with torch.inference_mode(), device:
        (numbers,) = to_device(DEVICE, [torch.tensor([1, 2, 3])])
        copied = HostCopy(numbers)
        assert not copied.is_ready() and copied.tolist() == [1, 2, 3]
        for wait in (
            lambda: numbers.sum().item(),
            lambda: bool(numbers.any()),
            lambda: numbers.cpu(),
            lambda: numbers.to("cpu", non_blocking=True),
            lambda: numbers.nonzero(),
            lambda: numbers[numbers > 1],
            lambda: torch.tensor([1, 2]).to(DEVICE, non_blocking=True),
            lambda: device.pin(torch.tensor([1, 2])).to(DEVICE),
            lambda: numbers + torch.tensor([1, 2, 3], device=DEVICE),
            lambda: numbers[torch.tensor([0])],
            lambda: numbers.__setitem__(0, torch.tensor(5)),
            lambda: torch.empty(3, dtype=torch.int64).copy_(numbers, non_blocking=True),
            lambda: numbers.repeat_interleave(numbers),
        ):
            with pytest.raises(Waited):
                wait()
