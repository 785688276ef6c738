"""Samples token ids from logits, on the device.

A draw is the token with the largest `logit / temperature - log(exponential variate)` among the ids that min_p, top_k
and top_p leave. This is the Gumbel-max form of sampling from the softmax (Gumbel, Statistical Theory of Extreme Values
and Some Practical Applications, 1954). The three filters become one floor per row: ids with smaller logits are not
drawn. Ids whose logit equals the floor stay, so the order of ids decides nothing.

Shapes: M rows that yield a token, R of them with temperature > 0, V token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.worker.counter_rng import exponential_variates, row_keys
from millrace.worker.input_batch import SampledRow

ENTRIES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Entries of [R, V] that are processed at a time. Bounds the memory, and fits into a CPU's cache."""
TOP_P_WIDTHS = (64, 1024)
"""Numbers of most likely ids that are searched for a top_p floor, before all ids are sorted."""


@dataclass(frozen=True)
class Sampled:
    """One entry per row, in order."""

    token_ids: list[int]
    is_valid: list[bool]
    """False if the largest logit was NaN or infinite; -inf means that no id was allowed."""


def sample(logits: Tensor, rows: list[SampledRow]) -> Sampled:
    """Draw one token for each row of logits [M, V]. May change the logits in place."""
    logits = logits.float()
    _mask_end_tokens(logits, rows)
    peaks, token_ids = logits.max(dim=-1)
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0.0]
    rows_at_once = max(1, ENTRIES_AT_ONCE[logits.device.type] // logits.shape[1])
    for begin in range(0, len(drawn), rows_at_once):
        part = drawn[begin : begin + rows_at_once]
        where = torch.tensor(part, device=logits.device)
        token_ids[where] = _draw(logits[where] - peaks[where].unsqueeze(1), [rows[index] for index in part])
    ids, valid = torch.stack([token_ids, peaks.isfinite().long()]).tolist()
    return Sampled(token_ids=ids, is_valid=[bool(flag) for flag in valid])


def _mask_end_tokens(logits: Tensor, rows: list[SampledRow]) -> None:
    """Set the logits of end tokens to -inf in rows that have less than min_tokens."""
    pairs = [
        (index, token_id)
        for index, row in enumerate(rows)
        if row.output_position < row.sampling.min_tokens
        for token_id in row.sampling.end_token_ids
    ]
    if pairs:
        indices, token_ids = torch.tensor(pairs, device=logits.device).unbind(1)
        logits[indices, token_ids] = float("-inf")


def _draw(logits: Tensor, rows: list[SampledRow]) -> Tensor:
    """Draw [R] token ids from logits [R, V]. The maximum of each row is 0, so tiny temperatures give finite values."""
    settings = [row.sampling for row in rows]
    temperatures = _column([each.temperature for each in settings], logits)
    scaled = logits / temperatures.clamp(min=torch.finfo(torch.float32).tiny)
    floors = _column([each.min_p for each in settings], logits).log()
    if any(each.top_k > 0 for each in settings):
        floors = _top_k_floors(scaled, [each.top_k for each in settings], floors)
    if any(each.top_p < 1.0 for each in settings):
        floors = _top_p_floors(scaled, [each.top_p for each in settings], floors)
    scaled.masked_fill_(scaled < floors, float("-inf"))
    keys = row_keys(
        [each.seed for each in settings],
        [each.candidate for each in settings],
        [row.output_position for row in rows],
        logits.device,
    )
    log_variates = exponential_variates(keys, logits.shape[1]).log_()
    return torch.sub(scaled, log_variates, out=log_variates).argmax(dim=-1)


def _top_k_floors(scaled: Tensor, top_k: list[int], floors: Tensor) -> Tensor:
    """Return floors [R, 1], raised to the k-th largest entry in rows with top_k."""
    vocab_size = scaled.shape[1]
    limited = [index for index, k in enumerate(top_k) if 0 < k < vocab_size]
    if not limited:
        return floors
    where = torch.tensor(limited, device=scaled.device)
    ranks = torch.tensor([[top_k[index] - 1] for index in limited], device=scaled.device)
    largest = scaled[where].topk(max(top_k[index] for index in limited)).values
    return floors.index_put((where,), torch.maximum(floors[where], largest.gather(1, ranks)))


def _top_p_floors(scaled: Tensor, top_p: list[float], floors: Tensor) -> Tensor:
    """Return floors [R, 1], raised in rows with top_p: to the least likely of the fewest ids that reach top_p of the
    probability above the floor. Sums are in float64, so the order of summation, which depends on the batch, has no
    effect."""
    limited = [index for index, p in enumerate(top_p) if p < 1.0]
    where = torch.tensor(limited, device=scaled.device)
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


def _column(values: list[float], like: Tensor) -> Tensor:
    """Return a [R, 1] float32 tensor on the device of `like`."""
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)
