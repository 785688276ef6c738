"""Replaces the forward pass of a recognised model, if it gives the numbers of transformers' own.

Shapes: T tokens of the step, V token ids.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.executor.wire.messages import NewSequence, RowSampling, SeqId, StepId, StepPlan, StepRow
from millrace.worker.attention.interface import STEP_KEYWORD, Attention, ForwardStep
from millrace.worker.fusion.decoder import DecoderWeights, FusedDecoder
from millrace.worker.fusion.operations import Operations
from millrace.worker.fusion.structure import NotRecognised, read_structure
from millrace.worker.input_batch import InputBatch, StepBatch
from millrace.worker.kv_pool import KVPool, LayerSpec, num_blocks_for
from millrace.worker.parallel.stages import StageInput, find_stage_input
from millrace.worker.recurrent.states import RecurrentStates

logger = logging.getLogger("millrace.worker")

LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Between the logits of both forward passes: the mean of a row, relative to the standard deviation of all. Between
transformers in bfloat16 and in float32 it is about 0.02."""
BLOCK_SIZE = 16
POOL_BLOCKS = 10
CHUNK_TOKENS = 19
DECODED_POSITION = 45
"""These two: more than a block, and not a multiple of vectors."""


class FusionRejected(Exception):
    """Raised when the fused forward pass gives other numbers. The model's weights are packed then: load it again."""


@torch.no_grad()  # not inference_mode: the weights are ordinary tensors
def fuse(
    model: PreTrainedModel,
    specs: list[LayerSpec],
    max_model_len: int,
    attention: Attention,
    operations: Operations,
    states: RecurrentStates,
) -> DecoderWeights | None:
    """Return the weights for a forward pass of our own, or None if the model's structure is not known.

    Takes the weights one after the other, so that they are not in memory twice. Raises `FusionRejected`.
    """
    began_s = time.perf_counter()
    name = type(model).__name__
    dtype, device = operations.workspace.dtype, model.device
    try:
        parts = read_structure(model, specs, max_model_len, states.mixers)
    except NotRecognised as reason:
        logger.info("%s runs through transformers' modules, which is slower: %s", name, reason)
        return None
    batch, few = (_batch(model.config.vocab_size, max_model_len, device, rows) for rows in (range(3), range(1, 3)))
    theirs, ours = _pools(specs, dtype, device)
    stage_input = find_stage_input(model)
    received = None if stage_input is None else _hidden_states(model, batch, dtype)
    _begin_anew(states, batch)
    expected = _results(model, ForwardStep(attention, theirs.layers, batch), batch, stage_input, received)
    weights = DecoderWeights(parts, operations)
    decoder = FusedDecoder(weights, ours)
    differences = []
    for each in (batch, few):  # few rows may have kernels of their own
        _begin_anew(states, each)
        hidden = None if received is None else received[-each.input_ids.shape[1] :]
        differences.append(_differences(decoder, each, hidden, expected))
    difference = float(torch.cat(differences).max() / expected.std())
    if not difference <= LARGEST_DIFFERENCE[dtype]:  # NaN is not
        what = "logits" if parts.head is not None else "hidden states"
        raise FusionRejected(f"the {what} of {name} differ by {difference:.2g} of their standard deviation")
    if device.type == "cuda":
        _begin_anew(states, batch)
        weights.waits = waits_for_device(decoder, batch, received)
    states.release()
    operations.quantize_layers()  # not before: the numbers would differ by the rounding
    weights.release_buffers()
    model.register_module("fused", operations.tensors)
    logger.info(
        "fused forward pass of %s: differs by %.2g of the results' standard deviation, made and checked in %.2f s",
        *(name, difference, time.perf_counter() - began_s),
    )
    return weights


def _begin_anew(states: RecurrentStates, batch: StepBatch) -> None:
    """Begin a step whose sequences have no states yet."""
    if states:
        assert batch.on_host is not None
        states.allocate(int(batch.on_host.tensors["token_slots"].max()) + 1)
        states.clear()
        states.begin(batch.on_host)


