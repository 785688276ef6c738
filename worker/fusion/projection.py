"""A linear layer with what stands before and behind it: a norm of its inputs, and a gated activation of its outputs.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor, nn

from millrace.worker.fusion.operations import Operations
from millrace.worker.fusion.parts import Norm


class Projection:
    """One layer for several linear modules, whose weights it takes."""

    def __init__(
        self,
        operations: Operations,
        modules: list[nn.Linear],
        norm: Norm | None = None,
        activation: str | None = None,
    ) -> None:
        """`norm`: an RMSNorm of the inputs. `activation`: of the gates, the first half of the outputs, which the values, the
        second half, are multiplied with."""
        self.linear = operations.linear(modules)
        self._workspace = operations.workspace
        self._norm = operations.norm(norm) if norm is not None else None
        self._activation = (
            operations.activation(activation, self.linear.num_outputs // 2) if activation is not None else None
        )
        self._run_few = operations.for_few_rows(self.linear, norm, activation)

    @property
    def num_outputs(self) -> int:
        return self.linear.num_outputs if self._activation is None else self.linear.num_outputs // 2

    def into(self, inputs: Tensor, outputs: Tensor) -> None:
        """Write the outputs [M, N] for inputs [M, K]."""
        num_rows = inputs.shape[0]
        if self._run_few is not None and self._run_few(inputs, outputs):
            return
        if self._norm is not None:
            normed = self._workspace.rows("normed", *inputs.shape)
            self._norm(inputs, normed)
            inputs = normed
        if self._activation is None:
            self.linear.into(inputs, outputs)
            return
        gates = self._workspace.rows("gates", num_rows, self.linear.num_outputs)
        self.linear.into(inputs, gates)
        self._activation(gates, outputs)
