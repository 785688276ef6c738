"""`python -P -m benchmarks [--out FILE]`: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, executors, generation, messages, parallel, queueing
from benchmarks.environment import ROOT, describe
from millrace.embedded import EmbeddedServer
from results.connection import connect

SEED = 0


def main() -> None:
    """Run every benchmark against a private server."""
    options = _parse()
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as directory:
        result = {"seed": SEED, **describe(dict(connect(server.url).info("server")))}
        result["queue"] = queueing.measure(server.url)
        model = generation.make_model(Path(directory))
        result["generation"] = generation.measure(server.url, model)
        result["messages"] = messages.measure(model)
        result["executors"] = executors.measure(model)
        result["parallel"] = parallel.measure(model)
        result["checkpoints"] = checkpoints.measure(server.url, model)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    _show(result, options.out)


def _show(result: dict[str, dict[str, object]], out: Path) -> None:
    table = Table("figure", "value", title=f"Millrace on {result['machine']}")
    for part in ("queue", "generation", "messages", "executors", "parallel", "checkpoints"):
        for name, value in result[part].items():
            table.add_row(f"{part}: {name}", str(value))
    console = Console()
    console.print(table)
    console.print(f"written to {out}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out" / "bench.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
