"""Measure kernels, steps and throughput on one GPU, in less than 8 minutes. Write gpu.json, roofline.png and a log for each
part to a directory. Run it in the root of a checkout.

parts:
  rates        copy bandwidth and the speed of matrix products: the roofline
  tests        the tests marked `gpu`
  attention    decode and prefill of one layer, against the reference and the copy bandwidth
  sampling     draws from logits, against the draws of the CPU and the copy bandwidth
  steps        loading, a prompt's time to the first token, and decode steps of 1 to 256 rows by kernel, some of them
               also without dependent launches
  sleep        sleep, wake and restart: times, and the memory that is left
  throughput   workload NANO: Millrace, transformers' continuous batching, and Millrace without graphs, without
               run-ahead, with a KV pool in fp8, and batch-invariant
and only with --part:
  redis        NANO through Redis, against offline; takes the packages of the extra `embedded` too
  large        workload NANO-14B
  restarts     starts with and without compiled kernels, and workers that are killed under load
  tuning       Triton's kernels with other tiles, warps and stages, the fastest first

Each part is a process with a time limit. If one fails, the JSON says why, the next one begins, and the exit status is 1.
--part NAME runs a part alone, without a limit. Its tests compile kernels, which the whole run finds in Triton's cache.
No Redis and no installed Millrace is needed: torch, transformers, Triton and other packages of Millrace's extra `engine`
(hiredis, jinja2, llguidance, msgspec, prometheus-client, pyzmq, redis, rich), for the tests pytest and hypothesis.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import models, roofline
from benchmarks.contenders import EngineKind, run_in_turns
from benchmarks.environment import ROOT, describe
from benchmarks.options import Options
from benchmarks.workloads import QWEN, QWEN_14B, TINY_MODEL

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_HEADS, NUM_KV_HEADS = 16, 8
"""Heads of Qwen3-0.6B."""
MAX_KERNELS = 12
"""Kernels of a step that are listed by name. The others are one sum."""
NANO_LIMIT_S = 155.0
"""For all engines."""
VARIANTS: dict[str, dict[str, Any]] = {
    "millrace": {},
    "eager": {"enforce_eager": True},
    "no-run-ahead": {"run_ahead": False},
    "eager-no-run-ahead": {"enforce_eager": True, "run_ahead": False},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
    "batch-invariant": {"batch_invariant": True},
}
"""The options of Millrace by name."""
NUM_RESTARTS = 2
INTERRUPTED = 2
"""pytest's exit status."""

Figures = dict[str, Any]


class Setting(NamedTuple):
    """Where and how much to measure."""

    device: str
    is_quick: bool
    """Whether to do only so much work that one sees the parts run."""
    out: Path

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"


