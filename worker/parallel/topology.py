"""Where a rank stands among the others, and which part of the model that makes it hold.

    tensor_parallel_size 2, pipeline_parallel_size 3      tp_rank 0     tp_rank 1
                                                stage 0   rank 0        rank 1      embedding, first layers
                                                stage 1   rank 2        rank 3      middle layers
                                                stage 2   rank 4        rank 5      last layers, norm, head

The ranks of a row hold slices of the same layers; activations go down the columns. Rank 4, the first of the last stage,
is the output rank: its reply to a step is the one that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.executor.wire.messages import WorkerConfig
from millrace.worker.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """One rank's place."""

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
        """This stage's layers. The stages differ by one at most; the last ones have less, since the head is there too."""
        fewest, extra = divmod(num_layers, self.pp_size)
        first = self.stage * fewest + min(self.stage, extra)
        return range(first, first + fewest + (self.stage < extra))

    def share(self, size: int) -> range:
        """This rank's part of a dimension that the ranks of a stage divide; where it does not come out even, the last
        parts are shorter."""
        each = -(-size // self.tp_size)
        return range(min(self.tp_rank * each, size), min((self.tp_rank + 1) * each, size))


def find_place(rank: int, world_size: int, config: WorkerConfig) -> Topology:
    """The place of a rank. Raises `ConfigError` when the parallel sizes do not make up the number of ranks."""
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    if tp_size < 1 or pp_size < 1:
        raise ConfigError(f"tensor_parallel_size {tp_size} and pipeline_parallel_size {pp_size}: both start at 1")
    if tp_size * pp_size != world_size:
        raise ConfigError(
            f"tensor_parallel_size {tp_size} times pipeline_parallel_size {pp_size} needs {tp_size * pp_size} ranks, "
            f"but there are {world_size}"
        )
    return Topology(rank, tp_size, pp_size)
