"""An editable install of a checkout, used from the folder that contains the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy.conftest import copy_tree, install
from tests.deploy.test_wheel import clean
from tests.processes import FOLDERS, LIMIT_S

SCRIPT = f"""
from importlib.util import find_spec
import millrace
from millrace.worker import counter_rng
print([name for name in {sorted(FOLDERS)} if find_spec(name)])
print(millrace.Client.__module__)
print(millrace.__file__)
print(counter_rng.__file__)
"""


@pytest.mark.packages
def test_a_script_beside_the_checkout_imports_the_package_and_not_the_folder(tmp_path: Path) -> None:
    checkout = copy_tree(tmp_path / "millrace")
    python = install(tmp_path / "environment", "--editable", str(checkout), CC="no-compiler-here")
    (script := tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run([python, script], cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    found, client, *files = ran.stdout.splitlines()
    assert found == "[]", "only `millrace` is a name that can be imported"
    assert client == "millrace.producer.client"
    assert [Path(file).resolve().relative_to(checkout).as_posix() for file in files] == [
        "millrace/__init__.py",
        "worker/counter_rng.py",
    ]
