"""Ranks that divide the vocabulary draw what one rank does, and exchange whole rows only where one has to be changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.executor.wire.messages import LogitsSettings, NewSequence, RowSampling, SeqId
from millrace.worker.parallel.sampler import VocabParallelSampler
from millrace.worker.parallel.topology import Topology
from millrace.worker.sampler import sample
from millrace.worker.sampling_rows import SamplingRows, SamplingTable

VOCAB_SIZE, NUM_RANKS, NUM_ROWS = 101, 2, 6
GREEDY = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])
DRAWN = RowSampling(0.9, 0, 0.95, 0.0, 7, 0, 0, [])
PENALIZED = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [], LogitsSettings(frequency_penalty=2.0, logit_bias={100: 3.0}))


class Exchange:
    """Stands in for the peers of all ranks, which run in threads."""

    def __init__(self) -> None:
        self.barrier = Barrier(NUM_RANKS)
        self.parts: list[Tensor] = [torch.empty(0)] * NUM_RANKS
        self.widest_rows = 0
        """The most rows of logits that were exchanged at once."""

    def of_rank(self, rank: int) -> Any:
        exchange = self

        class Peers:
            def all_gather(self, tensor: Tensor) -> list[Tensor]:
                exchange.parts[rank] = tensor
                if tensor.shape[-1] == -(-VOCAB_SIZE // NUM_RANKS):
                    exchange.widest_rows = max(exchange.widest_rows, len(tensor))
                exchange.barrier.wait(60)
                parts = list(exchange.parts)
                exchange.barrier.wait(60)
                return parts

        return Peers()


def sampling_rows(samplings: list[RowSampling]) -> SamplingRows:
    table = SamplingTable(NUM_ROWS, torch.device("cpu"))
    for slot, sampling in enumerate(samplings):
        table.add(slot, NewSequence(SeqId(slot), [1, 2, 3, 3], 2, sampling))
    return table.rows(torch.arange(NUM_ROWS), torch.full((NUM_ROWS,), 2))


@pytest.mark.parametrize(
    ("samplings", "num_exchanged"),
    [
        ([GREEDY] * 6, 0),
        ([GREEDY, PENALIZED, GREEDY, DRAWN, PENALIZED, GREEDY], 3),
        ([GREEDY] * 5 + [DRAWN], 1),
        ([DRAWN, PENALIZED] * 3, 6),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_draw_what_one_rank_does(samplings: list[RowSampling], num_exchanged: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    logits[0, 7] = float("nan")
    exchange, expected = Exchange(), sample(logits.clone(), sampling_rows(samplings)).tolist()

    def draw(rank: int) -> list[int]:
        topology = Topology(rank, NUM_RANKS, 1)
        part = topology.share(VOCAB_SIZE)
        sampler = VocabParallelSampler(VOCAB_SIZE, topology, exchange.of_rank(rank))
        return sampler.sample(logits[:, part.start : part.stop].clone(), sampling_rows(samplings)).tolist()

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        assert list(threads.map(draw, range(NUM_RANKS))) == [expected] * NUM_RANKS
    assert exchange.widest_rows == num_exchanged
