"""What can be checked of the image without a container engine: its files, its user, and the wheel inside."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import build_wheel
from tests.processes import FOLDERS as LINKED
from tests.processes import LIMIT_S, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"millrace", *LINKED}
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]


def instructions(stage: str) -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", stage).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word.isupper()]


BUILD_STAGE = instructions(DOCKERFILE[: DOCKERFILE.rindex("\nFROM ")])
FINAL_STAGE = instructions(DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :])


def test_the_process_does_not_run_as_root() -> None:
    users = [user for word, user in FINAL_STAGE if word == "USER"]
    assert users == ["millrace"]
    assert [word for word, _ in FINAL_STAGE].index("USER") < [word for word, _ in FINAL_STAGE].index("ENTRYPOINT")


def test_the_image_is_the_command() -> None:
    final = dict(FINAL_STAGE)
    assert final["ENTRYPOINT"] == '["millrace"]'
    assert "HEALTHCHECK" not in final, "it depends on the role"
    assert final["STOPSIGNAL"] == "SIGTERM"


def test_the_image_has_the_compiled_kernels() -> None:
    runs = [rest for word, rest in BUILD_STAGE if word == "RUN"]
    run_last = [rest for word, rest in FINAL_STAGE if word == "RUN"][-1]
    assert "--no-deps /wheels/millrace-*.whl" in run_last, "the wheel that was checked"
    assert any("install" in run and " gcc " in run for run in runs), "a compiler"
    assert any("grep --quiet" in run and "kernels/_library" in run for run in runs), "a check that they were built"
    assert any("libgomp1" in rest for word, rest in FINAL_STAGE if word == "RUN"), "what they need at run time"


def test_a_gpus_image_has_what_triton_needs_to_compile_and_to_keep_kernels() -> None:
    compiler = next(rest for word, rest in FINAL_STAGE if word == "RUN" and "apt-get" in rest)
    shell = compiler[: compiler.index(" && ")] + "; echo $compiler"
    for index, packages in (
        ("https://pypi.org/simple", "gcc libc6-dev\n"),
        ("https://download.pytorch.org/whl/cpu", "\n"),
    ):
        run = subprocess.run(
            ["sh", "-c", shell], env={"TORCH_INDEX": index}, capture_output=True, text=True, check=True
        )
        assert run.stdout == packages
    cache = next(rest for word, rest in FINAL_STAGE if word == "ENV" and "TRITON" in rest).partition("=")[2]
    owned = next(rest for word, rest in FINAL_STAGE if word == "RUN" and "useradd" in rest)
    assert "-o millrace -g millrace" in owned and '"${TRITON_CACHE_DIR}"' in owned
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert f"triton:{cache}" in compose["services"]["engine"]["volumes"] and "triton" in compose["volumes"]


def test_torch_the_other_packages_and_our_code_are_layers_of_their_own() -> None:
    installs = [rest for word, rest in FINAL_STAGE if word == "RUN" and "pip install" in rest]
    assert len(installs) == 3
    torch, packages, code = installs
    assert torch.endswith('--extra-index-url "${TORCH_INDEX}" torch')
    assert "--requirement /tmp/requirements.txt" in packages
    assert "--no-deps" in code
    between = [rest for word, rest in FINAL_STAGE if word == "COPY"]
    assert not [rest for rest in between if rest.startswith(". ")], "a change of our code would build them all again"


def test_the_requirements_file_has_what_the_wheel_needs(tmp_path: Path) -> None:
    (line,) = [rest for word, rest in BUILD_STAGE if word == "RUN" and "requirements.txt" in rest]
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    command = line.replace("/wheels/", f"{tmp_path}/").replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=LIMIT_S)
    engine = PROJECT["project"]["optional-dependencies"]["engine"]
    assert (tmp_path / "requirements.txt").read_text().split("\n")[:-1] == PROJECT["project"]["dependencies"] + engine


def test_the_images_python_is_a_tested_one() -> None:
    prefix = "Programming Language :: Python :: "
    tested = re.findall(rf"{prefix}(3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    version = re.search(r"^ARG PYTHON=(.+)$", DOCKERFILE, re.MULTILINE)
    assert version is not None and version[1] in tested
    assert f"tested with Python {' and '.join(tested)} on Linux" in (ROOT / "README.md").read_text()
    assert f"(Python {' and '.join(tested)}, Linux)" in (ROOT / "constraints.txt").read_text()
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["python:${PYTHON}-slim"] * 2


def test_the_build_context_holds_every_package_and_nothing_private() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert allowed == {
        *FOLDERS,
        "src",
        "deploy/hold-if-invalid.sh",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
    }


def test_every_folder_with_modules_is_a_declared_package() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    names = {folder.replace("/", ".") for folder in found}
    assert {name if name.startswith("millrace") else f"millrace.{name}" for name in names} == set(PACKAGES)


@pytest.mark.packages
def test_the_wheel_carries_the_scripts_and_only_our_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    scripts = {f"millrace/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "results" / "lua").rglob("*.lua")}
    assert scripts
    assert scripts <= names
    assert {name.partition("/")[0] for name in names if not name.startswith("millrace-")} == {"millrace"}


KERNELS = "millrace/worker/kernels/_library"


@pytest.mark.packages
def test_the_wheel_carries_the_compiled_kernels(wheel: Path) -> None:
    compiled = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(KERNELS)]
    assert len(compiled) == (1 if shutil.which("cc") else 0)


@pytest.mark.packages
def test_a_wheel_can_be_built_without_a_compiler(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build_wheel(tmp_path, CC="no-compiler-here")).namelist()
    assert "millrace/worker/kernels/library.py" in names
    assert not [name for name in names if name.startswith(KERNELS)]
