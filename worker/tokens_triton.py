"""What a graph does with the tokens of a step, in one kernel each: feeds the last ones, and keeps the new ones.

`InputBatch` has the rules. Shapes: T tokens, M rows, S slots and the entry of NO_SLOT.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace.executor.wire.messages import NO_TOKEN

AT_ONCE = 128
_NO_TOKEN = tl.constexpr(NO_TOKEN)


def feed(slots: Tensor, known_ids: Tensor, last_tokens: Tensor, input_ids: Tensor) -> None:
    """Do what `InputBatch.input_ids` does: write the tokens [T] of slots [T]. last_tokens [S]."""
    num_tokens = len(slots)
    _feed[(triton.cdiv(num_tokens, AT_ONCE),)](
        slots, known_ids, last_tokens, len(last_tokens), input_ids, num_tokens, BLOCK=AT_ONCE
    )


def keep(slots: Tensor, token_ids: Tensor, last_tokens: Tensor) -> None:
    """Do what `InputBatch.record` does with the tokens [M] of slots [M], in place. last_tokens [S]."""
    num_rows = len(slots)
    _keep[(triton.cdiv(num_rows, AT_ONCE),)](slots, token_ids, last_tokens, len(last_tokens), num_rows, BLOCK=AT_ONCE)


@triton.jit
def _places(slots, numbers, count, num_slots):
    """Return the places of the rows' last tokens; a negative slot counts from the end."""
    slot = tl.load(slots + numbers, numbers < count, other=0)
    return tl.where(slot < 0, slot + num_slots, slot)


@triton.jit(do_not_specialize=["num_slots", "num_tokens"])
def _feed(slots, known_ids, last_tokens, num_slots, input_ids, num_tokens, BLOCK: tl.constexpr):
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = numbers < num_tokens
    last = tl.load(last_tokens + _places(slots, numbers, num_tokens, num_slots), exists, other=0)
    known = tl.load(known_ids + numbers, exists, other=0)
    tl.store(input_ids + numbers, tl.where(known == _NO_TOKEN, tl.maximum(last, 0), known), exists)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _keep(slots, token_ids, last_tokens, num_slots, num_rows, BLOCK: tl.constexpr):
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = numbers < num_rows
    places = _places(slots, numbers, num_rows, num_slots)
    token = tl.load(token_ids + numbers, exists, other=0)
    token = tl.where(tl.load(last_tokens + places, exists, other=0) == _NO_TOKEN, _NO_TOKEN, token)
    tl.store(token_ids + numbers, token, exists)
    tl.store(last_tokens + places, token, exists)
