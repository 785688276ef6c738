from __future__ import annotations

from millrace.engine_service.core.sequence import Sequence, StopRules
from millrace.engine_service.serving.prefixes import MAX_CLAIMED, CachedPrefixes
from millrace.executor.wire.messages import RowSampling, SeqId

BLOCK = 4
SAMPLING = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, candidate=0, min_tokens=0, end_token_ids=[]
)
RULES = StopRules(max_tokens=1, min_tokens=0, end_token_ids=frozenset())


def sequence(*token_ids: int) -> Sequence:
    return Sequence(SeqId(1), list(token_ids), SAMPLING, RULES)


def test_a_prefix_counts_when_two_prompts_share_blocks_that_are_in_the_pool() -> None:
    pool: set[bytes] = set()
    prefixes = CachedPrefixes(pool.__contains__)
    first, second = sequence(*range(8), 9, 9, 9, 9), sequence(*range(12))
    prefixes.note("a", first, BLOCK)
    pool.update(first.hash_blocks(BLOCK))
    assert prefixes.current() == []
    prefixes.note("a", second, BLOCK)
    assert prefixes.current() == ["a"]
    pool.remove(first.hash_blocks(BLOCK)[1])
    assert prefixes.current() == [], "the last block that both have is gone"


def test_prompts_that_share_no_block_yield_nothing() -> None:
    prefixes = CachedPrefixes(lambda block_hash: True)
    for token_ids in ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2)):
        prefixes.note("a", sequence(*token_ids), BLOCK)
        assert prefixes.current() == []


def test_the_latest_prefixes_come_first_and_their_number_is_limited() -> None:
    prefixes = CachedPrefixes(lambda block_hash: True)
    for _ in range(2):
        for number in range(300):
            prefixes.note(str(number), sequence(number, 1, 2, 3), BLOCK)
    assert prefixes.current() == []
    for number in [*range(256), *range(256)]:
        prefixes.note(str(number), sequence(number, 1, 2, 3), BLOCK)
    assert prefixes.current() == [str(number) for number in range(255, 255 - MAX_CLAIMED, -1)]
