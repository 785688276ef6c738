"""What the engine reads from a model's directory before the worker does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.model_files import check_parallel_sizes, eos_token_ids


@pytest.mark.parametrize("value", [2.5, "</s>", {"a": 1}, [1, None]])
def test_a_wrong_end_token_is_named(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigurationError, match=r"^model: eos_token_id in .*config.json must be a token id or a list"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": [1]},
        {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": "2"},
        {"num_attention_heads": -4, "num_hidden_layers": 2},
        {"num_attention_heads": 4, "num_hidden_layers": 0},
    ],
)
def test_a_damaged_configuration_is_left_to_the_worker_which_refuses_it(config: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_parallel_sizes(tmp_path, 2, 2)


def test_a_configuration_of_endless_depth_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match=r"^model: .*config.json can't be read"):
        check_parallel_sizes(tmp_path, 1, 1)
