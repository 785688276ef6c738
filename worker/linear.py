"""Linear layers of a model on a CPU: the compiled kernel where it is as fast as torch.

The kernel reads the weights as torch keeps them, so there is no second copy. With the kernel the result of a row does not
depend on the other rows of the step; torch rounds differently for other numbers of rows.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millrace.worker.kernels.library import DTYPES, Kernels, LinearCall

logger = logging.getLogger("millrace.worker")

MEASURED_ROWS = (1, 4, 16, 64)
"""The kernel computes all numbers of rows if it is fast enough at the last one of these."""
ALL_ROWS = torch.iinfo(torch.int64).max
COMPARED_ROWS = 16
"""Up to this number of rows, the results are compared with torch's."""
MEASURE_S = 0.8
"""For all shapes together."""
RUNS = 3
"""The shortest one counts."""
ACCEPTED_SLOWDOWN = 1.1
"""The kernel is used up to this ratio of its time to torch's: one way of rounding for all numbers of rows is worth it."""
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Between the kernel and torch, relative to the standard deviation of the results."""


class CompiledLinear:
    """Replaces the forward of an `nn.Linear`: up to `max_rows` rows go to the kernel, more to torch."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, max_rows: int = ALL_ROWS) -> None:
        self._weight = linear.weight
        self._bias: Tensor | None = linear.bias
        self._kernels = kernels
        self._max_rows = max_rows
        self._call = LinearCall(
            num_outputs=linear.weight.shape[0], num_inputs=linear.weight.shape[1], dtype=DTYPES[linear.weight.dtype]
        )

    def forward(self, inputs: Tensor) -> Tensor:  # [..., I] -> [..., O]
        call, weight, bias = self._call, self._weight, self._bias
        num_rows = inputs.numel() // call.num_inputs
        if inputs.dtype is not weight.dtype or not 0 < num_rows <= self._max_rows:
            return F.linear(inputs, weight, bias)
        assert inputs.shape[-1] == call.num_inputs, inputs.shape
        inputs = inputs.contiguous()
        outputs = inputs.new_empty((*inputs.shape[:-1], call.num_outputs))
        call.input, call.weights, call.output = inputs.data_ptr(), weight.data_ptr(), outputs.data_ptr()
        call.bias = None if bias is None else bias.data_ptr()
        call.num_rows, call.num_threads = num_rows, torch.get_num_threads()
        self._kernels.linear(call)
        return outputs


@torch.inference_mode()
def use_compiled_linear(model: nn.Module, kernels: Kernels) -> None:
    """Replace the forward of the model's linear layers, for the numbers of rows at which the kernel is fast enough.

    Measures each shape once, in at most about a second. A shape whose results differ from torch's is left alone. Modules
    of derived classes and modules with hooks are left alone too.
    """
    began_s = time.perf_counter()
    by_shape: dict[tuple[torch.dtype, torch.Size], list[nn.Linear]] = {}
    for module in model.modules():
        if _is_replaceable(module):
            assert isinstance(module, nn.Linear)
            by_shape.setdefault((module.weight.dtype, module.weight.shape), []).append(module)
    num_compiled, limits = 0, []
    smallest_first = sorted(by_shape.items(), key=lambda item: item[0][1].numel())  # they leave time for the largest
    for index, ((_, shape), modules) in enumerate(smallest_first):
        remaining_s = MEASURE_S - (time.perf_counter() - began_s)
        max_rows = _max_rows(modules[0], kernels, remaining_s / (len(by_shape) - index))
        limits.append(f"{shape[1]}x{shape[0]} {'all' if max_rows == ALL_ROWS else max_rows}")
        if max_rows:
            num_compiled += len(modules)
            for module in modules:
                module.forward = CompiledLinear(module, kernels, max_rows).forward  # type: ignore[method-assign, assignment]
    logger.info(
        "compiled linear layers: %d, largest number of rows by shape: %s; measured in %.2f s",
        *(num_compiled, ", ".join(limits) or "none", time.perf_counter() - began_s),
    )


def _is_replaceable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    weight = module.weight
    bias: Tensor | None = module.bias
    is_readable = (
        weight.is_contiguous() and weight.device.type == "cpu" and weight.dtype in DTYPES and weight.numel() > 0
    )
    return not has_hooks and is_readable and (bias is None or (bias.is_contiguous() and bias.dtype == weight.dtype))


def _max_rows(linear: nn.Linear, kernels: Kernels, limit_s: float) -> int:
    """Return the largest number of rows for the kernel: a measured one, 0 for none, or ALL_ROWS."""
    compiled = CompiledLinear(linear, kernels)
    generator = torch.Generator().manual_seed(0)
    deadline_s = time.perf_counter() + limit_s
    max_rows, took_s = 0, 0.0
    for num_rows in MEASURED_ROWS:
        began_s = time.perf_counter()
        if took_s and began_s + 4 * took_s > deadline_s:  # four times the rows take at most about four times as long
            return max_rows
        inputs = torch.randn(num_rows, linear.in_features, generator=generator).to(linear.weight.dtype)
        if num_rows <= COMPARED_ROWS and not _is_close(
            compiled.forward(inputs), F.linear(inputs, linear.weight, linear.bias)
        ):
            logger.warning(
                "the compiled kernel differs from torch in linear layers of %d inputs and %d outputs: torch computes them",
                *(linear.in_features, linear.out_features),
            )
            return 0
        if _is_fast(compiled, linear, inputs):
            max_rows = num_rows
        took_s = time.perf_counter() - began_s
    return ALL_ROWS if max_rows == MEASURED_ROWS[-1] else max_rows


def _is_close(outputs: Tensor, expected: Tensor) -> bool:
    difference = (outputs.float() - expected.float()).abs().max()
    return bool(difference <= LARGEST_DIFFERENCE[expected.dtype] * expected.float().square().mean().sqrt())


def _is_fast(compiled: CompiledLinear, linear: nn.Linear, inputs: Tensor) -> bool:
    ours_s = torchs_s = float("inf")
    for _ in range(RUNS):  # in turns: other load on the machine slows down both
        ours_s = min(ours_s, _duration_s(lambda: compiled.forward(inputs)))
        torchs_s = min(torchs_s, _duration_s(lambda: F.linear(inputs, linear.weight, linear.bias)))
    return ours_s <= ACCEPTED_SLOWDOWN * torchs_s


def _duration_s(run: Callable[[], Tensor]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