def main() -> None:
    """Run the parts, or the one part that this process is for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="little work: shows that every part runs")
    parser.add_argument("--part", choices=[*PARTS, *ALONE], help="run this part alone, without a limit")
    options = parser.parse_args()
    _require(options.device)
    setting = Setting(options.device, options.quick, options.out.resolve())
    setting.out.mkdir(parents=True, exist_ok=True)
    models.find(TINY_MODEL if setting.is_quick else QWEN_14B if options.part == "large" else QWEN)  # not within a limit
    if options.part:
        part = ALONE[options.part] if options.part in ALONE else PARTS[options.part][0]
        figures = part(setting)
        (setting.out / f"{options.part}.json").write_text(json.dumps(figures))
    else:
        sys.exit(run(setting))


def _require(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"no GPU: torch {torch.__version__} finds none (torch.cuda.is_available()); --device cpu measures the CPU"
        )


def run(setting: Setting) -> int:
    """Run every part and write the files. Return the exit status."""
    result: Figures = {"is_quick": setting.is_quick, "device": setting.device, **describe({})}
    for name, (_, limit_s) in PARTS.items():
        limit_s *= 1 if setting.device == "cuda" else CPU_FACTOR
        print(f"{name}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        result[name] = _run_part(name, setting, limit_s)
        result[name]["part_s"] = round(time.monotonic() - began_s, 1)
        (setting.out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
    failed = {name: result[name]["failed"] for name in PARTS if "failed" in result[name]}
    with contextlib.suppress(ImportError):  # without matplotlib there is no plot
        plot(result, setting.out / "roofline.png")
    print("\n".join(f"{name} failed: {reason}" for name, reason in failed.items()) or "all parts are complete")
    print(f"wrote {setting.out / 'gpu.json'}")
    return 1 if failed else 0


def _run_part(name: str, setting: Setting, limit_s: float) -> Figures:
    """Run a part in a process of its own, and end it with all its children at the limit."""
    answer, log = setting.out / f"{name}.json", setting.out / f"{name}.log"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", "--part", name, "--out", str(setting.out)]
    command += ["--device", setting.device, *(["--quick"] if setting.is_quick else [])]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {limit_s:.0f} s; see {log.name}"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status or not answer.exists():
        last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
        return {"failed": f"exit status {status}: {last[-300:]}; see {log.name}"}
    figures: Figures = json.loads(answer.read_text())
    answer.unlink()
    return figures


# --- measuring ---


class Profile(NamedTuple):
    """What one call of some work takes."""

    wall_s: float
    num_kernels: float
    busy_s: float
    """Seconds in which a kernel runs. Kernels may start while the one ahead of them runs, and wait for it."""
    kernels: dict[str, float]
    """Seconds of the device by kernel, the longest first, with such waits. On a CPU torch's operators count as kernels."""


