"""The process of one part: runs it, and writes its figures to a file whenever there are new ones."""

from __future__ import annotations

import os

os.environ.setdefault(
    "TEARDOWN_CUPTI", "0"
)  # before torch: a profiler that was torn down loses the kernels of the next run

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("name")
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--limit", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    part = getattr(importlib.import_module(f"benchmarks.gpu.{options.module}"), options.name)
    figures: dict[str, Any] = {}
    for name, value in part(Setting(options.device, options.quick, options.limit)):
        figures[name] = value
        print(name, json.dumps(value), flush=True)
        unfinished = options.figures.with_suffix(".new")
        unfinished.write_text(json.dumps(figures))
        unfinished.replace(options.figures)


if __name__ == "__main__":
    main()
