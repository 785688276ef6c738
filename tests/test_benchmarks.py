"""The benchmarks: what they report of the machine, that they do what they count, and that they compare checkouts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import redis
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import benchmarks.gpu.__main__ as gpu
from benchmarks import compare, contenders, models, queueing, report, workloads
from benchmarks.__main__ import PARTS
from benchmarks.engines import runner
from benchmarks.environment import ROOT, describe
from benchmarks.gpu import engines, kernels, steps
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.setting import Setting
from benchmarks.options import Options
from benchmarks.service import Service
from benchmarks.timing import median_interval
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect
from tests import conftest
from tests.processes import wait_until
from tests.results.full_queue import FullQueue

DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(sys.argv[-2:], flush=True); signal.pause()"

FAKE_SMI = "#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 143771 MiB'\n"


def test_what_cannot_be_known_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe({})
    assert facts["commit"] is None or len(facts["commit"]) == 40
    monkeypatch.setattr("benchmarks.environment.ROOT", tmp_path)  # no repository
    facts = describe({})
    assert (facts["commit"], facts["is_dirty"]) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    facts = describe({})
    assert (facts["commit"], facts["is_dirty"], facts["machine"]["gpus"]) == (None, None, [])


def test_gpus_are_named_with_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (smi := tmp_path / "nvidia-smi").write_text(FAKE_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu = {"name": "NVIDIA H200", "driver": "580.65.06", "memory": "143771 MiB"}
    assert describe({})["machine"]["gpus"] == [gpu]


def test_a_service_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.service.STOP_LIMIT_S", 0.1)
    log = tmp_path / "log"
    service = Service("redis://127.0.0.1:1", tmp_path, "queue", start=("-c", DEAF), log=log)
    wait_until(log.read_text, what="the service")
    with pytest.raises(subprocess.TimeoutExpired):
        service.stop()
    assert service._process.returncode == -9


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are no multiples of a batch, as those of the benchmarks are."""
    for name, number in (("NUM_JOBS", 300), ("NUM_SINGLE", 20), ("NUM_RQ_RUN", 20), ("BATCH", 256)):
        monkeypatch.setattr(queueing, name, number)


@pytest.mark.usefixtures("few")
def test_as_many_jobs_are_put_in_as_the_figures_are_divided_by(redis_url: str, redis_client: redis.Redis) -> None:
    stream, rq_queue, name = queueing._new_queue(), queueing._rq_queue(redis_url), queueing._new_queue()
    queueing._streams_add(redis_client, stream)
    queueing._rq_enqueue(rq_queue)
    queueing._submit(redis_url, name, queueing.NUM_JOBS)
    queue = FullQueue(redis_client, name)
    assert [redis_client.xlen(stream), rq_queue.count, queue.stats().queued] == [300] * 3
    rq_queue.delete(delete_jobs=True)
    redis_client.delete(stream)

    queueing._claim_and_finish(redis_url, name, 290)
    assert queue.stats().queued == 10


@pytest.mark.usefixtures("few")
def test_a_round_of_the_queue_leaves_nothing_of_the_baselines() -> None:
    with EmbeddedServer() as server, connect(server.url) as client:  # other tests leave jobs of RQ on theirs
        figures = queueing._round(server.url)
        left = [key for pattern in ("bench-*", "rq:job:*", "rq:results:*") for key in client.scan_iter(pattern)]
    assert all(figure > 0 for name, figure in figures.items() if "_cpu_" not in name), figures
    assert left == []


FAKE_BENCHMARKS = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
root = pathlib.Path(__file__).parent.parent
with open(root.parent / "runs", "a") as runs:
    print(root.name, *sys.argv[1:-2], file=runs)
