"""The exit statuses of an engine service, from which a supervisor knows what to do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace import Client
from tests.e2e.conftest import StartEngine
from tests.e2e.engines import LIMIT_S, ROOT, TINY, EngineProcess
from tests.e2e.models import make_servable
from tests.millrace.cli.command import python

DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("doom", "status", "last_line"),
    [
        ("start:killed", 6, "the workers do not start: rank 0"),
        ("start:device", 7, "uncorrectable ECC error"),
        ("start:memory", 8, "CUDA out of memory"),
        ("determine_num_available_blocks:memory", 8, "CUDA out of memory"),
    ],
)
def test_workers_that_do_not_start(
    doom: str, status: int, last_line: str, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    with doomed(tmp_path, redis_url, queue_name, doom) as engine:
        assert engine.process.wait(LIMIT_S) == status
        assert engine.text().splitlines()[-1].startswith("millrace serve: ")
        assert last_line in engine.text().splitlines()[-1]
        assert "Traceback (most recent call last)" not in engine.text().splitlines()[-1]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("doom", "status"), [("launch:killed", 6), pytest.param("launch:memory", 8, marks=pytest.mark.slow)]
)
def test_workers_that_cannot_compute(
    doom: str, status: int, redis_url: str, queue_name: str, tmp_path: Path, client: Client
) -> None:
    """The job goes back to the queue: it is the machine's fault."""
    with doomed(tmp_path, redis_url, queue_name, doom) as engine:
        engine.wait_until_serving()
        job_id = client.submit(prompt="3 + 4 =", max_tokens=4)
        assert engine.process.wait(LIMIT_S) == status
        assert engine.text().splitlines()[-1].startswith("millrace serve: ")
    assert (client.get(job_id).state, client.stats().engines) == ("queued", 0)


@pytest.mark.ranks
def test_fewer_ranks_than_asked_for_that_are_too_small_are_lost_workers(
    redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    options = ("--tensor-parallel-size", "2", "--kv-cache-memory", "1500K", "--max-model-len", "1024")
    with doomed(tmp_path, redis_url, queue_name, f"start:away:{away}", *options) as engine:
        engine.wait_until_serving()
        away.touch()
        os.kill(engine.worker_pids()[1], signal.SIGKILL)
        assert engine.process.wait(LIMIT_S) == 6
        last_line = engine.text().splitlines()[-1]
        assert "rank 1 did not start" in last_line and "one sequence of 1024 tokens needs" in last_line


@pytest.mark.faults
def test_a_gpu_that_is_gone_when_the_worker_is_restarted_is_a_lost_device(
    redis_url: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gone = tmp_path / "gone"
    with doomed(tmp_path, redis_url, queue_name, f"start:no-gpu:{gone}") as engine:
        engine.wait_until_serving()
        gone.touch()
        os.kill(engine.worker_pids()[0], signal.SIGKILL)
        assert engine.process.wait(LIMIT_S) == 7
        assert "torch sees no GPU" in engine.text().splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "number"),
    [("metrics and health", signal.SIGTERM), ("metrics and health", signal.SIGINT), ("serves", signal.SIGINT)],
)
def test_an_engine_that_gets_a_signal_to_stop_ends_with_0(
    launch: StartEngine, text: str, number: signal.Signals
) -> None:
    """While it starts, and while it serves. The engine that tests share ends with SIGTERM while it serves."""
    engine = launch("--metrics-port", "0").wait_for_log(text)
    engine.process.send_signal(number)
    assert engine.process.wait(LIMIT_S) == 0
    assert "Traceback" not in engine.text()


def test_an_engine_that_is_stopped_in_a_callback_of_python_ends_with_0(redis_url: str, queue_name: str) -> None:
    """Python drops what the handler of the signal raises there. Such a callback runs at the end of each import."""
    code = f"""
import os, signal, sys, weakref
from millrace.engine_service import serve, text

class Tokenizer(text.Tokenizer):
    def __init__(self, *args):
        some = {{1}}
        dies = weakref.ref(some, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        del some
        super().__init__(*args)
        print("the start went on", flush=True)

text.Tokenizer = Tokenizer
sys.exit(serve.main(["--model", {str(TINY)!r}, "--redis", {redis_url!r}, "--queue", {queue_name!r}, "--device", "cpu"]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (ran.returncode, ran.stdout) == (0, "the start went on\n"), ran.stderr
    assert "Traceback" not in ran.stderr and "serves" not in ran.stderr


def test_an_engine_that_is_stopped_while_it_imports_ends_with_0(
    launch: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    engine = launch().wait_for_log("prometheus_client.")  # the first of the long imports
    engine.process.send_signal(signal.SIGINT)
    assert engine.process.wait(LIMIT_S) == 0
    assert "Traceback" not in engine.text()
    assert "serves" not in engine.text()


def test_an_engine_whose_model_changes_while_it_is_read_ends_and_may_be_started_again(
    launch: StartEngine, tmp_path: Path
) -> None:
    """Its fingerprint could be that of other weights than the workers have."""
    model, other = make_servable("llama", tmp_path / "model"), make_servable("llama", tmp_path / "other", seed=1)
    engine = launch(model=model).wait_for_log("start: tokenizer")  # the workers import torch
    os.replace(other / "model.safetensors", model / "model.safetensors")
    assert engine.process.wait(LIMIT_S) == 6
    assert engine.text().splitlines()[-1].startswith("millrace serve: model: the files in ")
    assert launch(model=model).wait_until_serving().terminate() == 0


def test_an_engine_ends_after_its_time_without_a_job(launch: StartEngine, client: Client) -> None:
    job_id = client.submit(prompt="3 + 4 =", max_tokens=4, temperature=0.0)
    engine = launch("--exit-when-idle", "0.3")
    assert engine.process.wait(LIMIT_S) == 0
    assert "there was no job for 0.3 s" in engine.text() and "Traceback" not in engine.text()
    assert client.get(job_id).text == " 7"


def test_every_status_is_in_the_help_and_in_the_readme() -> None:
    table = DEPLOYMENT.split("## Exit statuses")[1].split("## Metrics")[0]
    help_text = " ".join(python("-m", "millrace", "serve", "--help").out.split("Exit status:")[1].split())
    for status in (0, 1, 2, 4, 6, 7, 8):
        assert f"| {status} |" in table
        assert f" {status} " in f" {help_text}"


def doomed(directory: Path, redis_url: str, queue: str, doom: str, *options: str) -> EngineProcess:
    log = directory / "engine.log"
    return EngineProcess(log, redis_url, queue, *options, module="tests.e2e.doomed_worker", before=(doom,))


def test_an_engine_whose_workers_do_not_come_back_can_be_stopped(
    launch: StartEngine, client: Client, tmp_path: Path
) -> None:
    """It does not wait for them: loading a model may take longer than the supervisor waits."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    engine = launch(model=model).wait_until_serving()
    job_id = client.submit(prompt_token_ids=[5], max_tokens=200, ignore_eos=True, stream=True)
    next(iter(client.stream(job_id)))
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")  # reading it blocks for ever
    os.kill(engine.worker_pids()[0], signal.SIGKILL)
    engine.wait_for_log("restarting the workers")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(LIMIT_S) == 0
    assert (client.get(job_id).state, client.stats().engines) == ("queued", 0)
