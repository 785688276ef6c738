"""What can be checked of the image without a container engine: its files, its user, and the wheel inside."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

from tests.processes import FOLDERS as LINKED
from tests.processes import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"millrace", *LINKED}
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]


def instructions(stage: str) -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", stage).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word.isupper()]


FINAL_STAGE = instructions(DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :])


def test_the_process_does_not_run_as_root() -> None:
    users = [user for word, user in FINAL_STAGE if word == "USER"]
    assert users == ["millrace"]
    assert [word for word, _ in FINAL_STAGE].index("USER") < [word for word, _ in FINAL_STAGE].index("ENTRYPOINT")


def test_the_image_is_the_command() -> None:
    final = dict(FINAL_STAGE)
    assert final["ENTRYPOINT"] == '["millrace"]'
    assert "millrace" in final["HEALTHCHECK"]
    assert final["STOPSIGNAL"] == "SIGTERM"


def test_the_build_context_holds_every_package_and_nothing_private() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert allowed == {*FOLDERS, "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_every_folder_with_modules_is_a_declared_package() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    names = {folder.replace("/", ".") for folder in found}
    assert {name if name.startswith("millrace") else f"millrace.{name}" for name in names} == set(PACKAGES)


def test_the_wheel_carries_the_scripts_and_only_our_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    scripts = {f"millrace/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "results" / "lua").rglob("*.lua")}
    assert scripts
    assert scripts <= names
    assert {name.partition("/")[0] for name in names if not name.startswith("millrace-")} == {"millrace"}
