"""The wheel, built once from a copy of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import FOLDERS, ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder: Path, **variables: str) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in ("millrace", *FOLDERS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*build, "-w", str(folder), str(tree)]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel
