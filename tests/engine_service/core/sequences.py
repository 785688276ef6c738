"""Sequences, and the stub's answers, for tests of the core."""

from __future__ import annotations

import msgspec

from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.executor.wire.messages import RowSampling, SeqId
from tests.executor.stub import next_token, record

GREEDY = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, candidate=0, min_tokens=0, end_token_ids=[]
)


def make_sequence(
    seq_id: int,
    prompt_len: int,
    max_tokens: int,
    *,
    shared_len: int = 0,
    output: list[int] | None = None,
    cache_salt: str = "",
    tenant: str = "",
    priority: int = 0,
    prompt: list[int] | None = None,
    candidate: int = 0,
    grammar: str = "",
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Sequence:
    """A greedy sequence that nothing but `max_tokens` ends. Its prompt is its own but for the first `shared_len` tokens, or
    is `prompt`."""
    own = [1 + (seq_id * 37 + position) % 900 for position in range(prompt_len)]
    made = [901 + position % 90 for position in range(min(shared_len, prompt_len))] + own[shared_len:]
    rules = StopRules(max_tokens=max_tokens, min_tokens=0, end_token_ids=frozenset())
    return Sequence(
        SeqId(seq_id),
        prompt or made,
        msgspec.structs.replace(
            GREEDY, candidate=candidate, grammar=grammar, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        ),
        rules,
        output_token_ids=output,
        cache_salt=cache_salt,
        tenant=tenant,
        priority=priority,
    )


def stub_output(prompt: list[int], num_tokens: int, candidate: int = 0) -> list[int]:
    """What the stub generates for a prompt when nothing goes wrong."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids[-1], len(token_ids), candidate))
    return token_ids[len(prompt) :]


def assert_complete_logprobs(sequence: Sequence) -> None:
    """Assert that the sequence has the stub's record of each token that wants one."""
    if (count := sequence.sampling.logprobs) is not None:
        assert sequence.logprobs == [record(token_id, count) for token_id in sequence.output_token_ids]
    if (count := sequence.sampling.prompt_logprobs) is not None:
        expected = [record(token_id, count) for token_id in sequence.prompt_token_ids[1:]]
        assert bytes(sequence.prompt_logprobs or b"") == b"".join(expected)
