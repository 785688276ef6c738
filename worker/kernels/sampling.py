"""Argmax and random draws through the compiled kernels. The rules are those of `millrace.worker.sampler`.

Shapes: M rows, V token ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.worker.counter_rng import next_keys
from millrace.worker.kernels.library import DrawCall, Kernels
from millrace.worker.sampling_rows import SamplingRows


def argmax(kernels: Kernels, logits: Tensor, masks: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the peaks [M] of contiguous logits [M, V], float32, and the lowest ids [M] that have them. A row
    with a NaN has the peak NaN. `masks` are rows [N] and contiguous bits [N, B], B >= V / 8, uint8: the logits of ids whose
    bit is not set become -inf before."""
    num_rows, vocab_size = logits.shape
    peaks = torch.empty(num_rows, dtype=torch.float32, device="cpu")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device="cpu")
    pointers = None
    if masks is not None:
        rows, bits = masks
        pointers = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
        pointers[rows] = bits.data_ptr() + torch.arange(len(rows), device="cpu") * bits.shape[1]
    kernels.table.argmax(
        *(logits.data_ptr(), pointers.data_ptr() if pointers is not None else None, num_rows, vocab_size),
        *(peaks.data_ptr(), token_ids.data_ptr(), torch.get_num_threads()),
    )
    return peaks, token_ids


def draw(kernels: Kernels, logits: Tensor, peaks: Tensor, token_ids: Tensor, rows: SamplingRows) -> None:
    """Replace the token ids [M] of rows with temperature > 0 and a finite peak. Logits [M, V] are contiguous, float32."""
    if not bool(rows.temperatures.any()):
        return
    row_keys = next_keys(rows.streams, rows.output_positions)
    call = DrawCall(
        logits=logits.data_ptr(),
        num_rows=logits.shape[0],
        vocab_size=logits.shape[1],
        peaks=peaks.data_ptr(),
        temperatures=rows.temperatures.data_ptr(),
        floors=rows.floors.data_ptr(),
        top_k=rows.top_k.data_ptr(),
        top_p=rows.top_p.data_ptr(),
        row_keys=row_keys.data_ptr(),
        token_ids=token_ids.data_ptr(),
        num_threads=torch.get_num_threads(),
    )
    kernels.draw(call)
