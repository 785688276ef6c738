"""`millrace serve`: becomes the engine service. The process that a supervisor sees is the engine itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from millrace.cli.exits import CommandError
from millrace.cli.options import Verbs

_ENGINE_EXTRA = ("torch", "transformers", "safetensors", "zmq", "prometheus_client", "jinja2")


def add_parsers(verbs: Verbs) -> None:
    """Name the verb in the list; its arguments are the engine's own, see `millrace.engine_service.config`."""
    verbs.add_parser("serve", help="run an engine that drains a queue (see `millrace serve --help`)", add_help=False)


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process with `python -P -m millrace.engine_service`, if the engine can run here."""
    require_engine()
    sys.stdout.flush()
    os.execv(sys.executable, engine_command(arguments))


def require_engine() -> None:
    """Raise one clear error when this installation cannot run an engine."""
    missing = [name for name in _ENGINE_EXTRA if find_spec(name) is None]
    if missing:
        raise CommandError(f"an engine needs {', '.join(missing)}; run: pip install 'millrace[engine]'")


def engine_command(arguments: Sequence[str]) -> list[str]:
    """-P: a file in the working directory must not hide a module that the engine imports."""
    return [sys.executable, "-P", "-m", "millrace.engine_service", *arguments]
