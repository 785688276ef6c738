"""Finds out whether one of Millrace's packages would be another program's file of the same name.

The folders have plain names (`worker`, `results`, ...), and Python takes the first one on its path: a `results.py` beside
the user's script, or another distribution's `worker`. That must end in one clear sentence and not in an AttributeError
deep inside. The right packages are the neighbours of `millrace` itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

CLIENT_PACKAGES = ("producer", "results")
"""What `from millrace import Client` loads."""
ENGINE_PACKAGES = ("producer", "results", "engine_service", "executor", "worker")
"""What an engine and its workers load."""


class ShadowedPackage(ImportError):
    """Raised when a package of Millrace is hidden by another file of that name, or is missing."""

    def __init__(self, name: str, found: Path | None, home: Path) -> None:
        if found is None:
            message = f"the package {name!r} of Millrace is missing from {home}; install millrace again"
        else:
            message = (
                f"{found} hides the package {name!r} that Millrace needs from {home}; rename it, "
                "or start Python where it is not on the path (python -P keeps the working directory off it)"
            )
        super().__init__(message, name=name, path=str(found) if found else None)
        self.found = found


def check_packages(names: Iterable[str]) -> None:
    """Raise `ShadowedPackage` for the first of `names` that Python would not load from beside `millrace`."""
    home = Path(__file__).resolve().parent.parent
    for name in names:
        found = _file_of(name)
        if found != home / name / "__init__.py":
            raise ShadowedPackage(name, found, home)


def _file_of(name: str) -> Path | None:
    """The file that `import name` would run, or has run; nothing is imported. A bare directory counts by its path."""
    try:
        spec = find_spec(name)
    except ValueError:  # already imported, by somebody who removed its spec
        return None
    if spec is None:
        return None
    if spec.origin is None:
        return next((Path(place).resolve() for place in spec.submodule_search_locations or ()), None)
    return Path(spec.origin).resolve()
