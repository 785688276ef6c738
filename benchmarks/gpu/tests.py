"""Runs the tests marked `gpu`: files or shares of them side by side, since most of their time goes into compilers; then,
alone, those that are marked `gpu_memory`, because they fill or measure the memory of the GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.environment import ROOT, python_path
from benchmarks.gpu import outcomes
from benchmarks.gpu.setting import Figures, Part, Setting

TEST_LIMIT_S = 90
TO_REPEAT = 2
"""Tests in which the GPU or the process was lost, and which run once more."""
COMPLETE = {0, 1, 5}
"""Exit statuses of pytest: all passed, some failed, none collected."""


class Outcome(NamedTuple):
    outcome: str
    reason: str
    ends_process: bool = False
    """Whether the process ended in or behind the test, because it or its GPU was lost."""


Outcomes = dict[str, Outcome]


def tests(setting: Setting) -> Part:
    """Run the tests without the project's own configuration."""
    paths = sorted((ROOT / "tests").glob("*/**/test_*.py"))  # those at the top have none, and need more packages
    marked = [path for path in paths if "mark.gpu" in path.read_text()]
    found: Outcomes = {}
    num_shares = max(1, (os.cpu_count() or 1) // len(marked))
    shares = [(path, f"{share}/{num_shares}") for path in marked for share in range(num_shares)]
    with ThreadPoolExecutor(len(shares)) as pool:
        side_by_side = partial(_run_all, "gpu and not gpu_memory")
        for future in as_completed([pool.submit(side_by_side, [path], share) for path, share in shares]):
            found |= future.result()
            yield from _figures(found)
    found |= _run_all("gpu_memory", marked)
    yield from _figures(found)
    for test in [test for test, one in found.items() if one.ends_process][:TO_REPEAT]:
        print(f"{test} once more, with an error where it happens:", flush=True)
        _run([test], [], CUDA_LAUNCH_BLOCKING="1")


def _figures(found: Outcomes) -> Iterable[tuple[str, Figures | str]]:
    yield "counts", dict(Counter(one.outcome for one in found.values()))
    if bad := {test: one for test, one in found.items() if one.outcome not in ("passed", "skipped")}:
        yield "failed", "\n".join(f"{test} {one.outcome}: {one.reason}" for test, one in bad.items())


def _run_all(marker: str, paths: Sequence[Path], share: str = "0/1") -> Outcomes:
    """Run all tests of some files, or a share of them (`outcomes.SHARE`). Behind one in which the process or its GPU is lost
    the others run in another process."""
    found: Outcomes = {}
    while True:
        new, status = _run([*map(str, paths), "-m", marker], found, **{outcomes.SHARE: share})
        found |= new
        if status in COMPLETE or not new:
            break
        *_, last = new
        found[last] = new[last]._replace(ends_process=True)
    if status not in COMPLETE:
        found[" ".join(path.name for path in paths)] = Outcome("error", f"pytest has ended with status {status}")
    return found


def _run(arguments: Sequence[str], known: Iterable[str], **variables: str) -> tuple[Outcomes, int]:
    """Run pytest, without the known tests, and show its output as it comes. Return outcomes and status. The status is
    negative where the process was killed or has ended by itself."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-c", os.devnull, "--rootdir", str(ROOT)]
    command += ["--disable-warnings", "--continue-on-collection-errors", "--durations=5", "-pno:cacheprovider"]
    command += [f"-p{outcomes.__name__}", *(f"--deselect={test}" for test in known)]
    if importlib.util.find_spec("pytest_timeout"):  # a signal would not end a wait for the GPU
        command += ["-ppytest_timeout", f"-otimeout={TEST_LIMIT_S}", "-otimeout_method=thread"]
    with tempfile.NamedTemporaryFile() as file:
        settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": python_path(), outcomes.FILE: file.name}
        with subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env=os.environ | settings | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"{process.pid}: {line}", end="", flush=True)
        lines = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    found = {line["test"]: Outcome(line["outcome"], line["reason"]) for line in lines if "test" in line}
    return found, next((line["status"] for line in lines if "status" in line), -abs(process.returncode) or -1)
