"""The wheel, built once from a copy of the tree, and environments to install into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.processes import FOLDERS, LIMIT_S, ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder: Path, **variables: str) -> Path:
    tree = copy_tree(folder / "tree")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*build, "-w", str(folder), str(tree)]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_tree(tree: Path) -> Path:
    """Copy what a build needs, links as links."""
    tree.mkdir()
    for name in ("src", "millrace", *FOLDERS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def install(environment: Path, *what: str, **variables: str) -> Path:
    """Create an environment, install what pip is given without a network, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=LIMIT_S)
    python = environment / "bin" / "python"
    # The dependencies come from this environment. A folder that a .pth file names is searched for modules, but its own
    # .pth files are not read: the editable install of the checkout stays out.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", *what]
    subprocess.run(command, env=os.environ | variables, check=True, timeout=LIMIT_S)
    return python
