"""A file of the user's that hides one of our packages ends in one clear error that names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millrace.cli import serve
from millrace.cli.exits import CommandError
from millrace.shadowing import CLIENT_PACKAGES, ENGINE_PACKAGES, ShadowedPackage, check_packages
from tests.cli.command import ROOT, python


def test_nothing_hides_the_packages_of_a_normal_installation() -> None:
    check_packages(CLIENT_PACKAGES)
    check_packages(ENGINE_PACKAGES)


def test_a_module_beside_the_users_script_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.py").write_text("rows = []\n")
    (tmp_path / "script.py").write_text("from millrace import Client\n")
    ran = python("script.py", cwd=tmp_path)
    assert ran.status == 1
    last = ran.err.splitlines()[-1]
    assert last.startswith("millrace.shadowing.ShadowedPackage: ")
    assert str(tmp_path / "results.py") in last
    assert "rename it" in last


def test_the_command_says_it_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "producer.py").write_text("")
    ran = python("-m", "millrace", "stats", cwd=tmp_path)
    assert ran.status == 1
    assert ran.err.startswith(f"millrace: {tmp_path / 'producer.py'} hides the package 'producer'")
    assert len(ran.err.splitlines()) == 1


def test_another_distribution_that_comes_first_stops_an_engine(tmp_path: Path) -> None:
    package = tmp_path / "worker"
    package.mkdir()
    (package / "__init__.py").write_text("")
    ran = python("-P", "-m", "millrace", "serve", "--model", "m", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert ran.status == 1
    assert f"{package / '__init__.py'} hides the package 'worker'" in ran.err


def test_a_folder_without_modules_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    ran = python("-c", "from millrace import Client", cwd=tmp_path)
    assert (ran.status, ran.err) == (0, "")


def test_a_missing_package_asks_for_a_new_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.shadowing.find_spec", lambda name: None)
    with pytest.raises(ShadowedPackage, match=r"'producer' of Millrace is missing.*install millrace again"):
        check_packages(CLIENT_PACKAGES)


def test_serve_without_the_engine_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "torch" else sys.modules[__name__].__spec__)
    with pytest.raises(CommandError, match=r"an engine needs torch; run: pip install 'millrace\[engine\]'"):
        serve.require_engine()
