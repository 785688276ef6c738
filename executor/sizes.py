"""Which parallel sizes a model can run with."""

from __future__ import annotations


def smaller_sizes(tensor_parallel_size: int, pipeline_parallel_size: int) -> list[tuple[int, int]]:
    """Return sizes that need fewer ranks, the largest first. A divisor of a valid tensor parallel size is valid too."""
    sizes = [
        (tensor, stages)
        for tensor in range(1, tensor_parallel_size + 1)
        if tensor_parallel_size % tensor == 0
        for stages in range(1, pipeline_parallel_size + 1)
        if tensor * stages < tensor_parallel_size * pipeline_parallel_size
    ]
    return sorted(sizes, key=lambda size: (size[0] * size[1], size[0]), reverse=True)


def why_impossible(
    tensor_parallel_size: int, pipeline_parallel_size: int, *, num_heads: int, num_kv_heads: int, num_layers: int
) -> str | None:
    """Return why a model can't be divided by these sizes, and which sizes are possible. None when it can."""
    possible = [size for size in range(1, num_kv_heads + 1) if num_heads % size == 0 and num_kv_heads % size == 0]
    if tensor_parallel_size not in possible:
        return (
            f"tensor_parallel_size: must divide the model's {num_heads} attention heads and {num_kv_heads} key-value "
            f"heads, so one of {', '.join(map(str, possible))}, got {tensor_parallel_size}"
        )
    if pipeline_parallel_size > num_layers:
        return (
            f"pipeline_parallel_size: must be at most the model's number of layers, {num_layers}, "
            f"got {pipeline_parallel_size}"
        )
    return None
