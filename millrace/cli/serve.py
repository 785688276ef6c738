"""`millrace serve`: replace this process with the engine service, so that a supervisor sees the engine itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from millrace.cli.exits import INVALID, CommandError
from millrace.cli.options import Verbs

_ENGINE_EXTRA = ("torch", "transformers", "safetensors", "zmq", "prometheus_client", "jinja2")


def add_parsers(verbs: Verbs) -> None:
    """Add the verb to the list. The engine parses its arguments, see `millrace.engine_service.config`."""
    verbs.add_parser("serve", help="run an engine for a queue (see `millrace serve --help`)", add_help=False)


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process with `python -P -m millrace.engine_service`. Raises CommandError if packages are missing."""
    require_engine()
    sys.stdout.flush()
    os.execv(sys.executable, engine_command(arguments))


def require_engine() -> None:
    """Raise CommandError if packages for an engine are missing."""
    missing = [name for name in _ENGINE_EXTRA if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"an engine needs {', '.join(missing)}; run in the checkout: pip install '.[engine]'", INVALID
        )


def engine_command(arguments: Sequence[str]) -> list[str]:
    """Return the engine's command line. -P: no file of the working directory hides a module that the engine imports."""
    return [sys.executable, "-P", "-m", "millrace.engine_service", *arguments]
