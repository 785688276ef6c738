"""The logits processors written out plainly, for one row, in vLLM's order."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from millrace.executor.wire.messages import LogitsSettings, RowSampling, ThinkingLimit

Row = NDArray[np.float32]
MINUS_INFINITY = np.float32("-inf")


def processed(logits: Row, sampling: RowSampling, prompt: list[int], output: list[int]) -> Row:
    settings = sampling.processors or LogitsSettings()
    row = logits.astype(np.float32)
    if settings.allowed_token_ids is not None:
        for token_id in range(len(row)):
            if token_id not in settings.allowed_token_ids:
                row[token_id] = MINUS_INFINITY
    for word in settings.bad_words:
        *before, last = word
        if not before or output[-len(before) :] == before:
            row[last] = MINUS_INFINITY
    if len(output) < sampling.min_tokens:
        for token_id in sampling.end_token_ids:
            row[token_id] = MINUS_INFINITY
    for token_id, bias in settings.logit_bias.items():
        row[token_id] += np.float32(bias)
    counts = Counter(output)
    for token_id in {*prompt, *output}:
        penalty = np.float32(settings.repetition_penalty)
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id, count in counts.items():
        row[token_id] -= np.float32(settings.frequency_penalty) * np.float32(count)
        row[token_id] -= np.float32(settings.presence_penalty)
    if settings.thinking is not None and has_to_end(prompt, output, settings.thinking):
        row[settings.thinking.end_id] = 1e9
    return row


def has_to_end(prompt: list[int], output: list[int], limit: ThinkingLimit) -> bool:
    """Whether the text thinks, and has as many tokens of thoughts as it may have."""
    last_end = max((i for i, token_id in enumerate(prompt + output) if token_id == limit.end_id), default=-1)
    in_prompt = [i for i, token_id in enumerate(prompt) if token_id == limit.start_id and i > last_end]
    in_output = [i for i, token_id in enumerate(output, len(prompt)) if token_id == limit.start_id and i > last_end]
    begins = in_prompt[-1:] or in_output
    return bool(begins) and len(prompt + output) - begins[0] - 1 >= limit.budget
