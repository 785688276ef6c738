"""Tests of Triton's kernels without a GPU: in Triton's interpreter, and whether they compile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("*_triton.py"))


def test_kernels_do_in_the_interpreter_what_the_cpu_does() -> None:
    # Triton reads the variable when it is imported, so the interpreter has a process of its own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


CHANGING = {
    *("table_stride", "num_rows", "num_groups", "group"),
    *("tables", "rows", "tiles", "maxima", "totals", "positions", "token_blocks"),
}
"""Arguments whose divisibility by 16, or of whose address, changes from step to step."""


@pytest.fixture
def compile_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The interpreter accepts more than the compiler does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget

    def compile_for_h200(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
        names = kernel.arg_names
        for parameter in kernel.params:
            if parameter.name in CHANGING:
                assert parameter.do_not_specialize or parameter.do_not_specialize_on_alignment, parameter.name
        source = triton.compiler.ASTSource(
            kernel,
            {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
            {name: value for name, value in constants.items() if name in names},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= 227 << 10
        return compiled

    return compile_for_h200


def test_sampling_compiles_for_a_gpu(compile_kernel: Callable[..., Any]) -> None:
    from millrace.worker import sampling_triton as kernels

    types = {"logits": "*bf16", "peaks": "*fp32", "scores": "*fp32", "numbers": "*fp64", "keys": "*i64"}
    types |= {"peak_ids": "*i32", "score_ids": "*i32", "token_ids": "*i64"}
    constants = {"PART": 256, "PARTS": 2, "DRAWS": True}
    for kernel in (kernels._find_peaks, kernels._raise_floors, kernels._draw_parts, kernels._finish):
        compile_kernel(kernel, types, constants, num_warps=1)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_linear_layers_compile_for_a_gpu(dtype: str, size: int, compile_kernel: Callable[..., Any]) -> None:
    from millrace.worker.linear.linear_triton import TILES, multiply

    types = dict.fromkeys(("inputs", "weights", "bias", "outputs"), f"*{dtype}")
    tile = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), TILES[size], strict=True))
    compile_kernel(multiply, types, tile | {"HAS_BIAS": True, "ACCUMULATES": True}, num_stages=3)


@pytest.mark.parametrize("pool_type", ["bf16", "fp8e4nv"])
def test_attention_compiles_for_a_gpu(pool_type: str, compile_kernel: Callable[..., Any]) -> None:
    from millrace.worker.attention import paged_triton as kernels

    types = dict.fromkeys(("query", "key", "value", "output"), "*bf16") | {"scaling": "fp32", "positions": "*i64"}
    types |= dict.fromkeys(("keys", "values"), f"*{pool_type}")
    types |= dict.fromkeys(("sums", "maxima", "totals", "key_scales", "value_scales"), "*fp32")
    types |= dict.fromkeys(("tables", "rows", "tiles", "token_blocks"), "*i32")
    constants = {"WINDOW": 100, "SOFTCAP": 30.0, "CHUNK": 256, "BLOCK_SIZE": 16, "GROUP": 2, "NUM_HEADS": 8}
    constants |= {"NUM_KV_HEADS": 4, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_H": 4, "BLOCK_N": 64}
    constants |= {"BLOCK_D": 128, "BLOCK_DV": 128, "HAS_SCALES": pool_type != "bf16"}
    tiles = {"decode_chunk": (16, 4), "prefill": (128, 8)}
    for kernel in (kernels.write_kv, kernels.decode_chunk, kernels.merge_chunks, kernels.prefill):
        block_m, num_warps = tiles.get(kernel.__name__, (0, 4))
        compile_kernel(kernel, types, constants | {"BLOCK_M": block_m}, num_stages=2, num_warps=num_warps)