def _differences(decoder: FusedDecoder, batch: StepBatch, received: Tensor | None, expected: Tensor) -> Tensor:  # [T]
    """Return the mean difference of each row from the last of the logits, or hidden states, that are expected."""
    results = decoder.run(batch, received)
    results = decoder.logits(results) if decoder.is_last_stage else results
    return (results - expected[-len(results) :]).abs().mean(dim=-1)


def waits_for_device(decoder: FusedDecoder, batch: StepBatch, received: Tensor | None) -> bool:
    """Whether a step waits for the GPU. The grouped products of torch do so for experts that are not in bfloat16, and where
    the compute capability is not 9 or 10."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it may not see every wait
            torch.cuda.set_sync_debug_mode("error")
        decoder.run(batch, received)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        logger.warning(
            "each step waits for the GPU in transformers' modules, so it is slower and does not run as a graph"
        )
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _results(
    model: PreTrainedModel,
    step: ForwardStep,
    batch: StepBatch,
    stage_input: StageInput | None,
    received: Tensor | None,  # [T, H]
) -> Tensor:  # [T, V], or [T, H]
    """Return the logits, or the hidden states of a stage before the last one."""
    inputs = {"input_ids": batch.input_ids}
    if stage_input is not None and received is not None:
        stage_input.received = received.unsqueeze(0)
        inputs = {"inputs_embeds": stage_input.received}
    options: dict[str, Any] = {"position_ids": batch.positions, "use_cache": False, STEP_KEYWORD: step}
    if isinstance(model.get_output_embeddings(), nn.Identity):
        results: Tensor = model.base_model(**inputs, **options).last_hidden_state[0]
    else:
        results = model(**inputs, **options).logits[0]
    if stage_input is not None:
        stage_input.received = None
    return results.float()


def _hidden_states(model: PreTrainedModel, batch: StepBatch, dtype: torch.dtype) -> Tensor:  # [T, H]
    shape = (batch.input_ids.shape[1], model.config.hidden_size)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator).to(model.device, dtype)


def _pools(specs: list[LayerSpec], dtype: torch.dtype, device: torch.device) -> tuple[KVPool, KVPool]:
    """Return two pools with the same random contents. All layers have the same block tables here."""
    specs = [replace(spec, group=0) for spec in specs]
    first, second = (KVPool(specs, POOL_BLOCKS, BLOCK_SIZE, dtype, device) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for index, layer in first.layers.items():
        copy = second.layers[index]
        for tensor, other in ((layer.keys, copy.keys), (layer.values, copy.values)):
            tensor.copy_(torch.empty(tensor.shape, dtype=dtype, device="cpu").normal_(generator=generator))
            other.copy_(tensor)
    return first, second


def _batch(vocab_size: int, max_model_len: int, device: torch.device, chosen: Iterable[int]) -> StepBatch:
    """Return a step with some of three rows: a whole prompt, the last chunk of a sequence of `max_model_len` tokens, and a
    decode row. All its tokens yield logits. The rows share blocks that they only read."""
    prompt = min(CHUNK_TOKENS, max_model_len)
    position = min(DECODED_POSITION, max_model_len - 1)
    ends = [(0, prompt), (max(0, max_model_len - 3), max_model_len), (position, position + 1)]
    sampling = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])
    new: list[NewSequence] = []
    rows: list[StepRow] = []
    for index in chosen:
        start, end = ends[index]
        token_ids = [(7919 * (index + 1) * (i + 1)) % vocab_size for i in range(end)]
        num_blocks = num_blocks_for(end, BLOCK_SIZE)
        own = [3 * index + 1, 3 * index + 2][: min(2, num_blocks)]  # what a row writes is in its last two blocks
        blocks = [3 * index + 3] * (num_blocks - len(own)) + own
        new.append(NewSequence(SeqId(index), token_ids, end, sampling))
        rows.append(StepRow(SeqId(index), start, end - start, blocks))
    num_tokens = sum(row.num_tokens for row in rows)
    plan = StepPlan(StepId(0), 0, 1, num_tokens, len(rows), rows, new)
    sequences = InputBatch(len(rows), max_model_len, BLOCK_SIZE, 1, device)
    on_host = sequences.update(plan)
    assert on_host is not None
    return replace(sequences.send(on_host), sample_indices=torch.arange(num_tokens, device=device))