figures = {"jobs_per_s": 30 if root.name == "this" else 20, "ratios": [1, 2], "zero": 0}
out.write_text(json.dumps({"queue": figures}))
"""


def test_two_checkouts_are_compared_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("this", "other"):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks" / "__init__.py").touch()
        (tmp_path / name / "benchmarks" / "__main__.py").write_text(FAKE_BENCHMARKS)
    monkeypatch.setattr(compare, "ROOT", tmp_path / "this")
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / "other"), "--part", "queue", "--pairs", "3", "--quick"])
    compare.main()
    runs = (tmp_path / "runs").read_text().splitlines()
    assert runs == [f"{name} --part queue --quick" for name in ("this", "other", "other", "this", "this", "other")]
    shown = capsys.readouterr().out
    assert "1.5000 to 1.5000" in shown and "ratios" not in shown

    monkeypatch.setattr(compare, "ROOT", tmp_path / "other")
    compare.main()
    assert len((tmp_path / "runs").read_text().splitlines()) == 12, "a checkout with itself shows the noise"

    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path), "--part", "queue"])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    assert "has no benchmarks: give the root of a checkout" in capsys.readouterr().err


def test_the_interval_of_a_median_is_made_of_two_values() -> None:
    assert median_interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
    assert median_interval([float(value) for value in range(40)]) == (13.0, 26.0)


def test_rounds_of_a_workload_have_the_same_lengths_and_other_tokens() -> None:
    for name, num_prompt, num_output in (("W1", 36_168, 24_180), ("W4", 112_356, 1_342), ("W3", 67_584, 4_096)):
        first, second = workloads.make(name, 0), workloads.make(name, 1)
        assert [first.num_prompt_tokens, second.num_prompt_tokens] == [num_prompt] * 2
        assert [first.num_output_tokens, second.num_output_tokens] == [num_output] * 2
        assert first.requests[0].prompt != second.requests[0].prompt
    assert first.least_prefill_tokens == 512 + 128 * 16
    with pytest.raises(ValueError, match='unknown workload "STEPx"'):
        workloads.make("STEPx")


class FakeEngine:
    """Has a rate, and fails in the round `fails_in`."""

    log: ClassVar[list[str]] = []

    def __init__(self, kind: contenders.EngineKind, workload: str, *, is_quick: bool, end_s: float) -> None:
        self._name, self._rate, self._fails_in = kind.name, kind.options["rate"], kind.options.get("fails_in")
        self.summary = {"start_to_first_token_s": 1.0}

    def run_round(self, number: int) -> contenders.Figures:
        self.log.append(f"{self._name}{number}")
        if number == self._fails_in:
            raise contenders.EngineError("it has ended")
        rate = self._rate + number
        return {"seconds": 100 / rate, "tokens_per_s": rate, "peak_memory_mib": 100 + number}

    def close(self) -> None:
        self.log.append(f"close {self._name}")


def test_engines_run_in_turns_and_one_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "EngineProcess", FakeEngine)
    log: list[str] = []
    monkeypatch.setattr(FakeEngine, "log", log)
    engines = {"a": {"rate": 10}, "b": {"rate": 20, "fails_in": 1}, "c": {"rate": 5}, "d": {"rate": 40}}
    a, b, c, d = (contenders.EngineKind(name, "fake", options) for name, options in engines.items())
    options = Options("", num_rounds=3, is_quick=True, limit_s=60)
    figures = contenders.run_workloads(options, ["TINY"], lambda _: [[a, b, c], [a, d]])["TINY"]
    first_group = [*("a0", "b0", "c0", "c1", "b1", "a1", "a2", "c2"), "close c", "close b", "close a"]
    assert log == [*first_group, "a0", "d0", "d1", "a1", "a2", "d2", "close d", "close a"]
    assert list(figures) == ["a", "b", "c", "d"] and figures["b"] == {"failed": "it has ended"}
    assert (figures["a"]["tokens_per_s"], figures["a"]["num_rounds"], figures["a"]["peak_memory_mib"]) == (11, 6, 102)
    assert (figures["c"]["over_a"], figures["d"]["over_a"]) == (0.5455, 3.7273) and "over_a" not in figures["a"]
    assert figures["c"]["peak_memory_mib_of_round_1"] == 100

    fails = replace(a, options={"rate": 10, "fails_in": 0})
    figures = contenders.run_workloads(options, ["TINY"], lambda _: [[a, c], [fails, d]])["TINY"]
    assert figures["a"]["num_rounds"] == 3 and "over_a" in figures["c"] and "over_a" not in figures["d"]

    figures = contenders.run_workloads(replace(options, limit_s=0), ["TINY"], lambda _: [[a, b, c]])["TINY"]
    assert [figures[name]["num_rounds"] for name in ("a", "b", "c")] == [1, 1, 1]


def test_the_memory_of_a_client_is_not_that_of_its_engine() -> None:
    script = "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == b"\n"
        with_client, without = (
            runner.memory(counts_this_process=is_engine)["peak_memory_mib"] for is_engine in (True, False)
        )
        engine.communicate(b"\n")
    assert 5 <= without <= with_client - 10


class StumblingEngine(runner.Engine):
    """Takes a millisecond for a token, and a second more for every other run, beginning with the first."""

    def __init__(self) -> None:
        self.now_s, self.prompts = 0.0, list[tuple[int, ...]]()

    def generate(self, requests: Sequence[workloads.Request]) -> list[int]:
        self.now_s += 1e-3 * requests[0].num_output + (len(self.prompts) % 2 == 0)
        self.prompts.append(tuple(requests[0].prompt))
        return [request.num_output for request in requests]


def test_the_time_of_a_decode_step_leaves_out_the_prompt_and_a_late_run_of_one_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = StumblingEngine()
    monkeypatch.setattr("time.perf_counter", lambda: engine.now_s)
    figures = runner._measure_steps(engine, partial(workloads.make, "STEP1"), 0)
    assert figures["ms_per_step"] == pytest.approx(1.0) and figures["seconds"] == pytest.approx(0.257)
    assert len(set(engine.prompts)) == 4, "a prefix cache finds nothing"


FAKE_ENGINE = """
import json, os, sys
print("{}", flush=True)
print(json.dumps({"is_warm": True, "path": os.environ["PYTHONPATH"]}), flush=True)
for line in sys.stdin:
    print('{"seconds": %s}' % line.strip(), flush=True)
