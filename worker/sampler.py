"""Samples token ids from logits, on the device.

A draw is the token with the largest `logit / temperature - log(exponential variate)` among the ids that min_p, top_k
and top_p leave. This is the Gumbel-max form of sampling from the softmax (Gumbel, Statistical Theory of Extreme Values
and Some Practical Applications, 1954). The three filters become one floor per row: ids with smaller logits are not
drawn. Ids whose logit equals the floor stay, so the order of ids decides nothing.

Shapes: M rows that yield a token, R of them with temperature > 0, V token ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from millrace.executor.wire.messages import NO_TOKEN
from millrace.worker.counter_rng import exponential_variates, next_keys
from millrace.worker.kernels import sampling as compiled
from millrace.worker.kernels.library import find_kernels
from millrace.worker.sampling_rows import SamplingRows
from millrace.worker.transfer import to_device
from millrace.worker.triton_support import find_triton

ENTRIES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Entries of [R, V] that are processed at a time. Bounds the memory, and fits into a CPU's cache."""
TOP_P_WIDTHS = (64, 1024)
"""Numbers of most likely ids that are searched for a top_p floor, before all ids are sorted."""


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draw one token for each row of logits [M, V]. Return the ids [M] on the device of the logits, NO_TOKEN for rows whose
    largest logit is NaN or infinite; -inf means that no id was allowed. May change the logits in place."""
    if logits.is_cuda and find_triton():
        return sample_with_triton(logits, rows)
    kernels = find_kernels() if logits.device.type == "cpu" else None
    logits = _processed(logits.float(), rows, but_grammars=kernels is not None)
    if kernels is None:
        peaks, token_ids = logits.max(dim=-1)
        _draw_in_parts(logits, peaks, token_ids, rows)
    else:
        masks = None if rows.processors is None else rows.processors.grammar_masks()
        peaks, token_ids = compiled.argmax(kernels, logits, masks)
        compiled.draw(kernels, logits, peaks, token_ids, rows)
    return without_failed(peaks, token_ids)


def sample_with_triton(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Do what `sample` does in Triton kernels. The draw of rows without a grammar does not wait for the masks of others."""
    from millrace.worker.sampling_triton import sample as draw

    logits, processors = _processed(logits, rows, but_grammars=True), rows.processors
    masked = processors.grammar_rows if processors is not None else None
    if processors is None or masked is None:
        return draw(logits, rows)
    is_free = torch.ones(rows.num_rows, dtype=torch.bool, device="cpu")
    is_free[masked.row_indices] = False
    if not is_free.any():
        processors.apply_masks(logits)
        return draw(logits, rows)
    free, others = is_free.nonzero().squeeze(1), (~is_free).nonzero().squeeze(1)
    free_on_device, others_on_device = to_device(logits.device, [free, others])
    token_ids = torch.empty(rows.num_rows, dtype=torch.int64, device=logits.device)
    token_ids[free_on_device] = draw(logits[free_on_device], rows.select(free))
    processors.apply_masks(logits)
    token_ids[others_on_device] = draw(logits[others_on_device], rows.select(others))
    return token_ids


def _processed(logits: Tensor, rows: SamplingRows, *, but_grammars: bool) -> Tensor:
    """Return contiguous logits [M, V] as the logits processors change them."""
    logits = logits.contiguous()
    return logits if rows.processors is None else rows.processors.apply(logits, but_grammars=but_grammars)


def without_failed(peaks: Tensor, token_ids: Tensor) -> Tensor:
    """Return the ids [M] with NO_TOKEN for rows whose largest logit [M] is NaN or infinite."""
    if peaks.device.type == "cpu" and all(map(math.isfinite, peaks.tolist())):  # faster than tensors
        return token_ids
    return token_ids.masked_fill_(peaks - peaks != 0, NO_TOKEN)  # it is NaN then; isfinite makes more tensors


def _draw_in_parts(logits: Tensor, peaks: Tensor, token_ids: Tensor, rows: SamplingRows) -> None:
    """Replace the token ids [M] of rows with temperature > 0."""
    drawn = rows.temperatures.nonzero().squeeze(1)
    rows_at_once = max(1, ENTRIES_AT_ONCE[logits.device.type] // logits.shape[1])
    for part in drawn.split(rows_at_once) if len(drawn) else ():
        where = part.to(logits.device)
        token_ids[where] = _draw(logits[where] - peaks[where].unsqueeze(1), rows.select(part))


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draw [R] token ids from logits [R, V]. The maximum of each row is 0, so tiny temperatures give finite values."""
    device = logits.device
    scaled = logits / rows.temperatures.to(device).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    floors = rows.floors.to(device).unsqueeze(1)
    if bool(rows.top_k.any()):
        floors = _top_k_floors(scaled, rows.top_k.tolist(), floors)
    if bool((rows.top_p < 1.0).any()):
        floors = _top_p_floors(scaled, rows.top_p.tolist(), floors)
    scaled.masked_fill_(scaled < floors, float("-inf"))
    keys = next_keys(rows.streams, rows.output_positions).to(device)
    log_variates = exponential_variates(keys, logits.shape[1]).log_()
    return torch.sub(scaled, log_variates, out=log_variates).argmax(dim=-1)


def _top_k_floors(scaled: Tensor, top_k: list[int], floors: Tensor) -> Tensor:
    """Return floors [R, 1], raised to the k-th largest entry in rows with top_k."""
    vocab_size = scaled.shape[1]
    limited = [index for index, k in enumerate(top_k) if 0 < k < vocab_size]
    if not limited:
        return floors
    where = torch.tensor(limited, dtype=torch.int64, device=scaled.device)
    ranks = torch.tensor([[top_k[index] - 1] for index in limited], dtype=torch.int64, device=scaled.device)
    largest = scaled[where].topk(max(top_k[index] for index in limited)).values
    return floors.index_put((where,), torch.maximum(floors[where], largest.gather(1, ranks)))


def _top_p_floors(scaled: Tensor, top_p: list[float], floors: Tensor) -> Tensor:
    """Return floors [R, 1], raised in rows with top_p: to the least likely of the fewest ids that reach top_p of the
    probability above the floor. Sums are in float64, so the order of summation, which depends on the batch, has no
    effect."""
    limited = [index for index, p in enumerate(top_p) if p < 1.0]
    where = torch.tensor(limited, dtype=torch.int64, device=scaled.device)
    scaled, floor = scaled[where], floors[where]
    weights = scaled.exp().masked_fill_(scaled < floor, 0.0)
    target = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    target *= torch.tensor([[top_p[index]] for index in limited], dtype=torch.float64, device=scaled.device)
    for width in (*TOP_P_WIDTHS, scaled.shape[1]):
        largest, ids = scaled.topk(min(width, scaled.shape[1]))
        is_reached = weights.gather(1, ids).cumsum(dim=-1, dtype=torch.float64) >= target
        if bool(is_reached[:, -1].all()):
            break
    is_reached[:, -1] = True  # with top_p near 1 the rounded sums may miss the target
    last = is_reached.int().argmax(dim=-1, keepdim=True)
    return floors.index_put((where,), torch.maximum(floor, largest.gather(1, last)))
