"""Which executor is chosen, and what is refused with a remedy."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from millrace import LLM
from millrace.engine_service.build import build_executor
from millrace.engine_service.config import EngineConfig
from millrace.engine_service.errors import ConfigurationError
from millrace.executor.launch.external import RENDEZVOUS_DIR
from millrace.executor.launch.select import make_executor
from millrace.executor.wire.messages import WorkerConfig
from tests.e2e.engines import TINY


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.executor.launch.select.is_ray_reachable", lambda: False)


def name_of(name: str, *, is_service: bool = True, ranks: int = 1, device: str = "auto") -> str:
    config = WorkerConfig(model="", tensor_parallel_size=ranks, device=device)
    return make_executor(name, config, is_service=is_service).name


def see_gpus(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.executor.launch.select.num_visible_gpus", lambda: number)


def test_ranks_have_processes_of_their_own_also_one_rank_of_llm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(1, monkeypatch)
    with caplog.at_level(logging.INFO, "millrace.executor"):
        assert name_of("auto", is_service=False, device="cpu") == "mp"
        assert name_of("auto", is_service=False) == "mp"
        assert name_of("auto") == "mp"
    assert [record.message for record in caplog.records] == [
        "executor: mp, 1 rank (there is no GPU to use)",
        *["executor: mp, 1 rank (GPUs of this host: 1)"] * 2,
    ]


def test_several_ranks_take_processes_where_there_are_devices_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(None, monkeypatch)
    assert name_of("auto", is_service=False, ranks=4) == "mp"
    see_gpus(4, monkeypatch)
    assert name_of("auto", is_service=False, ranks=4) == "mp"
    see_gpus(1, monkeypatch)
    assert name_of("auto", ranks=4, device="cpu") == "mp"


@pytest.mark.parametrize("name", ["auto", "mp"])
def test_too_few_devices_are_an_error_that_names_ray(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(2, monkeypatch)
    with pytest.raises(ValueError, match=r"needs 4 GPUs, this host has 2; .*ray"):
        name_of(name, ranks=4)


def test_too_few_devices_take_ray_when_it_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    see_gpus(2, monkeypatch)
    monkeypatch.setattr("millrace.executor.launch.select.is_ray_reachable", lambda: True)
    assert name_of("auto", ranks=4) == "ray"


def test_torchruns_ranks_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RENDEZVOUS_DIR, "/nowhere")
    assert name_of("auto", ranks=2) == "external"


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_external_is_not_for_llm_and_the_error_says_what_is() -> None:
    with pytest.raises(
        ConfigurationError, match=r"external is for `millrace serve` under torchrun .*use executor mp, or ray"
    ):
        LLM(TINY, executor="external", tensor_parallel_size=2)


@pytest.mark.usefixtures("under_torchrun")
def test_a_script_that_torchrun_runs_twice_gets_ranks_in_each_process_only_when_it_says_so() -> None:
    with pytest.raises(ValueError, match=r"this script in 2 processes, and LLM would start 2 ranks in each"):
        name_of("auto", is_service=False, ranks=2, device="cpu")
    assert name_of("mp", is_service=False, ranks=2, device="cpu") == "mp"
    assert name_of("auto", is_service=False, device="cpu") == "mp"


def test_visible_devices_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.executor.launch.devices import num_visible_gpus

    for named, number in (("0,1,3", 3), ("", None), ("-1", None), ("GPU-5f", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert num_visible_gpus() == number


def test_combinations_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="use mp"):
        name_of("uni", ranks=2, device="cpu")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tensor_parallel_size": 3}, "one of 1, 2, got 3"),
        ({"pipeline_parallel_size": 5}, "at most the model's number of layers, 4, got 5"),
        ({"tensor_parallel_size": 0}, "must be 1 to 4096, got 0"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused_from_its_config(
    sizes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    model = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": model}))
    with pytest.raises(ConfigurationError, match=reason):
        build_executor(EngineConfig(model=str(tmp_path), **sizes), tmp_path, is_service=False)  # type: ignore[arg-type]


def test_one_gpu_by_its_number_is_refused_for_several_ranks() -> None:
    assert EngineConfig(model="m", device="cuda:1").device == "cuda:1"
    with pytest.raises(ConfigurationError, match=r'device: names one GPU, .* use "cuda", .* got .cuda:1.'):
        EngineConfig(model="m", device="cuda:1", tensor_parallel_size=2)
