"""The kernels' own tests once more, in a library that checks each access to memory and each undefined operation."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from millrace.worker.kernels.library import Kernels
from tests.processes import ROOT

SOURCES = ROOT / "worker" / "kernels"
FLAGS = ["-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
RUN = """
import sys
import millrace.worker.kernels.library as library
library.__file__ = sys.argv[1]
import pytest
sys.exit(pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", "--timeout=1200", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def checked_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("checked") / f"_library{EXTENSION_SUFFIXES[0]}"
    sources = sorted(map(str, SOURCES.glob("*.c")))
    subprocess.run(["cc", *FLAGS, *SANITIZERS, *sources, "-lm", "-o", str(library)], check=True, timeout=1000)
    return library


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_no_access_out_of_bounds_and_nothing_undefined(all_kernels: Kernels, checked_library: Path) -> None:
    names = ["attention", "codes", "layer_attention", "linear", "recurrence", "sampling"]
    tests = [str(Path(__file__).parent / f"test_{name}.py") for name in names]
    # libstdc++ too: AddressSanitizer looks for its functions at once, and other packages throw C++ exceptions.
    runtimes = [_path_of("libasan.so"), _path_of("libstdc++.so.6")]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",  # Python and torch keep what they have
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    module = str(checked_library.parent / "library.py")
    command = [sys.executable, "-c", RUN, module, "-k", all_kernels.instruction_set, *tests]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert " passed" in ran.stdout


def _path_of(library: str) -> str:
    command = ["cc", f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
