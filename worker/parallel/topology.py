"""The place of a rank in the grid of tensor and pipeline parallel ranks, and its part of the model.

    tensor_parallel_size 2, pipeline_parallel_size 3      tp_rank 0     tp_rank 1
                                                stage 0   rank 0        rank 1      embedding, first layers
                                                stage 1   rank 2        rank 3      middle layers
                                                stage 2   rank 4        rank 5      last layers, norm, head

The ranks of a row hold slices of the same layers. Activations go down the columns. The first rank of the last stage,
here 4, is the output rank: the engine uses its reply to a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The place of one rank."""

    rank: int
    tp_size: int
    pp_size: int

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def stage(self) -> int:
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp_size - 1

    @property
    def is_output_rank(self) -> bool:
        return self.is_last_stage and self.tp_rank == 0

    def rank_of(self, stage: int, tp_rank: int) -> int:
        return stage * self.tp_size + tp_rank

    def layers(self, num_layers: int) -> range:
        """Return this stage's layers. Stages differ by at most one. The last ones have fewer: the last has the head."""
        fewest, extra = divmod(num_layers, self.pp_size)
        first = self.stage * fewest + min(self.stage, extra)
        return range(first, first + fewest + (self.stage < extra))

    def share(self, size: int) -> range:
        """Return this rank's part of a dimension that a stage divides. The last parts are shorter if need be."""
        each = -(-size // self.tp_size)
        return range(min(self.tp_rank * each, size), min((self.tp_rank + 1) * each, size))
