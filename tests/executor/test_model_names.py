"""The folders of models are hidden while transformers is imported, and all other folders are listed as ever."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from millrace.executor.model_names import unlisted_models


def test_folders_can_be_listed_by_descriptor_meanwhile(tmp_path: Path) -> None:
    """`shutil.rmtree` does so, and a library that transformers imports may clear a temporary folder."""
    (tmp_path / "models" / "auto").mkdir(parents=True)
    (tmp_path / "models" / "llama").mkdir()
    with unlisted_models():
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            with os.scandir(descriptor) as entries:
                assert [entry.name for entry in entries] == ["models"]
        finally:
            os.close(descriptor)
        assert [entry.name for entry in os.scandir(str(tmp_path / "models"))] == ["auto"]
        assert [entry.name for entry in os.scandir(tmp_path)] == ["models"]
        shutil.rmtree(tmp_path)
    assert not tmp_path.exists()
