"""Triton's kernels do in Triton's interpreter, which needs no GPU, what the CPU does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = [*sorted((FOLDER / "interpreted").glob("*_triton.py")), FOLDER / "kernels" / "test_rows_triton.py"]


@pytest.mark.parametrize("what", ["kernels", "graphs"])
def test_the_interpreter_computes_what_the_cpu_does(what: str) -> None:
    # Triton reads the variable when it is imported, so the interpreter has a process of its own.
    paths = [str(path) for path in FILES if ("graph" in path.name) == (what == "graphs")]
    plugins = ["-p", "no:cacheprovider", "-p", "tests.worker.interpreted.rank_process"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *paths]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
