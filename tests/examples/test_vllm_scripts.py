"""Public example scripts for vLLM's offline class run with another import and another model: those of docs/migration.md.

They come from vLLM's source distributions in the package index, which this test downloads; nothing of vLLM is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.package_index import download
from tests.processes import LIMIT_S, ROOT, checkout_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPTS = {
    "0.33.0": [
        "basic/offline_inference/basic.py",
        "basic/offline_inference/chat.py",
        "basic/offline_inference/generate.py",
        "features/automatic_prefix_caching/automatic_prefix_caching_offline.py",
        "features/automatic_prefix_caching/prefix_caching_offline.py",
        "features/structured_outputs/structured_outputs_offline.py",
        "rl/batch_invariance/reproducibility_offline.py",
    ],
    "0.8.5": ["offline_inference/reproduciblity.py"],
    "0.6.6.post1": [
        "aqlm_example.py",
        "offline_inference.py",
        "offline_inference_chat.py",
        "offline_inference_with_default_generation_config.py",
        "offline_inference_with_prefix.py",
    ],
}
IMPORTS = {
    "from vllm import": "from millrace import",
    "from vllm.outputs import": "from millrace import",
    "from vllm.sampling_params import": "from millrace import",
    "from vllm.distributed import cleanup_dist_env_and_memory": "from gc import collect as cleanup_dist_env_and_memory",
    "from vllm.utils import FlexibleArgumentParser": "from argparse import ArgumentParser as FlexibleArgumentParser",
    "from vllm.utils.argparse_utils import FlexibleArgumentParser": (
        "from argparse import ArgumentParser as FlexibleArgumentParser"
    ),
}
"""What is changed, besides the model."""


@pytest.fixture(scope="module", params=SCRIPTS)
def examples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `examples` of one source distribution. Skips where the index cannot be reached."""
    version: str = request.param
    folder = tmp_path_factory.mktemp("vllm")
    with tarfile.open(download("vllm", f"vllm-{version}.tar.gz", folder)) as files:
        wanted = [f"vllm-{version}/examples/{script}" for script in SCRIPTS[version]]
        files.extractall(folder, [files.getmember(name) for name in wanted], filter="data")
    return folder / f"vllm-{version}" / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a longer context: one prompt has 4,000 tokens."""
    model = shutil.copytree(ROOT / "examples" / "tiny_model", tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return model


def changed(script: Path, model: Path) -> str:
    text = script.read_text()
    for old, new in IMPORTS.items():
        text = text.replace(old, new)
    assert not re.search(r"^(from|import) vllm", text, re.MULTILINE), "an import that nobody has changed"
    return re.sub(r'(LLM\(\s*model=)"[^"]+"', rf"\1{str(model)!r}", text)


def test_the_scripts_of_a_version_run(examples: Path, model: Path, tmp_path: Path) -> None:
    for path in SCRIPTS[examples.parent.name.removeprefix("vllm-")]:
        (script := tmp_path / "script.py").write_text(changed(examples / path, model))
        options = ["--model", str(model)] if re.search("--model|EngineArgs", script.read_text()) else []
        ran = subprocess.run(
            [sys.executable, script, *options],
            cwd=tmp_path,
            env={**checkout_environment(), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ran.returncode == 0, f"{path}: {ran.stderr}"
        output = ran.stdout
        if "generated_same" in script.read_text():
            assert "Generated answers are the same: True" in output
        elif "chat.py" in path:
            assert output.count("Generated text:") == 11
        elif "generated_text" in script.read_text():
            assert len(re.findall(r"Generated text: ['\"].|Output:    ['\"].", output)) == 4, output
        else:
            assert output.strip()


def test_the_migration_page_lists_them() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    for version, scripts in SCRIPTS.items():
        assert f"vLLM {version}" in page
        for script in scripts:
            assert f"`{script.rpartition('/')[2]}`" in page
