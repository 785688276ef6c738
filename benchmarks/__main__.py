"""Run benchmarks against a private Redis, print a table, and write JSON. Run it in the root of a checkout.

parts:
  queue        the queue protocol alone, against Redis Streams and RQ
  generation   tokens per second through Redis and offline, and the time to the first token
  messages     a call to a worker and back, and the messages of a step
  executors    a worker in its own process against one in the same process
  parallel     one rank against two, tensor parallel and pipeline parallel
  checkpoints  what saving running jobs costs
  scheduling   the scheduler and the block pool alone
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from benchmarks import checkpoints, executors, generation, messages, parallel, queueing, scheduling
from benchmarks.environment import ROOT, describe
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect

SEED = 0
PARTS: dict[str, ModuleType] = {
    "queue": queueing,
    "generation": generation,
    "messages": messages,
    "executors": executors,
    "parallel": parallel,
    "checkpoints": checkpoints,
    "scheduling": scheduling,
}
"""Each has NUM_ROUNDS and `measure(url, model, num_rounds, is_quick=)`, which returns its figures by name."""


def main() -> None:
    """Run the chosen parts, or all."""
    options = _parse()
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as directory:
        result = {"seed": SEED, **describe(dict(connect(server.url).info("server")))}
        model = generation.make_model(Path(directory))
        for name in options.part:
            num_rounds = options.repeat or (1 if options.quick else PARTS[name].NUM_ROUNDS)
            result[name] = PARTS[name].measure(server.url, model, num_rounds, is_quick=options.quick)
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
    console.print(f"wrote {out}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="parts to run (default: all)"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds of each part (default: the part's own number)")
    parser.add_argument("--quick", action="store_true", help="one round with little work: shows that a part runs")
    default = ROOT / "benchmarks" / "out" / "bench.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"JSON file (default: {default})")
    options = parser.parse_args()
    if options.repeat is not None and options.repeat < 1:
        parser.error(f"--repeat is {options.repeat}: it must be at least 1")
    return options


if __name__ == "__main__":
    main()