"""


def test_an_engine_is_warm_before_the_rounds_of_any_engine_begin(
    bench_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engines := bench_home / "benchmarks" / "engines").mkdir(parents=True)
    (engines / "fake.py").write_text(FAKE_ENGINE)
    monkeypatch.setattr("benchmarks.environment.ROOT", bench_home)
    monkeypatch.setenv("PYTHONPATH", "build/wheels")
    engine = contenders.EngineProcess(contenders.EngineKind("a", "fake"), "W1", is_quick=True, end_s=float("inf"))
    assert engine.summary["is_warm"] and engine.summary["start_to_first_token_s"] > 0
    assert engine.summary["path"] == f"{bench_home}{os.pathsep}build/wheels"
    assert engine.run_round(7) == {"seconds": 7}
    engine.close()


def test_an_engine_that_cannot_start_is_a_failure_with_the_name_of_its_log(bench_home: Path) -> None:
    kind = contenders.EngineKind("broken", "no_such_engine")
    with pytest.raises(contenders.EngineError, match=r"the engine has ended; its log is .*broken\.W1\.log"):
        contenders.EngineProcess(kind, "W1", is_quick=True, end_s=float("inf"))
    assert "no_such_engine" in (bench_home / "logs" / "broken.W1.log").read_text()
    with pytest.raises(contenders.EngineError, match="no time is left"):
        contenders.EngineProcess(kind, "W1", is_quick=True, end_s=0.0)


@pytest.fixture
def bench_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for logs, one compute thread, and rates that were not measured."""
    monkeypatch.setattr("benchmarks.models.HOME", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rates = {"read_gb_per_s": 10.0, "float32_gflops": 100.0, "bfloat16_gflops": 100.0}
    monkeypatch.setattr("benchmarks.roofline.machine_rates", lambda: rates)
    return tmp_path


@pytest.mark.usefixtures("bench_home")
@pytest.mark.parametrize("part", ["offline", "service", "peers", "step", "kernels"])
def test_a_part_of_a_quick_run_has_the_figures_that_the_report_shows(part: str, tmp_path: Path, redis_url: str) -> None:
    options = Options(redis_url, num_rounds=1, is_quick=True, workloads=["STEP2" if part == "peers" else "W3"])
    (results := tmp_path / "results").mkdir()
    figures = PARTS[part].measure(options)
    (results / "a.json").write_text(json.dumps({**describe({}), part: figures}))
    page = tmp_path / "performance.md"
    report.write(results, page)
    text = page.read_text()
    assert {
        "offline": "| W3 | uni | ",
        "service": "| W3 | redis | ",
        "peers": "| STEP2 | millrace | ",
        "step": "| 16x128 | ",
        "kernels": "| none_1_threads | draw_8x32000 |  | ",
    }[part] in text
    assert all((tmp_path / name).exists() for name in re.findall(r"!\[.*\]\((.*)\)", text))
    if part == "offline":
        assert figures["W3"]["mp"]["prefill_over_least"] <= 1.15


def test_the_report_takes_the_newest_figures_and_says_where_they_are_from(tmp_path: Path) -> None:
    (results := tmp_path / "results").mkdir()
    engine = {"start_to_first_token_s": 2.0, "peak_memory_mib": 900, "num_rounds": 2, "versions": {}}
    slow, fast = ({**engine, "tokens_per_s": rate, "tokens_per_s_of_each_round": [rate - 1, rate]} for rate in (10, 20))
    other = {**slow, "millrace_over": 2.0, "millrace_over_interval": [1.9, 2.1], "versions": {"vllm": "0.32.0"}}
    facts = describe({}) | {"commit": "a" * 40, "is_dirty": False, "rates": {"read_gb_per_s": 30.0}}
    for name, created, ours in (("new", "2026-02-01", fast), ("old", "2026-01-01", slow)):
        peers = {"W1": {"millrace": ours, "vllm-eager": other, "broken": {"failed": "no"}}}
        (results / f"{name}.json").write_text(json.dumps({**facts, "created": created, "peers": peers}))
    (results / "chaos.json").write_text(json.dumps({"kills": 500}))
    (results / "quick.json").write_text(json.dumps({**facts, "is_quick": True, "offline": {"W1": {}}}))
    page = tmp_path / "performance.md"
    report.write(results, page)
    text = page.read_text()
    assert f"| peers | new.json | {'a' * 12} | 2026-02-01 | 30 GB/s read | vllm 0.32.0 |" in text
    assert "| W1 | millrace |  | 20 (19 to 20) | 2 | 900 | 2 |" in text
    assert "| W1 | vllm-eager | 2 (1.9 to 2.1) | 10 (9 to 10) | 2 | 900 | 2 |" in text
    assert "| W1 | broken | failed |" in text and "without Redis" not in text
    assert text.count("## ") == 2 and len(list((tmp_path / "performance").glob("*.png"))) == 1
    before = text
    report.write(results, page)
    assert page.read_text() == before

    peers = {"W1": {"millrace": slow, "vllm-compiled": other}}  # a row that no newer file has
    (results / "old.json").write_text(json.dumps({**facts, "created": "2026-01-01", "peers": peers}))
    report.write(results, page)
    of_new, of_old = page.read_text().split("From new.json:")[1].split("From old.json:")
    assert "| W1 | millrace |  | 20 (19 to 20) | 2 | 900 | 2 |" in of_new and "compiled" not in of_new
    assert "| W1 | millrace |  | 10 (9 to 10) | 2 | 900 | 2 |" in of_old and "| W1 | vllm-compiled | 2 " in of_old

    steps = {"load_s": 1.5, "how": {"is_fused": True}, "1 rows": {"step_ms": 1.25, "kernels_ms": {"prefill": 1.0}}}
    on_gpu = {
        "created": "2026-01-02",
        "machine": facts["machine"] | {"gpus": [{"name": "NVIDIA H200"}]},
        "steps": steps,
    }
    (results / "gpu.json").write_text(json.dumps(facts | on_gpu))
    report.write(results, page)
    assert "## NVIDIA H200\n" in page.read_text() and page.read_text().count("| 1 rows | 1.25 |\n") == 1
    assert "is_fused" not in page.read_text() and "| how |" not in page.read_text()

    for path in results.glob("*.json"):
        path.unlink()
    report.write(results, page)
    assert "Nothing has been measured yet." in page.read_text()


def test_the_parts_for_a_gpu_run_on_a_cpu(tmp_path: Path) -> None:
    setting = Setting("cpu", True)
    measured = dict(kernels.attention(setting)), dict(kernels.sampling(setting)), dict(steps.steps(setting))
    attention, sampling, of_steps = measured
    for name, size in (("decode of 3", 64), ("decode of 3", 128), ("prefill of 24", 64), ("prefill of 24", 128)):
        assert attention[f"{name}, head size {size}"]["max_error"] < 1e-5
        assert attention[f"{name}, head size {size}"]["kernels_us"]
    assert [sampling[name]["as_on_cpu"] for name in kernels.KINDS] == ["8 of 8"] * len(kernels.KINDS)
    for num_rows in steps.BATCHES:
        assert of_steps[f"{num_rows} rows"]["tokens_per_s"] > 0
    for num_rows in steps.PROFILED:
        figures = of_steps[f"{num_rows} rows"]
        assert figures["step_ms"] > 0 and figures["num_kernels"] >= 1 and figures["kernels_ms"]
    assert of_steps["load_s"] > 0 and of_steps["prompt_ms"] > 0
    assert of_steps["how"] == {"attention": "cpu", "is_fused": True, "has_graphs": False}
    rates = {"copy_gb_per_s": 4000.0, "tflops": 800.0}
    gpu.plot({"rates": rates, "attention": attention, "steps": of_steps}, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_sleep_wake_and_restart_are_measured() -> None:
    figures = dict(engines.sleep(Setting("cpu", True)))
    for level in ("level 1", "level 2"):
        assert figures[level]["sleep_s"] > 0 and figures[level]["wake_s"] > 0 and figures[level]["memory_left_mib"] > 0
    assert len(figures["killed_to_next_token_s"]) == 1 and figures["memory_after_restarts_mib"] > 0


def test_engines_for_which_the_time_does_not_suffice_are_cut_and_say_so() -> None:
    figures = dict(engines.throughput(Setting("cpu", True, limit_s=0.0)))
    assert [figures[name]["failed"] for name in engines.VARIANTS] == ["no time is left to start it"] * len(
        engines.VARIANTS
    )
    assert "batch-invariant: no time is left" in figures["failed"]


def test_a_part_for_a_gpu_that_fails_or_takes_too_long_keeps_its_figures_and_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has a module with parts of a test beside the package."""
    monkeypatch.setattr(gpu, "python_path", lambda: f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "sitecustomize.py").write_text(
        "import benchmarks.gpu\n" + f"benchmarks.gpu.__path__.append({str(tmp_path)!r})\n"
    )
    (tmp_path / "parts_of_a_test.py").write_text(
        "import time\n"
        "def slow(setting):\n    yield 'first', 1\n    time.sleep(600)\n"
        "def broken(setting):\n    yield 'first', 2\n    raise RuntimeError('broken on purpose')\n"
    )
    kinds = {
        "slow": gpu.PartKind("parts_of_a_test", 8.0),
        "broken": gpu.PartKind("parts_of_a_test", 60.0),
        "rates": gpu.PartKind("kernels", 60.0),
    }
    assert gpu.run(kinds, 120.0, tmp_path, "cpu", is_quick=True) == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["slow"]["first"] == 1 and "it took longer than 8 s; see parts.log" in result["slow"]["failed"]
    assert result["broken"]["first"] == 2
    assert "exit status 1: RuntimeError: broken on purpose; see parts.log" in result["broken"]["failed"]
    assert result["rates"]["tflops"] > 0
    assert "broken failed: exit status 1" in capsys.readouterr().out


def test_tests_behind_one_in_which_the_process_or_the_gpu_is_lost_run_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_one(): pass\n"
        "def test_lost(request):\n    request.session.shouldstop = 'the GPU is lost'\n    assert 1 == 2\n"
        "def test_crash(): os.abort()\n"
        "def test_skip(): pytest.skip('no reason')\n"
        "@pytest.mark.gpu_memory\ndef test_alone(): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    found = gpu_tests._run_all("gpu and not gpu_memory", [tmp_path / "test_some.py"])
    assert {name.rpartition("::")[2]: each.outcome for name, each in found.items()} == {
        "test_one": "passed",
        "test_lost": "failed",
        "test_crash": "crashed",
        "test_skip": "skipped",
    }
    of_shares = [gpu_tests._run_all("gpu and not gpu_memory", [tmp_path / "test_some.py"], f"{i}/2") for i in range(2)]
    assert sorted([*of_shares[0], *of_shares[1]]) == sorted(found)
    lost, crash = (each for name, each in found.items() if name.endswith(("lost", "crash")))
    assert lost == ("failed", "assert 1 == 2", True) and crash == ("crashed", "the process ended in this test", True)
    alone = gpu_tests._run_all("gpu_memory", [tmp_path / "test_some.py", tmp_path / "test_broken.py"])
    assert {each.outcome for each in alone.values()} == {"passed", "error"}
    assert any("nothing_of_this_name" in each.reason for each in alone.values())
    assert dict(gpu_tests._figures(found))["counts"] == {"passed": 1, "failed": 1, "crashed": 1, "skipped": 1}


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_run_of_tests_ends_behind_one_that_has_lost_the_gpu(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    session = SimpleNamespace(shouldstop=False)
    item: Any = SimpleNamespace(keywords={"gpu": True}, session=session)
    hook = conftest.pytest_runtest_makereport(item)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(SimpleNamespace(failed=True))  # type: ignore[arg-type]
    assert bool(session.shouldstop) == is_lost


@pytest.mark.slow
def test_other_tiles_of_the_kernels_for_a_gpu_are_timed_in_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "tuning", "--quick", "--device", "cpu"]
    subprocess.run([*command, "--out", tmp_path], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    figures = json.loads((tmp_path / "gpu.json").read_text())["tuning"]
    assert figures.pop("part_s") > 0 and len(figures) == 7
    for each in figures.values():
        assert len(each["fastest"]) == 1 and each["refused"] == {} and each["now"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["redis", "large", "restarts"])
def test_the_long_parts_for_a_gpu_run(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--quick", "--device", "cpu"]
    subprocess.run([*command, "--out", tmp_path], cwd=ROOT, check=True)
    figures = json.loads((tmp_path / "gpu.json").read_text())[part]
    figures |= figures.get("NANO-14B", {}) | figures.get("worker killed under load", {})
    expected = {"redis": "over_offline", "large": "tokens_per_s", "restarts": "next_token_s"}
    assert figures[expected[part]] > 0


def test_a_large_model_has_the_layer_of_a_small_one_several_times(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    small = Qwen3ForCausalLM(Qwen3Config(vocab_size=20, num_hidden_layers=1, tie_word_embeddings=False, **sizes))
    models.save_repeated(small, 3, tmp_path / "large")
    large = Qwen3ForCausalLM.from_pretrained(tmp_path / "large")
    assert len(large.model.layers) == 3
    for name, weight in large.named_parameters():
        first = re.sub(r"layers\.\d", "layers.0", name)
        torch.testing.assert_close(weight, small.get_parameter(first))


def test_the_whole_measurement_of_a_gpu_takes_less_than_8_minutes() -> None:
    assert gpu.WHOLE_LIMIT_S < 480


@pytest.mark.slow
def test_the_whole_measurement_of_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    command = ["make", "bench-gpu", f"OUT={tmp_path}", "ARGS=--quick --device cpu"]
    subprocess.run(command, cwd=ROOT, check=True)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert all(result["throughput"][name]["tokens_per_s"] > 0 for name in ("transformers", *engines.VARIANTS))
    assert result["tests"]["counts"].keys() == {"skipped"}
