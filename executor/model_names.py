"""Imports transformers without the public names of all models, to list which it reads 2,000 files. Only for a process of our
own: a user's program may ask for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unlisted_models() -> Iterator[None]:
    """Hide the folders of the models from `os.scandir`, except "auto", which chooses a model's module."""
    scandir = os.scandir

    def list_files(path: Any = ".") -> contextlib.AbstractContextManager[Any]:
        # `shutil.rmtree` lists descriptors.
        if isinstance(path, int) or os.path.basename(os.fsdecode(path)) != "models":
            return scandir(path)
        with scandir(path) as entries:
            return _Entries(iter([entry for entry in entries if entry.is_file() or entry.name == "auto"]))

    os.scandir = list_files  # type: ignore[assignment]
    try:
        yield
    finally:
        os.scandir = scandir


class _Entries(contextlib.AbstractContextManager[Any]):
    """What `os.scandir` returns: an iterator, and a context that gives itself. Python 3.12 also iterates in the context."""

    def __init__(self, entries: Iterator[os.DirEntry[str]]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __exit__(self, *_error: object) -> None: ...
