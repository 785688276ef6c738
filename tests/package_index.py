"""Downloads single files of the package index, such as source distributions whose tests or examples are run here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

import pytest

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
OPENED_S = 60.0


def download(project: str, name: str, folder: Path) -> Path:
    """Download one file of a project and check its hash. pip would also run the build to learn the dependencies.

    Skips the test where the index cannot be reached.
    """
    page_url = f"{INDEX}/{project}/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    try:
        with urlopen(Request(page_url, headers=accept), timeout=OPENED_S) as page:
            (entry,) = [file for file in json.load(page)["files"] if file["filename"] == name]
        with urlopen(urljoin(page_url, entry["url"]), timeout=OPENED_S) as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target)
    except (URLError, TimeoutError) as error:
        pytest.skip(f"the package index {page_url} cannot be reached: {error}")
    with (folder / name).open("rb") as written:
        assert hashlib.file_digest(written, "sha256").hexdigest() == entry["hashes"]["sha256"]
    return folder / name
