"""How the next token of each row is drawn.

Shapes: S slots, M rows that yield a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from millrace.executor.wire.messages import NewSequence
from millrace.worker.counter_rng import candidate_stream
from millrace.worker.grammars import Grammars
from millrace.worker.processors.pipeline import LogitsProcessors, StepProcessors


@dataclass(frozen=True)
class SamplingRows:
    """The settings of M rows. Tensors are on the host."""

    temperatures: Tensor  # [M] float32, 0: greedy
    top_k: Tensor  # [M] int64, 0: off
    top_p: Tensor  # [M] float64, 1: off
    floors: Tensor  # [M] float32, the logarithm of min_p
    streams: Tensor  # [M] int64, the random numbers of a candidate
    output_positions: Tensor  # [M] int64
    processors: StepProcessors | None
    """None if no row's logits are changed before the draw."""
    logprobs: tuple[tuple[int, int], ...] = ()
    """(row, number of most likely ids) of the rows whose log-probabilities are wanted."""

    @property
    def num_rows(self) -> int:
        return self.output_positions.shape[0]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether every row takes the largest logit of all."""
        return self.processors is None and not bool(self.temperatures.any())

    @property
    def has_limits(self) -> bool:
        """Whether top_k or top_p may exclude ids in some row that is drawn."""
        return bool(((self.temperatures > 0) & ((self.top_k > 0) | (self.top_p < 1.0))).any())

    @property
    def is_masked_greedy(self) -> bool:
        """Whether every row takes the largest logit of those that its grammar allows, or of all."""
        return self.processors is not None and self.processors.is_grammar_alone and not bool(self.temperatures.any())

    def plain_greedy_rows(self) -> Tensor:  # [M] bool, on the host
        """Return which rows take the largest of their logits as they are."""
        is_plain = self.temperatures == 0
        if self.processors is not None:
            is_plain[self.processors.row_indices()] = False
        return is_plain

    def select(self, rows: Tensor) -> SamplingRows:
        """Return the settings of these rows [N] for the draw, without the processors."""
        return SamplingRows(
            self.temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.floors[rows],
            self.streams[rows],
            self.output_positions[rows],
            None,
        )


class SamplingTable:
    """Owns the settings of the running sequences by slot, on the host, and their logits processors."""

    def __init__(self, num_slots: int, device: torch.device, grammars: Grammars | None = None) -> None:
        self._rows = greedy_rows(num_slots).select(torch.arange(num_slots, device="cpu"))  # a copy
        self._processors = LogitsProcessors(device, grammars)
        self._drawn: set[int] = set()
        """The slots with a temperature."""
        self._logprobs: dict[int, int] = {}
        """By slot: the number of most likely ids whose log-probabilities are wanted."""

    def add(self, slot: int, new: NewSequence) -> None:
        rows, sampling = self._rows, new.sampling
        rows.temperatures[slot] = sampling.temperature
        rows.top_k[slot] = sampling.top_k
        rows.top_p[slot] = sampling.top_p
        rows.floors[slot] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        rows.streams[slot] = candidate_stream(sampling.seed, sampling.candidate)
        if sampling.temperature > 0:
            self._drawn.add(slot)
        self._processors.add(slot, new)
        if sampling.logprobs is not None:
            self._logprobs[slot] = sampling.logprobs

    def remove(self, slot: int) -> None:
        """Forget a sequence that has ended."""
        self._processors.remove(slot)
        self._drawn.discard(slot)
        self._logprobs.pop(slot, None)

    def grow(self) -> None:
        """Double the number of slots."""
        num_slots = self._rows.num_rows
        self._rows = self._rows.select(torch.arange(2 * num_slots, device="cpu") % num_slots)

    def rows(self, slots: Tensor, output_positions: Tensor) -> SamplingRows:
        """Return the settings of rows whose sequences have these slots [M]."""
        processors = self._processors.of_step(slots, output_positions)
        settings = self._rows.select(slots) if self._drawn else greedy_rows(len(output_positions))
        logprobs = self._wanted_logprobs(slots) if self._logprobs else ()
        return replace(settings, output_positions=output_positions, processors=processors, logprobs=logprobs)

    def _wanted_logprobs(self, slots: Tensor) -> tuple[tuple[int, int], ...]:
        counts = map(self._logprobs.get, slots.tolist())
        return tuple((row, count) for row, count in enumerate(counts) if count is not None)


@lru_cache(maxsize=4)
def greedy_rows(num_rows: int) -> SamplingRows:
    """Return the settings of rows that are all greedy: most steps of a service without random sampling."""
    return SamplingRows(
        temperatures=torch.zeros(num_rows, dtype=torch.float32, device="cpu"),
        top_k=torch.zeros(num_rows, dtype=torch.int64, device="cpu"),
        top_p=torch.ones(num_rows, dtype=torch.float64, device="cpu"),
        floors=torch.full((num_rows,), -math.inf, dtype=torch.float32, device="cpu"),
        streams=torch.zeros(num_rows, dtype=torch.int64, device="cpu"),
        output_positions=torch.zeros(num_rows, dtype=torch.int64, device="cpu"),  # of no use here
        processors=None,
    )
