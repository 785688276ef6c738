"""Which attention serves which device, model and KV pool."""

from __future__ import annotations

import logging

import pytest
import torch

from millrace.worker.attention import select
from millrace.worker.attention.reference import ReferenceAttention
from millrace.worker.attention.select import attention_for, choose_attention
from millrace.worker.errors import ConfigError
from millrace.worker.kv_pool import LayerSpec

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
ANY = "auto", "float32", "bfloat16"


@pytest.fixture(params=[True, False])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(select, "find_triton", lambda: request.param)
    return bool(request.param)


def give_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {GPU: capability}[device])


@pytest.mark.parametrize("kv_cache_dtype", ANY)
@pytest.mark.parametrize("device", [CPU, GPU])
def test_auto_is_the_fastest_of_the_device(device: torch.device, kv_cache_dtype: str, has_triton: bool) -> None:
    name = "cpu" if device is CPU else "triton" if has_triton else "reference"
    assert choose_attention("auto", device, kv_cache_dtype).name == name


@pytest.mark.parametrize(("name", "device"), [("reference", CPU), ("reference", GPU), ("cpu", CPU), ("triton", GPU)])
def test_a_named_one_is_taken(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(select, "find_triton", lambda: True)
    assert choose_attention(name, device).name == name


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("cpu", GPU, 'attention "cpu" does not run on cuda:0: use "auto" or "reference"'),
        ("triton", CPU, 'attention "triton" does not run on cpu: use "auto" or "reference"'),
        ("flash", CPU, 'unknown attention "flash": use "auto", "reference", "cpu" or "triton"'),
    ],
)
def test_a_named_one_that_does_not_run_is_refused(name: str, device: torch.device, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}$"):
        choose_attention(name, device)


def test_triton_is_refused_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_triton", lambda: False)
    with pytest.raises(ConfigError, match='attention "triton" does not run on cuda:0'):
        choose_attention("triton", GPU)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_an_fp8_pool_is_read_on_new_gpus(
    capability: tuple[int, int], has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch, capability)
    assert choose_attention("auto", GPU, "fp8").name == ("triton" if has_triton else "reference")


def test_an_fp8_pool_is_refused_where_triton_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_triton", lambda: True)
    give_gpu(monkeypatch, (8, 0))
    with pytest.raises(ConfigError, match=r'"fp8" needs a GPU of compute capability 8\.9, unlike cuda:0: use "auto"'):
        choose_attention("auto", GPU, "fp8")
    with pytest.raises(ConfigError, match='"fp8" needs a GPU: on a CPU use "auto" or "bfloat16"'):
        choose_attention("auto", CPU, "fp8")


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_reference_reads_an_fp8_pool_anywhere(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpu(monkeypatch, (7, 0))
    assert choose_attention("reference", device, "fp8").name == "reference"


@pytest.mark.parametrize(
    ("sizes", "name"), [([], "triton"), ([(256, 256)], "triton"), ([(64, 64), (64, 257)], "reference")]
)
def test_larger_heads_than_triton_has_are_the_references(
    sizes: list[tuple[int, int]], name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(select, "find_triton", lambda: True)
    specs = [LayerSpec(index, 1, *size, None) for index, size in enumerate(sizes)]
    with caplog.at_level(logging.WARNING):
        assert attention_for(choose_attention("auto", GPU), specs).name == name
        reference = ReferenceAttention()
        assert attention_for(reference, specs) is reference
    assert caplog.text.count("the Triton kernel has no heads of 257 elements") == (name == "reference")