def profile_calls(work: Callable[[], object], num_calls: int, device: str) -> Profile:
    """Return the means of `num_calls` calls, after a first one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()  # Triton compiles
    synchronize()
    began_s = time.perf_counter()
    for _ in range(num_calls):
        work()
    synchronize()
    wall_s = (time.perf_counter() - began_s) / num_calls
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(num_calls):
            work()
        synchronize()
    seconds: Counter[str] = Counter()
    spans = []
    for event in profiler.events():
        if spent_us := event.self_device_time_total if device == "cuda" else event.self_cpu_time_total:
            seconds[event.name] += spent_us * 1e-6 / num_calls
            spans.append((event.time_range.start, event.time_range.end))
    busy_s = 1e-6 * _length_of_union(spans) / num_calls
    return Profile(wall_s, len(spans) / num_calls, busy_s, dict(seconds.most_common()))


def _length_of_union(spans: list[tuple[float, float]]) -> float:
    length, last = 0.0, -math.inf
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, last))
        last = max(last, end)
    return length


def _copy_gb_per_s(setting: Setting) -> float:
    """Return the bandwidth of a copy within the device's memory, bytes read and written."""
    import torch

    source = torch.ones((1 << 20 if setting.is_quick else 1 << 31), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    wall_s = profile_calls(lambda: target.copy_(source), 10, setting.device).wall_s
    return 2 * source.nbytes / wall_s / 1e9


def _kernel(work: Callable[[], object], operations: int, num_bytes: int, copy: float, setting: Setting) -> Figures:
    """Return the figures of one kernel, or of several that run one after the other."""
    wall_s, num_kernels, busy_s, kernels = profile_calls(work, 2 if setting.is_quick else 30, setting.device)
    device_s = (busy_s if setting.device == "cuda" else 0.0) or wall_s  # some profilers see no kernel
    return {
        "device_us": round(1e6 * device_s, 1),
        "wall_us": round(1e6 * wall_s, 1),
        "num_kernels": num_kernels,
        "gb_per_s": round(num_bytes / device_s / 1e9, 2),
        "over_copy": round(num_bytes / device_s / 1e9 / copy, 4),
        "tflops": round(operations / device_s / 1e12, 4),
        "operations_per_byte": round(operations / num_bytes, 3),
        "kernels_us": _named(kernels, 1e6),
    }


def _named(kernels: dict[str, float], unit: float) -> dict[str, float]:
    """Return the longest kernels with short names, and the sum of the others."""
    items = list(kernels.items())
    named: defaultdict[str, float] = defaultdict(float)
    for name, seconds in items[:MAX_KERNELS]:
        named[re.sub(r"^void |<.*|\(.*", "", name)[:60]] += seconds * unit
    named["others"] += unit * sum(seconds for _, seconds in items[MAX_KERNELS:])
    return {name: round(value, 3) for name, value in named.items() if value}


# --- parts ---


def rates(setting: Setting) -> Figures:
    """Measure the two lines of the roofline."""
    import torch

    size = 256 if setting.is_quick else 8192
    left, right = (torch.randn(size, size, device=setting.device).to(getattr(torch, setting.dtype)) for _ in range(2))
    wall_s = profile_calls(lambda: left @ right, 10, setting.device).wall_s
    return {"copy_gb_per_s": round(_copy_gb_per_s(setting), 1), "tflops": round(2 * size**3 / wall_s / 1e12, 3)}


def tests(setting: Setting) -> Figures:
    """Run the tests marked `gpu`, without the project's own configuration. Behind one that has lost the device (see
    tests/conftest.py) the others run in another process."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-c", os.devnull, "--rootdir", str(ROOT), "-m", "gpu"]
    command += ["-pno:cacheprovider", "-otimeout=60", "--continue-on-collection-errors", "--durations=10"]
    command += ["--collect-only"] * setting.is_quick
    outcomes: dict[str, str] = {}
    while True:
        known = [f"--deselect={test}" for test in outcomes]
        status, lines = _run_and_show([*command, *known, *map(str, marked)])
        found = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", "\n".join(lines), re.MULTILINE)
        outcomes |= dict(found)
        if not found or status != INTERRUPTED:
            break
    bad = [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    summary = str(dict(Counter(outcomes.values()))) if outcomes else (lines or ["no output"])[-1]
    return {"summary": summary, **({"failed": ", ".join(bad) or summary} if bad or status else {})}


def _run_and_show(command: list[str]) -> tuple[int, list[str]]:
    """Run a command in the root of the checkout, and print its output as it comes. Return its status and the lines."""
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return process.returncode, lines


def attention(setting: Setting) -> Figures:
    """Measure one layer's attention: 64 rows that decode at a context of 1,024, the same with a long one among them, and
    the chunk of a prompt."""
    import torch

    from benchmarks.batches import attention_inputs
    from millrace.worker.attention.reference import ReferenceAttention
    from millrace.worker.attention.select import choose_attention

    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    num_rows, context, longest, chunk = (3, 40, 300, 24) if setting.is_quick else (64, 1024, 32_768, 2048)
    implementation, copy = choose_attention("auto", device), _copy_gb_per_s(setting)
    figures: Figures = {"implementation": implementation.name, "copy_gb_per_s": round(copy, 1)}
    cases = [(f"decode of {num_rows}, head size {size}", size, [context] * num_rows, 1) for size in (64, 128)]
    cases += [(f"prefill of {chunk}, head size {size}", size, [chunk], chunk) for size in (64, 128)]
    cases += [(f"decode of {num_rows}, one of {longest}", 128, [longest, *[context] * (num_rows - 1)], 1)]
    for name, head_size, lengths, fed in cases:
        *tensors, layer, batch = attention_inputs(lengths, fed, (NUM_HEADS, NUM_KV_HEADS, head_size), dtype, device)
        query = tensors[0]
        arguments = (*tensors, layer, head_size**-0.5, None, None, batch)
        output = implementation.forward(*arguments).float()
        error = (output - ReferenceAttention().forward(*arguments).float()).abs().max().item()
        attended = sum(sum(range(length - fed + 1, length + 1)) for length in lengths)
        num_elements = 2 * sum(lengths) * NUM_KV_HEADS * head_size + 2 * query.numel()
        # Triton's attention alone; a fused decoder writes the keys and values in another kernel.
        attend = getattr(implementation, "attend", None)
        work = partial(attend, query, *arguments[3:]) if attend else partial(implementation.forward, *arguments)
        measured = _kernel(work, 4 * NUM_HEADS * head_size * attended, num_elements * dtype.itemsize, copy, setting)
        figures[name] = {"max_error": round(error, 5), **measured}
    return figures


def sampling(setting: Setting) -> Figures:
    """Measure the draw from 256 rows of 151,936 logits, and compare the first rows with the CPU's draws."""
    import torch

    from benchmarks import batches
    from millrace.worker.sampler import sample

    num_rows, vocab_size = (8, 1000) if setting.is_quick else (256, 151_936)
    device, copy = torch.device(setting.device), _copy_gb_per_s(setting)
    logits = (4 * torch.randn(num_rows, vocab_size, device=device)).to(getattr(torch, setting.dtype))
    kinds = {"greedy": (0.0, 0, 1.0), "temperature": (0.6, 0, 1.0), "top-k": (0.6, 50, 1.0), "top-p": (0.6, 0, 0.9)}
    kinds["top-k and top-p"] = (0.6, 20, 0.95)
    figures: Figures = {"copy_gb_per_s": round(copy, 1)}
    for name, settings in kinds.items():
        kind = batches.settings(*settings)
        rows = batches.sampling_rows(num_rows, device, kind, [1])
        few = batches.sampling_rows(8, torch.device("cpu"), kind, [1])
        same = sample(logits[:8].float().cpu(), few) == sample(logits.clone(), rows)[:8].cpu()
        measured = _kernel(lambda given=rows: sample(logits, given), logits.numel(), logits.nbytes, copy, setting)  # type: ignore[misc]
        figures[name] = {"as_on_cpu": f"{int(same.sum())} of 8", **measured}
    return figures


def steps(setting: Setting) -> Figures:
    """Measure a rank without an engine: loading, prompts, and decode steps by kernel. Each decode step is launched before
    the one before it is collected, as an engine does."""
    from benchmarks.batches import BLOCK_SIZE, sequences
    from millrace.executor.wire.messages import SeqId, StepId, StepPlan, WorkerConfig
    from millrace.worker.rank import Rank

    model = TINY_MODEL if setting.is_quick else QWEN
    context, num_calls = (20, 2) if setting.is_quick else (1024, 20)
    columns = -(-(context + 3 * num_calls) // BLOCK_SIZE)
    config = {"max_model_len": columns * BLOCK_SIZE, "block_size": BLOCK_SIZE, "num_blocks": 1 + max(BATCHES) * columns}
    if setting.device == "cuda":
        from millrace.worker import graphs

        graphs.CAPTURE_PAUSE_STEPS = 0  # or each number of rows would run in the graph of the largest one at first
    rank = Rank(0, 1, 1, WorkerConfig(model=str(models.path_of(model)), device=setting.device, **config))  # type: ignore[arg-type]
    began_s = time.perf_counter()
    rank.start(lambda _: None)
    figures: Figures = {"load_s": round(time.perf_counter() - began_s, 2)}
    rank.initialize_cache(*rank.determine_num_available_blocks())
    assert rank.runner is not None
    for layer in rank.runner._pool.layers.values():  # a KV pool is not initialized, and NaN would end the rows
        layer.keys.normal_()
        layer.values.normal_()
    number = 0

    def launch(depth: int, num_tokens: int, num_sampled: int, *differences: Any) -> None:
        nonlocal number
        number += 1
        rank.launch(StepPlan(StepId(number), 1, depth, num_tokens, num_sampled, *differences))

    def step(num_tokens: int, num_sampled: int, *differences: Any) -> None:
        launch(1, num_tokens, num_sampled, *differences)
        rank.collect()

    def begin(num_rows: int, num_fed: int, finished: int) -> float:
        starts = range(1, 1 + num_rows * columns, columns)
        new, rows = sequences([(context, list(range(start, start + columns))) for start in starts], num_fed)
        began_s = time.perf_counter()
        step(num_rows * num_fed, num_rows, rows, new, [SeqId(index) for index in range(finished)])
        return 1e3 * (time.perf_counter() - began_s)

    first_ms, *prompts_ms = [begin(1, context, finished=1) for _ in range(4)]
    figures["first_prompt_ms"] = round(first_ms, 1)  # Triton compiles
    figures["prompt_ms"] = round(statistics.median(prompts_ms), 2)
    copy, peak = _copy_gb_per_s(setting), rates(setting)["tflops"]

    def decode(num_rows: int, finished: int) -> Figures:
        begin(num_rows, 1, finished)
        began_s = time.perf_counter()
        step(num_rows, num_rows)
        is_slow = time.perf_counter() - began_s > 0.1  # too many kernels for the profiler
        launch(1, num_rows, num_rows)
        device_s = []

        def run_ahead() -> None:
            launch(2, num_rows, num_rows)
            device_s.append(rank.collect().device_s)

        profile = profile_calls(run_ahead, 2 if is_slow else num_calls, setting.device)
        rank.collect()
        operations, num_elements = roofline.step_work(model, num_rows, context)
        num_bytes = num_elements * (2 if setting.dtype == "bfloat16" else 4)
        least_s = max(num_bytes / copy / 1e9, operations / peak / 1e12)
        return {
            "step_ms": round(1e3 * profile.wall_s, 3),
            "device_ms": round(1e3 * profile.busy_s, 3),
            "idle_share": round(1 - statistics.median(device_s) / profile.wall_s, 4),
            "num_kernels": profile.num_kernels,
            "tokens_per_s": round(num_rows / profile.wall_s, 1),
            "roofline_share": round(least_s / profile.wall_s, 4),
            "tflops": round(operations / profile.wall_s / 1e12, 4),
            "operations_per_byte": round(operations / num_bytes, 3),
            "kernels_ms": _named(profile.kernels, 1e3),
        }

    for before, num_rows in zip((1, *BATCHES), BATCHES, strict=False):
        figures[f"{num_rows} rows"] = decode(num_rows, before)
    if rank.runner._graphs is not None:
        from millrace.worker import launch_triton

        launch_triton.LEAST_CAPABILITY = sys.maxsize
        launch_triton.launch_options.cache_clear()
        rank.runner._graphs._graphs.clear()
        for before, num_rows in ((BATCHES[-1], 1), (1, 64)):
            figures[f"{num_rows} rows, no dependent launches"] = decode(num_rows, before)
    rank.shutdown()
    return figures


def throughput(setting: Setting) -> Figures:
    """Run the workload NANO on each engine, one after the other: each takes most of the GPU's memory. An engine for which
    the time does not suffice is cut, and its figures say so."""
    end_s = time.monotonic() + (NANO_LIMIT_S - 10.0) * (1 if setting.device == "cuda" else CPU_FACTOR)
    options: Figures = {"device": setting.device, "temperature": 0.6}
    kinds = [EngineKind(name, "millrace", options | changed) for name, changed in VARIANTS.items()]
    kinds.insert(1, EngineKind("transformers", "transformers", options | {"is_continuous": True, "batch_size": 256}))
    figures: Figures = {}
    for index, kind in enumerate(kinds):
        if kind.options.get("kv_cache_dtype") == "fp8" and setting.device == "cpu":
            kind = replace(kind, options={**kind.options, "attention": "reference"})
        now_s = time.monotonic()
        limit_s = min(end_s, now_s + 2.5 * (end_s - now_s) / (len(kinds) - index))
        once = Options("", num_rounds=1, is_quick=setting.is_quick)
        figures[kind.name] = run_in_turns("NANO", [kind], once, limit_s, limit_s)[kind.name].figures(None, "")
        if (log := models.HOME / "logs" / f"{kind.name}.NANO.log").exists():
            print(log.read_text())
    ours = figures["millrace"].get("tokens_per_s")
    for name, one in figures.items():
        if ours and name != "millrace" and "failed" not in one:
            one["millrace_over_it"] = round(ours / one["tokens_per_s"], 3)
    failed = [f"{name}: {one['failed']}" for name, one in figures.items() if "failed" in one]
    return {**figures, "failed": "; ".join(failed)} if failed else figures


def sleep(setting: Setting) -> Figures:
    """Measure how long a worker takes to fall asleep, to wake up, and to come back when it was killed, each up to the next
    token; and the memory that it holds: of the device, or of the process on a CPU."""
    import torch

    from millrace import LLM, SamplingParams

    path = models.path_of(TINY_MODEL if setting.is_quick else QWEN)
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    on_gpu = setting.device == "cuda"
    free_before = torch.cuda.mem_get_info()[0] if on_gpu else 0  # and this process has its context

    def seconds(work: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        work()
        return round(time.perf_counter() - began_s, 3)

    began_s = time.perf_counter()
    llm = LLM(path, device=setting.device, dtype=setting.dtype, executor="mp", max_model_len=512)
    executor: Any = llm._engine._executor

    def generate() -> None:
        llm.generate([[10, 11, 12]], once, use_tqdm=False)

    def memory_mib() -> int:
        if on_gpu:
            return (free_before - torch.cuda.mem_get_info()[0]) >> 20
        (pid,) = executor.worker_pids()
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    generate()
    figures: Figures = {
        "start_to_first_token_s": round(time.perf_counter() - began_s, 3),
        "next_token_s": seconds(generate),
        "memory_mib": memory_mib(),
    }
    for level in (1, 2):
        asleep_s = seconds(lambda level=level: llm.sleep(level))  # type: ignore[misc]
        left_mib = memory_mib()
        figures[f"level {level}"] = {
            "sleep_s": asleep_s,
            "memory_left_mib": left_mib,
            "wake_s": seconds(llm.wake_up),
            "next_token_s": seconds(generate),
        }
    restarts = []
    for _ in range(1 if setting.is_quick else NUM_RESTARTS):
        os.kill(executor.worker_pids()[0], signal.SIGKILL)
        restarts.append(seconds(generate))
    figures["killed_to_next_token_s"] = restarts
    figures["memory_after_restarts_mib"] = memory_mib()
    llm.shutdown()
    return figures


def _alone(module: str, function: str) -> Callable[[Setting], Figures]:
    """Return a part that another module has, whose imports only this part takes."""

    def part(setting: Setting) -> Figures:
        figures: Figures = getattr(importlib.import_module(module), function)(setting.device, is_quick=setting.is_quick)
        return figures

    return part


PARTS: dict[str, tuple[Callable[[Setting], Figures], float]] = {
    "rates": (rates, 15.0),
    "tests": (tests, 110.0),
    "attention": (attention, 25.0),
    "sampling": (sampling, 20.0),
    "steps": (steps, 45.0),
    "sleep": (sleep, 50.0),
    "throughput": (throughput, NANO_LIMIT_S),
}
"""With a time limit in seconds: in sum 7 minutes, and less than one more to make the model."""
ALONE: dict[str, Callable[[Setting], Figures]] = {
    **{name: _alone("benchmarks.gpu_long", name) for name in ("redis", "large", "restarts")},
    "tuning": _alone("benchmarks.gpu_tuning", "measure"),
}
CPU_FACTOR = 4
"""Of the limits on a CPU."""


def plot(result: Figures, path: Path) -> None:
    """Plot the kernels and the decode steps below the roofline of the copy bandwidth and of matrix products."""
    plt = importlib.import_module("matplotlib.pyplot")
    plt.switch_backend("Agg")
    figure, axis = plt.subplots(figsize=(8, 5), layout="tight")
    if "tflops" in result.get("rates", {}):
        copy, peak = result["rates"]["copy_gb_per_s"] / 1e3, result["rates"]["tflops"]
        ridge = peak / copy
        axis.loglog(
            [0.1, ridge, 100 * ridge], [0.1 * copy, peak, peak], "k-", label=f"{copy:.3g} TB/s, {peak:.3g} TFLOP/s"
        )
    for part, marker in (("attention", "o"), ("sampling", "s"), ("steps", "^")):
        for name, one in result.get(part, {}).items():
            if isinstance(one, dict) and one.get("tflops"):
                axis.loglog(one["operations_per_byte"], one["tflops"], marker, label=f"{part}: {name}")
    axis.set(xlabel="operations per byte", ylabel="TFLOP/s")
    if axis.lines:
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
