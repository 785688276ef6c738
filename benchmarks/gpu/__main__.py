"""Measure kernels, steps and throughput on one GPU, in less than 8 minutes. Write gpu.json, parts.log and roofline.png to a
directory. Run it in the root of a checkout.

parts:
  rates        copy bandwidth and the speed of matrix products: the roofline
  tests        the tests marked `gpu`
  attention    decode and prefill of one layer, against the reference and the copy bandwidth
  sampling     draws from logits, against the draws of the CPU and the copy bandwidth
  steps        loading, a prompt's time to the first token, and decode steps of 1 to 256 rows, by kernel; some of them
               also without dependent launches, and without Triton's products of few rows
  sleep        sleep, wake and restart: times, and the memory that is left
  throughput   workload NANO: Millrace, transformers' continuous batching for a part of it, and Millrace without graphs,
               in one process, without run-ahead, with a KV pool in fp8, and batch-invariant
and only with --part:
  redis        NANO through Redis, against offline; takes the packages of the extra `embedded` too
  large        workload NANO-14B
  restarts     starts with and without compiled kernels, and workers that are killed under load
  tuning       Triton's kernels with other tiles, warps and stages, the fastest first

Each part is a process with a time limit. If one fails, the JSON has its figures so far and says why, the next one begins,
and the exit status is 1. No Redis and no installed Millrace is needed: torch, transformers, Triton and other packages of
Millrace's extra `engine` (hiredis, jinja2, llguidance, msgspec, prometheus-client, pyzmq, redis, rich), for the tests
pytest, hypothesis and pytest-timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environment import describe, python_path
from benchmarks.workloads import QWEN, QWEN_14B

Figures = dict[str, Any]


class PartKind(NamedTuple):
    """Where a part is, and what it takes."""

    module: str
    """In this package. Its function has the name of the part."""
    limit_s: float
    model: str | None = None
    """Which has to be made first."""


DEFAULT: dict[str, PartKind] = {
    "rates": PartKind("kernels", 30.0),
    "tests": PartKind("tests", 170.0),
    "attention": PartKind("kernels", 40.0),
    "sampling": PartKind("kernels", 30.0),
    "steps": PartKind("steps", 80.0, QWEN),
    "sleep": PartKind("engines", 70.0, QWEN),
    "throughput": PartKind("engines", 220.0, QWEN),
}
OTHERS: dict[str, PartKind] = {
    "redis": PartKind("engines", 300.0, QWEN),
    "large": PartKind("engines", 300.0, QWEN_14B),
    "restarts": PartKind("engines", 300.0, QWEN),
    "tuning": PartKind("tuning", 300.0),
}
WHOLE_LIMIT_S = 470.0
"""Of all parts without --part. Few need all of their own time."""
MODEL_LIMIT_S = 240.0
CPU_FACTOR = 4
"""Of the limits on a CPU."""


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="little work: shows that every part runs")
    parser.add_argument("--part", nargs="+", choices=[*DEFAULT, *OTHERS], help="run these parts, in this order")
    options = parser.parse_args()
    _require(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    factor = 1 if options.device == "cuda" else CPU_FACTOR
    names = options.part or list(DEFAULT)
    kinds = {
        name: kind._replace(limit_s=factor * kind.limit_s) for name in names for kind in [(DEFAULT | OTHERS)[name]]
    }
    limit_s = sum(kind.limit_s for kind in kinds.values()) if options.part else factor * WHOLE_LIMIT_S
    sys.exit(run(kinds, limit_s, options.out.resolve(), options.device, is_quick=options.quick))


def _require(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"no GPU: torch {torch.__version__} finds none (torch.cuda.is_available()); --device cpu measures the CPU"
        )


def run(kinds: dict[str, PartKind], limit_s: float, out: Path, device: str, *, is_quick: bool) -> int:
    """Run the parts and write the files. Return the exit status."""
    end_s = time.monotonic() + limit_s
    result: Figures = {"is_quick": is_quick, "device": device, **describe({})}
    made = None if is_quick else _make_models({kind.model for kind in kinds.values() if kind.model})
    (out / "parts.log").write_text("")
    for name, kind in kinds.items():
        if made is not None and kind.model:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then the part says that it has none
                made.wait(MODEL_LIMIT_S)
        began_s = time.monotonic()
        limit_s = min(kind.limit_s, end_s - began_s)
        print(f"{name}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
        command = [kind.module, name, "--device", device, *(["--quick"] if is_quick else [])]
        result[name] = _run_part(command, limit_s, out / f"{name}.json", out / "parts.log")
        result[name]["part_s"] = round(time.monotonic() - began_s, 1)
        (out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
    if made is not None:
        made.kill()
    failed = {name: result[name]["failed"] for name in kinds if "failed" in result[name]}
    with contextlib.suppress(ImportError):  # without matplotlib there is no plot
        plot(result, out / "roofline.png")
    print("\n".join(f"{name} failed: {reason}" for name, reason in failed.items()) or "all parts are complete")
    print(f"wrote {out / 'gpu.json'}")
    return 1 if failed else 0


def _make_models(names: set[str]) -> subprocess.Popen[bytes]:
    """Start the process that makes models, beside parts that need none."""
    code = f"from benchmarks import models\nfor name in {sorted(names)!r}: models.find(name)"
    return subprocess.Popen([sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": python_path()})


def _run_part(command: list[str], limit_s: float, answer: Path, log: Path) -> Figures:
    """Run a part in a process of its own, and end it with all its children at the limit."""
    answer.unlink(missing_ok=True)
    module = [sys.executable, "-P", "-m", "benchmarks.gpu.part"]
    with log.open("a") as stream:
        print(f"\n=== {' '.join(command)} ===", file=stream, flush=True)
        process = subprocess.Popen(
            [*module, *command, "--limit", str(limit_s), "--figures", str(answer)],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    failure = None
    try:
        if status := process.wait(max(0.0, limit_s)):
            last = log.read_text(errors="replace").strip().splitlines()[-1]
            failure = f"exit status {status}: {last[-300:]}; see {log.name}"
    except subprocess.TimeoutExpired:
        failure = f"it took longer than {limit_s:.0f} s; see {log.name}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    figures: Figures = json.loads(answer.read_text()) if answer.exists() else {}
    answer.unlink(missing_ok=True)
    if failure is not None:
        figures["failed"] = "; ".join(filter(None, [figures.get("failed"), failure]))
    return figures


def plot(result: Figures, path: Path) -> None:
    """Plot the kernels and the decode steps below the roofline of the copy bandwidth and of matrix products."""
    plt = importlib.import_module("matplotlib.pyplot")
    plt.switch_backend("Agg")
    figure, axis = plt.subplots(figsize=(8, 5), layout="tight")
    if {"tflops", "copy_gb_per_s"} <= result.get("rates", {}).keys():
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
