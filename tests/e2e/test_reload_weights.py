"""An `LLM` whose weights are changed, as between the steps of a training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from millrace import LLM, RequestOutput, SamplingParams
from millrace.engine_service.errors import Asleep, EngineDead, EngineError
from millrace.executor.launch.multiproc import MultiprocExecutor
from millrace.producer import InvalidRequest
from tests.worker.loading.test_adapter import QUERY, factors, of_layer, save_adapter
from tests.worker.models import make_model

PROMPT = list(range(10, 60))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same shapes."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    make_model("llama", old)
    make_model("llama", new, seed=1)
    return old, new


@pytest.fixture(scope="module")
def expected(places: tuple[Path, Path]) -> list[tuple[list[int], Any]]:
    """What fresh `LLM`s with the old and the new weights generate."""
    results = []
    for place in places:
        with LLM(place, device="cpu", executor="uni") as llm:
            results.append(result(llm))
    assert results[0][0] != results[1][0]
    return results


@pytest.fixture
def llm(places: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(places[0], device="cpu", executor="uni") as llm:
        yield llm


def generate(llm: LLM, **params: Any) -> RequestOutput:
    sampling = SamplingParams(**params) if params else GREEDY
    return llm.generate([PROMPT], sampling, use_tqdm=False)[0]


def result(llm: LLM) -> tuple[list[int], Any]:
    output = generate(llm).outputs[0]
    return output.token_ids, pytest.approx(output.cumulative_logprob, abs=1e-4)


def kill_worker(llm: LLM) -> None:
    executor = llm._engine._executor
    assert isinstance(executor, MultiprocExecutor)
    os.kill(executor.worker_pids()[0], signal.SIGKILL)


def test_it_generates_as_a_fresh_one_with_the_new_weights(
    llm: LLM, places: tuple[Path, Path], expected: list[tuple[list[int], Any]]
) -> None:
    old, new = expected
    assert result(llm) == old
    assert generate(llm).num_cached_tokens > 0
    llm.reload_weights(places[1])
    assert generate(llm).num_cached_tokens == 0, "the prompt was computed with the old weights"
    assert result(llm) == new
    for tags in (None, ["weights"], ["kv_cache"], []):
        llm.sleep(1 if tags is None else 2)
        if tags:
            llm.wake_up(tags)
        llm.reload_weights()
        assert result(llm) == old
        llm.sleep(2)
        llm.reload_weights(str(places[1]))
        assert result(llm) == new
    llm.sleep(2)
    llm.wake_up()
    assert result(llm) == new, "those that it had last"


def test_the_models_own_files_may_have_changed(tmp_path: Path, expected: list[tuple[list[int], Any]]) -> None:
    make_model("llama", tmp_path)
    with LLM(tmp_path, device="cpu", executor="uni") as llm:
        for seed in (1, 0):
            make_model("llama", tmp_path, seed=seed)
            llm.reload_weights()
            assert result(llm) == expected[seed]
        llm.sleep(2)
        make_model("llama", tmp_path, seed=1)
        with pytest.raises(EngineDead, match=r"LLM\.reload_weights"):
            llm.wake_up()
        llm.reload_weights()
        assert result(llm) == expected[1]


def test_an_adapter_is_merged_at_the_start_and_another_one_later(
    places: tuple[Path, Path], expected: list[tuple[list[int], Any]], tmp_path: Path
) -> None:
    weight = load_file(places[0] / "model.safetensors")[f"{QUERY}.weight"]
    adapters = [tmp_path / "first", tmp_path / "second"]
    for adapter in adapters:
        save_adapter(adapter, of_layer(QUERY, *factors(weight)), lora_alpha=64)
    with LLM(places[0], adapter=adapters[0], device="cpu", executor="uni") as llm:
        first = result(llm)
        llm.reload_weights(adapters[1])
        second = result(llm)
        llm.sleep(2)
        llm.wake_up()
        assert result(llm) == second
        llm.reload_weights()
        assert result(llm) == first
        llm.reload_weights(places[1])
        assert result(llm) == expected[1]
    assert len({tuple(each[0]) for each in (first, second, *expected)}) == 4


def test_wrong_files_are_named_and_good_ones_help(
    llm: LLM, places: tuple[Path, Path], expected: list[tuple[list[int], Any]], tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    good = load_file(places[1] / "model.safetensors")
    for tensors, words in (
        ({each: tensor for each, tensor in good.items() if each != name}, f"missing {name}"),
        ({**good, name: good[name][:, 1:].contiguous()}, rf"{name} is stored as \[64, 127\]"),
        (None, "no safetensors files"),
    ):
        (tmp_path / "config.json").write_bytes((places[1] / "config.json").read_bytes())
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        if tensors is not None:
            save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(EngineError, match=f"{words}.*call reload_weights again"):
            llm.reload_weights(tmp_path)
        assert llm.metrics().sleep_level == 2
        with pytest.raises(Asleep):
            generate(llm)
        llm.reload_weights(places[1])
        assert result(llm) == expected[1]


@pytest.mark.parametrize("path", ["/nowhere", "", 5])
def test_a_path_that_is_no_directory_of_a_model_changes_nothing(
    path: Any, llm: LLM, expected: list[tuple[list[int], Any]]
) -> None:
    with pytest.raises(InvalidRequest, match=r"^path: "):
        llm.reload_weights(path)
    assert result(llm) == expected[0]


def test_a_call_that_runs_is_not_disturbed(llm: LLM, places: tuple[Path, Path]) -> None:
    refused = []

    def make_bar(**_: Any) -> Any:
        with pytest.raises(EngineError, match="another thread uses this LLM") as error:
            llm.reload_weights(places[1])
        refused.append(error)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], GREEDY, use_tqdm=make_bar)
    assert len(refused) == 1


def test_requests_without_a_seed_draw_others_and_a_seed_keeps_its_own(llm: LLM, places: tuple[Path, Path]) -> None:
    sampled = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    seeded = generate(llm, **sampled, seed=7).outputs[0].token_ids
    first = generate(llm, **sampled).outputs[0].token_ids
    llm.reload_weights()
    assert generate(llm, **sampled).outputs[0].token_ids != first
    assert generate(llm, **sampled, seed=7).outputs[0].token_ids == seeded


def test_a_worker_that_dies_comes_back_with_the_new_weights(
    places: tuple[Path, Path], expected: list[tuple[list[int], Any]]
) -> None:
    with LLM(places[0], device="cpu", executor="mp") as llm:
        llm.reload_weights(places[1])
        kill_worker(llm)
        assert result(llm) == expected[1]
        llm.sleep(2)
        kill_worker(llm)
        llm.reload_weights()
        assert result(llm) == expected[0]


@pytest.mark.slow
def test_a_worker_does_not_come_back_with_files_that_changed_after_the_call(
    places: tuple[Path, Path], expected: list[tuple[list[int], Any]], tmp_path: Path
) -> None:
    make_model("llama", tmp_path, seed=1)
    with LLM(places[0], device="cpu", executor="mp") as llm:
        llm.reload_weights(tmp_path)
        make_model("llama", tmp_path, seed=2)
        kill_worker(llm)
        with pytest.raises(EngineDead, match=r"weights are not what they were .* LLM\.reload_weights"):
            generate(llm)
        llm.reload_weights(places[1])
        assert result(llm) == expected[1]


@pytest.mark.ranks
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_rank_reads_its_part(
    size: str, places: tuple[Path, Path], expected: list[tuple[list[int], Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((places[1] / "config.json").read_bytes())
    options: dict[str, Any] = {size: 2}
    with LLM(places[0], device="cpu", executor="mp", **options) as llm:
        for _ in range(2):
            llm.reload_weights(places[1])
            assert result(llm) == expected[1]
            with pytest.raises(EngineError, match="no safetensors files"):
                llm.reload_weights(tmp_path)
