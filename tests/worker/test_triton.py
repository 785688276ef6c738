"""Triton's kernels compile without a GPU, with the arguments of their launches."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.executor.wire.messages import RowSampling
from millrace.worker.kv_pool import FP8, KVPool, LayerSpec
from millrace.worker.triton_support import find_triton
from tests.worker.attention.paged import attend
from tests.worker.rows import make_batch, sampling_rows

MOST_SHARED = 227 << 10
"""Bytes of shared memory that a program can have on an H100 or H200."""
KERNEL_FILES = (
    "launch_triton",
    "attention.paged_triton",
    "attention.write_triton",
    "sampling_triton",
    "floors_triton",
    "kernels.rows_triton",
    "linear.linear_triton",
    "tokens_triton",
)


class CompilingDriver:
    """A GPU that runs nothing, of the kind H100 or H200 by default."""

    capability = 90

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def test_an_old_gpu_gets_the_kernels_of_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver, "_active", CompilingDriver())
    monkeypatch.setattr(CompilingDriver, "capability", 75)
    assert not find_triton.__wrapped__()
    assert "the GPU has compute capability 7.5, the kernels need 8.0" in caplog.text
    monkeypatch.setattr(CompilingDriver, "capability", 80)
    assert find_triton.__wrapped__()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache. Several tests launch a kernel with the same arguments, and it is compiled once."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def launched(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The kernels that were launched, by hash. They are compiled as for a launch, and do not run. The interpreter accepts
    more than the compiler does, and does not see what the compiler makes of the arguments of a launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from millrace.worker import launch_triton

    found: dict[str, Any] = {}

    def load(kernel: Any) -> None:
        kernel.module = kernel.function = 0
        kernel._run = lambda *_: found.update({kernel.hash: kernel})

    def forget() -> None:
        for name in KERNEL_FILES:
            for each in vars(importlib.import_module(f"millrace.worker.{name}")).values():
                if isinstance(each, JITFunction):
                    each.device_caches.clear()
        for known in (launch_triton.capability, launch_triton.launch_options):
            known.cache_clear()

    monkeypatch.setattr(driver, "_active", CompilingDriver())
    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    forget()
    yield found
    forget()


LOAD_BEFORE = {"decode_chunks", "merge_chunks", "prefill", "rotate_and_write"}
"""Kernels that load what the step has given to the device before its first layer."""


def check_dependent_launches(kernels: dict[str, Any]) -> None:
    """Kernels that start before earlier ones have ended wait for them before they read or write."""
    for kernel in kernels.values():
        assert kernel.metadata.launch_pdl, kernel.name
        before, wait, behind = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in behind, kernel.name
        accesses = r"\b(st|atom|red|cp)" if kernel.name in LOAD_BEFORE else r"\b(ld|st|atom|red|cp)"
        assert not re.search(accesses + r"\.(?!param|shared)", before), kernel.name


def check_resources(kernels: dict[str, Any], path: Path) -> None:
    """The kernels fit into shared memory and into registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for kernel in kernels.values():
        (path / "cubin").write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", path / "cubin"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"STACK:(\d+)", usage)
        assert found is not None and int(found[1]) <= 16 and kernel.metadata.shared <= MOST_SHARED, (kernel.name, usage)


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "head_size", "group", "options"),
    [
        (torch.bfloat16, None, 64, 7, {"window": 40, "block_size": 256}),
        (torch.bfloat16, None, 128, 2, {}),
        (torch.bfloat16, None, 64, 8, {"window": 128, "sink_size": 2.0}),
        pytest.param(torch.bfloat16, None, 64, 71, {}, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, None, 256, 2, {"window": 100, "softcap": 50.0}, marks=pytest.mark.slow),
        (torch.float16, FP8, 64, 16, {}),
        (torch.bfloat16, FP8, 128, 8, {}),
        pytest.param(torch.bfloat16, FP8, 256, 2, {"softcap": 50.0}, marks=pytest.mark.slow),
        (torch.float32, None, 24, 3, {}),
        pytest.param(torch.float32, FP8, 256, 2, {}, marks=pytest.mark.slow),
        pytest.param(torch.float32, torch.bfloat16, 128, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_attention_compiles_for_a_gpu_and_not_again_for_other_lengths(
    dtype: torch.dtype,
    pool_dtype: torch.dtype | None,
    head_size: int,
    group: int,
    options: dict[str, Any],
    launched: dict[str, Any],
    tmp_path: Path,
) -> None:
    from millrace.worker.attention.triton import TritonAttention

    options |= {"shape": (2 * group, 2, head_size, head_size), "dtype": dtype, "pool_dtype": pool_dtype}
    attend(TritonAttention(), [(70, 1), (300, 5)], **options)
    assert sorted(each.name for each in launched.values()) == [
        *("cut_decodes", "decode_chunks", "merge_chunks", "prefill", "write_kv")
    ]
    check_resources(launched, tmp_path)
    check_dependent_launches({key: each for key, each in launched.items() if each.name != "cut_decodes"})
    assert not any("ld.shared.b8" in each.asm["ptx"] for each in launched.values()), "fp8 is exchanged byte by byte"
    before = set(launched)
    for rows in ([(5, 1), (7, 3)], [(256, 1), (257, 1), (16, 16)], [(9, 1), (8, 1), (30, 30), (16, 15)]):
        attend(TritonAttention(), rows, **options)
    assert set(launched) == before


@pytest.mark.parametrize(
    ("capability", "most_shared", "pool_dtypes"),
    [
        (100, 227, [FP8]),  # B200
        pytest.param(100, 227, [None], marks=pytest.mark.slow),
        pytest.param(80, 163, [None], marks=pytest.mark.slow),  # A100
        pytest.param(89, 99, [None, FP8], marks=pytest.mark.slow),  # L4, L40S, RTX 4090
        pytest.param(103, 227, [None, FP8], marks=pytest.mark.slow),  # B300
        pytest.param(120, 99, [None, FP8], marks=pytest.mark.slow),  # RTX 5090, RTX PRO 6000
    ],
)
def test_attention_compiles_for_other_gpus(
    capability: int,
    most_shared: int,
    pool_dtypes: list[torch.dtype | None],
    launched: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from millrace.worker.attention import triton as attention

    properties = SimpleNamespace(shared_memory_per_multiprocessor=(most_shared + 1) << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    stages_of = attention._prefill_stages
    monkeypatch.setattr(attention, "_prefill_stages", lambda layer, _: stages_of(layer, torch.device("cuda")))
    monkeypatch.setattr(CompilingDriver, "capability", capability)
    for head_size, pool_dtype in product((128, 256), pool_dtypes):
        shape = (16, 2, head_size, head_size)
        options: dict[str, Any] = {"shape": shape, "dtype": torch.bfloat16, "pool_dtype": pool_dtype}
        attend(attention.TritonAttention(), [(70, 1), (300, 5)], **options)
    for kernel in launched.values():
        assert kernel.metadata.target.arch == capability
        assert kernel.metadata.shared <= most_shared << 10, kernel.name


@pytest.mark.parametrize(
    ("dtype", "vocab_size"),
    [(torch.bfloat16, 151_936), (torch.float32, 500), pytest.param(torch.bfloat16, 1, marks=pytest.mark.slow)],
)
def test_sampling_compiles_for_a_gpu_and_not_again_for_other_numbers_of_rows(
    dtype: torch.dtype, vocab_size: int, launched: dict[str, Any], tmp_path: Path
) -> None:
    from millrace.worker.sampling_triton import sample

    limited, greedy = RowSampling(0.9, 20, 0.9, 0.01, 7, 0, 0, []), RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0, [])
    for settings in ([limited], [greedy]):
        sample(torch.zeros(1, vocab_size, dtype=dtype), sampling_rows([(each, 0) for each in settings]))
    assert sorted(each.name for each in launched.values()) == [
        *("_draw_parts", "_find_peaks", "_find_peaks", "_finish", "_finish", "_raise_floors", "_tally_parts")
    ]
    check_resources(launched, tmp_path)
    before = set(launched)
    for number in (2, 3, 16):
        sample(torch.zeros(number, vocab_size, dtype=dtype), sampling_rows([(limited, 1)] * number))
    assert set(launched) == before


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [(torch.bfloat16, None), (torch.bfloat16, FP8), pytest.param(torch.float32, None, marks=pytest.mark.slow)],
)
def test_layers_compile_for_a_gpu(
    dtype: torch.dtype, pool_dtype: torch.dtype | None, launched: dict[str, Any], tmp_path: Path
) -> None:
    from millrace.worker.attention.triton import TritonAttention
    from millrace.worker.kernels import rows_triton
    from millrace.worker.linear.linear_triton import FewRowsLinear, TritonLinear

    size, norms, tables = 1024, (torch.ones(128), torch.ones(128)), (torch.zeros(99, 64), torch.zeros(99, 64))
    layer = KVPool([LayerSpec(0, 2, 128, 128, None)], 9, 16, pool_dtype or dtype, torch.device("cpu")).layers[0]
    for num_rows in (1, 3, 16):
        inputs, outputs = torch.zeros(num_rows, size, dtype=dtype), torch.zeros(num_rows, 2 * size, dtype=dtype)
        TritonLinear(torch.zeros(2 * size, size, dtype=dtype), torch.zeros(2 * size, dtype=dtype)).into(inputs, outputs)
        rows_triton.rms_norm(torch.ones(size), 1e-6, inputs, inputs, adds=True)
        rows_triton.gated_activation("silu", outputs, inputs)
        how: dict[str, Any] = {"scaling": 0.1, "sliding_window": None, "softcap": None}
        batch = make_batch([(num_rows, num_rows)], 16, 9, seed=1)
        TritonAttention().forward_projected(inputs, tables, norms, 1e-6, 4, layer, **how, batch=batch)
    names = {"_gated_activation", "_rms_norm", "multiply", "rotate_and_write", "prefill", "decode_chunks"}
    assert {each.name for each in launched.values()} == names | {"cut_decodes", "merge_chunks"}
    assert len(launched) == len(names) + 2
    for num_inputs in (size, 3 * size):
        weights, norm = torch.zeros(2 * size, num_inputs, dtype=dtype), (torch.ones(num_inputs), 1e-6)
        for num_rows in (1, 2, 4):
            inputs, outputs = torch.zeros(num_rows, num_inputs, dtype=dtype), torch.zeros(num_rows, size, dtype=dtype)
            assert FewRowsLinear(weights, None).multiply_few(inputs, outputs, norm, "silu")
            assert FewRowsLinear(weights[:size], weights[:size, 0]).multiply_few(inputs, outputs, accumulate=True)
    check_resources(launched, tmp_path)
    check_dependent_launches({key: each for key, each in launched.items() if each.name != "cut_decodes"})


def test_tokens_compile_for_a_gpu_and_not_again_for_other_numbers_of_rows(launched: dict[str, Any]) -> None:
    from millrace.worker import tokens_triton

    for num_rows in (1, 2, 16, 300):
        slots, token_ids, last_tokens = (torch.zeros(count, dtype=torch.int64) for count in (num_rows, num_rows, 257))
        tokens_triton.feed(slots, token_ids, last_tokens, token_ids)
        tokens_triton.keep(slots, token_ids, last_tokens)
    assert sorted(each.name for each in launched.values()) == ["_feed", "_keep"]
