"""`python -P -m benchmarks [--only PART...] [--out FILE]`: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, executors, generation, messages, parallel, queueing
from benchmarks.environment import ROOT, describe
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect

SEED = 0
PARTS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "queue": lambda url, _: queueing.measure(url),
    "generation": generation.measure,
    "messages": lambda _, model: messages.measure(model),
    "executors": lambda _, model: executors.measure(model),
    "parallel": lambda _, model: parallel.measure(model),
    "checkpoints": checkpoints.measure,
}
"""Each gets the URL of a server and a model."""


def main() -> None:
    """Run the benchmarks, all of them unless told otherwise, against a private server."""
    options = _parse()
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as directory:
        result = {"seed": SEED, **describe(dict(connect(server.url).info("server")))}
        model = generation.make_model(Path(directory))
        result |= {name: PARTS[name](server.url, model) for name in options.only}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    _show(result, options.out)


def _show(result: dict[str, dict[str, object]], out: Path) -> None:
    table = Table("figure", "value", title=f"Millrace on {result['machine']}")
    for part in filter(PARTS.__contains__, result):
        for name, value in result[part].items():
            table.add_row(f"{part}: {name}", str(value))
    console = Console()
    console.print(table)
    console.print(f"written to {out}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: all of it")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out" / "bench.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
