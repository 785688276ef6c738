"""Log-probability records against a plain forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace.executor.wire.messages import RowSampling, record_bytes
from tests.worker.driver import Request

WANTED: tuple[tuple[int | None, int | None], ...] = (
    (0, None),
    (None, None),
    (1, 0),
    (5, None),
    (20, 5),
    (None, 1),
    (2, 20),
)
"""`logprobs` and `prompt_logprobs` of the rows of a batch."""


def with_logprobs(sampling: RowSampling, logprobs: int | None, prompt_logprobs: int | None) -> RowSampling:
    return msgspec.structs.replace(sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def unpacked(records: bytes, num_ids: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-probabilities [L], the ranks [L], the most likely ids [L, K] and their log-probabilities [L, K]."""
    words = torch.frombuffer(bytearray(records), dtype=torch.int32).view(-1, record_bytes(num_ids) // 4)
    pairs = words[:, 2:].reshape(len(words), num_ids, 2)
    return (
        words[:, 0].contiguous().view(torch.float32),
        words[:, 1],
        pairs[:, :, 0],
        pairs[:, :, 1].contiguous().view(torch.float32),
    )


def check_records(records: bytes, num_ids: int, token_ids: list[int], logits: Tensor) -> None:
    """`logits` [L, V] are those from which the tokens come."""
    assert len(records) == len(token_ids) * record_bytes(num_ids)
    if not token_ids:
        return
    expected = logits.float().log_softmax(-1)
    own = expected.gather(1, torch.tensor(token_ids).unsqueeze(1))
    logprobs, ranks, ids, likely = unpacked(records, num_ids)
    torch.testing.assert_close(logprobs, own[:, 0], atol=1e-4, rtol=1e-4)
    # Logits that are nearly equal may change places.
    assert bool((ranks >= 1 + (expected > own + 1e-4).sum(-1)).all())
    assert bool((ranks <= (expected >= own - 1e-4).sum(-1)).all())
    torch.testing.assert_close(likely, expected.topk(num_ids).values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(likely, expected.gather(1, ids.long()), atol=1e-4, rtol=1e-4)
    assert all(len(set(row)) == num_ids for row in ids.tolist())


def check_logprobs(path: Path, requests: list[Request]) -> None:
    """Against transformers, for each request alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.tokens])).logits[0]
        num_prompt, num_ids = len(request.prompt), request.sampling.logprobs
        if num_ids is None:
            assert not request.records
        else:
            check_records(b"".join(request.records), num_ids, request.output, logits[num_prompt - 1 : -1])
        if request.sampling.prompt_logprobs is None:
            assert not request.prompt_records
        else:
            wanted = request.sampling.prompt_logprobs
            check_records(bytes(request.prompt_records), wanted, request.prompt[1:], logits[: num_prompt - 1])
