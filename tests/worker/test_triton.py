"""Tests of Triton's kernels without a GPU: in Triton's interpreter, and whether they compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("*_triton.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_do_in_the_interpreter_what_the_cpu_does(file: Path) -> None:
    # Triton reads the variable when it is imported, so the interpreter has a process of its own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


def test_sampling_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter accepts more than the compiler does.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget

    from millrace.worker import sampling_triton as kernels

    types = dict.fromkeys(("row_stride", "vocab_size", "num_parts", "num_rows"), "i32")
    types |= {"logits": "*bf16", "peaks": "*fp32", "scores": "*fp32", "numbers": "*fp64", "keys": "*i64"}
    types |= {"peak_ids": "*i32", "score_ids": "*i32", "token_ids": "*i64"}
    constants = {"PART": 256, "PARTS": 2, "DRAWS": True}
    for kernel in (kernels._find_peaks, kernels._raise_floors, kernels._draw_parts, kernels._finish):
        names = kernel.arg_names
        source = triton.compiler.ASTSource(
            kernel,
            {name: types.get(name, "constexpr") for name in names},
            {name: value for name, value in constants.items() if name in names},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
        assert compiled.asm["cubin"]


def test_attention_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget

    from millrace.worker.attention import paged_triton as kernels

    types = dict.fromkeys(("query", "key", "value", "keys", "values", "output"), "*bf16")
    types |= dict.fromkeys(("sums", "maxima", "totals"), "*fp32") | {"scaling": "fp32", "positions": "*i64"}
    types |= dict.fromkeys(("tables", "rows", "tiles", "token_blocks"), "*i32")
    constants = {"WINDOW": 100, "SOFTCAP": 30.0, "CHUNK": 256, "BLOCK_SIZE": 16, "GROUP": 2, "NUM_HEADS": 8}
    constants |= {"NUM_KV_HEADS": 4, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_G": 16, "BLOCK_H": 4, "BLOCK_M": 64}
    constants |= {"BLOCK_N": 64, "BLOCK_D": 128, "BLOCK_DV": 128}
    for kernel in (kernels.write_kv, kernels.decode_chunk, kernels.merge_chunks, kernels.prefill):
        names = kernel.arg_names
        source = triton.compiler.ASTSource(
            kernel,
            {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
            {name: value for name, value in constants.items() if name in names},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 2})
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= 227 << 10
