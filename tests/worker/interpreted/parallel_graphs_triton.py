"""Several ranks replay the forward pass as graphs, with the double of a capture, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.driver import Driver
from tests.worker.interpreted import graph_steps
from tests.worker.models import make_model
from tests.worker.parallel.ranks import RankProcesses


def run_triton(_: None) -> None:
    """Make this process choose Triton for the next rank."""
    patch = pytest.MonkeyPatch()  # until the process ends
    graph_steps.patch_worker(patch)


def use_graphs(rank: Any) -> None:
    graph_steps.use_graphs(rank, is_alone=False)


def replays(rank: Any) -> tuple[int, list[Any]]:
    graphs = rank.runner._graphs
    return graphs._capture.num_replays, graphs.kinds


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses(2, start_method="fork")  # they import nothing again
    try:
        for connection in started._connections:
            connection.send(("inspect", (run_triton,)))
            assert connection.recv() == ("ok", None)
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=["tensor parallel", "pipeline parallel"])
def test_ranks_capture_together_and_yield_the_tokens_of_eager_steps(
    sizes: dict[str, int], processes: RankProcesses, tmp_path: Path
) -> None:
    shape = {"num_hidden_layers": sizes.get("pp", 1), "num_attention_heads": 2, "num_key_value_heads": 2}
    make_model("llama", tmp_path, **graph_steps.SMALL | shape)
    with processes.group(tmp_path, max_num_seqs=graph_steps.MAX_NUM_SEQS, **sizes) as group:
        prompts = [[1, 2], [3], [4, 5, 6]]

        def outputs() -> list[list[int]]:
            driver = Driver(group, 1, preempts=False)
            return [one.output for one in driver.run(prompts, graph_steps.MAX_TOKENS, graph_steps.SAMPLING)]

        expected = outputs()
        group.call("inspect", use_graphs)
        assert outputs() == expected
        found = group.call("inspect", replays)
        assert found[0] == found[1] or "pp" in sizes
        for number, (count, kinds) in enumerate(found):
            assert count >= len(kinds) >= 2
            assert {kind.is_decode for kind in kinds} == {True, False}
            draws = {kind.draws for kind in kinds if kind.is_decode}
            assert draws == {number >= sizes.get("pp", 1) - 1}, "only a first stage does not draw"
