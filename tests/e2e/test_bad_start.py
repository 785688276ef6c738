"""A start with bad options, a model that cannot be served, or an unsuitable server ends with one clear sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.embedded import EmbeddedServer
from tests.e2e.engines import LIMIT_S, ROOT, TINY
from tests.worker.models import make_model

STARTED = "start: options and launch"
"""What a service logs when it has started its ranks."""


def serve(*options: str, cwd: Path | None = None) -> tuple[int, str]:
    """Return the exit status and stderr of an engine service that must not start."""
    command = [sys.executable, "-P", "-m", "millrace", "serve", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=cwd, check=False
    )
    return ended.returncode, ended.stderr.strip()


def missing(path: Path) -> str:
    return str(path / "nowhere")


def truncated(path: Path) -> str:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return str(path)


def pickled(path: Path) -> str:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    return str(path)


def needs_remote_code(path: Path) -> str:
    change_config(path, model_type="homegrown", auto_map={"AutoModelForCausalLM": "modeling.Homegrown"})
    return str(path)


def unsupported(path: Path) -> str:
    change_config(path, model_type="t5", architectures=["T5ForConditionalGeneration"])
    return str(path)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("damage", [missing, truncated, pickled, needs_remote_code, unsupported])
def test_a_model_that_cannot_be_served_ends_the_start_with_one_sentence(
    damage: Callable[[Path], str], redis_url: str, tmp_path: Path
) -> None:
    make_model("llama", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    status, error = serve("--model", damage(tmp_path), "--redis", redis_url, "--log-level", "ERROR")
    assert status == 2
    assert "Traceback" not in error
    assert error.splitlines()[-1].startswith("millrace serve: ")
    assert str(tmp_path) in error or "homegrown" in error or "t5" in error.lower()


def test_too_little_memory_for_one_sequence_is_one_sentence(redis_url: str) -> None:
    status, error = serve("--model", str(TINY), "--redis", redis_url, "--kv-cache-memory", "1")
    assert status == 2
    assert "Traceback" not in error
    assert error.splitlines()[-1].endswith("give the pool more memory (kv_cache_memory, gpu_memory_utilization)")


def test_without_redis_there_is_one_sentence_and_no_rank_is_left() -> None:
    status, error = serve(
        "--model", str(TINY), "--redis", "redis://127.0.0.1:1/0"
    )  # waits for all that write to stderr
    assert status == 4
    assert "Traceback" not in error
    lines = error.splitlines()
    assert STARTED in error and [line for line in lines if "Cannot connect to Redis" in line] == lines[-1:]


def test_a_url_that_is_none_is_an_invalid_option() -> None:
    status, error = serve("--model", str(TINY), "--redis", "http://127.0.0.1")
    assert status == 2
    assert "not a Redis URL" in error.splitlines()[-1]


def test_a_tokenizer_that_cannot_be_used_ends_the_start_with_one_sentence(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    status, error = serve("--model", str(TINY), "--redis", redis_url, "--tokenizer", str(tmp_path))
    assert status == 2
    assert "Traceback" not in error
    assert STARTED in error and error.splitlines()[-1].startswith("millrace serve: tokenizer: ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"/one\.jinja is not a valid Jinja template: line 1: .*; correct it"),
        (None, r"must be a file with a Jinja template, got '.*/one\.jinja': .*No such file"),
    ],
)
def test_a_chat_template_that_cannot_be_used_ends_the_start_with_one_sentence(
    source: str | None, message: str, redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "one.jinja"
    if source is not None:
        file.write_text(source)
    status, error = serve("--model", str(TINY), "--redis", redis_url, "--chat-template", str(file))
    assert status == 2
    assert "Traceback" not in error
    assert re.match(f"millrace serve: chat_template: .*{message}", error.splitlines()[-1])


def test_a_server_that_evicts_is_refused_by_name_of_the_setting() -> None:
    with EmbeddedServer(options={"maxmemory-policy": "allkeys-lru"}) as server:
        status, error = serve("--model", str(TINY), "--redis", server.url)
    assert status == 4
    assert "maxmemory-policy" in error
    assert "noeviction" in error


@pytest.mark.parametrize(("option", "value"), [("kv_cache_memory", "much"), ("queue", "a b"), ("log_level", "loud")])
def test_a_bad_option_is_named(option: str, value: str, redis_url: str, tmp_path: Path) -> None:
    (file := tmp_path / "engine.toml").write_text(f'{option} = "{value}"\n')
    status, error = serve("--model", str(TINY), "--redis", redis_url, "--config", str(file))
    assert status == 2
    assert option in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--model", "/nowhere"), "model: there is no directory /nowhere"),
        (("--model", str(TINY), "--tensor-parallel-size", "3"), "tensor_parallel_size"),
        (("--model", str(TINY), "--executor", "uni", "--tensor-parallel-size", "2"), "uni runs one rank"),
        (("--model", str(TINY), "--num-blocks", "99", "--kv-cache-memory", "1G"), "kv_cache_memory: num_blocks sets"),
    ],
)
def test_options_that_cannot_work_are_refused_before_a_rank_starts(
    options: tuple[str, ...], reason: str, redis_url: str
) -> None:
    status, error = serve(*options, "--redis", redis_url)
    assert status == 2
    assert STARTED not in error and "Traceback" not in error
    assert reason in error.splitlines()[-1]


def test_an_invalid_option_is_one_json_line_where_the_environment_asks_for_json(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_LOG_FORMAT", "json")
    status, error = serve("--model", str(TINY), "--max-num-seqs", "0", "--redis", redis_url)
    assert (status, len(error.splitlines())) == (2, 1)
    assert json.loads(error)["message"].startswith("max_num_seqs: must be 1 to ")
