"""Compare a benchmark part of this checkout with another checkout, for example a git worktree of an older commit.

Both run the part in turns; which one is first changes from pair to pair. The table shows, for each figure that is a
number, the median on both sides, the median ratio of the pairs (this checkout / the other one) and the interval that
holds the true median ratio with 95 % confidence. With fewer than 6 pairs the interval is the range of all ratios. Further
options, such as --quick, go to both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import ROOT
from benchmarks.timing import median_interval

Figures = dict[str, float]


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    other_help = "root of the other checkout; its benchmarks must have the same options"
    parser.add_argument("other", type=Path, help=other_help)
    parser.add_argument("--part", required=True, help="the part to run, see python -m benchmarks --help")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each checkout (default: 5)")
    options, more = parser.parse_known_args()
    if options.pairs < 1:
        parser.error(f"--pairs is {options.pairs}: it must be at least 1")
    if not (options.other / "benchmarks" / "__main__.py").is_file():
        parser.error(f"{options.other} has no benchmarks: give the root of a checkout")
    checkouts = {"this": ROOT, "other": options.other.resolve()}
    pairs: list[dict[str, Figures]] = []
    for number in range(options.pairs):
        print(f"pair {number + 1} of {options.pairs}", file=sys.stderr)
        order = reversed(checkouts) if number % 2 else checkouts
        pairs.append({side: _run(checkouts[side], options.part, more) for side in order})
    Console().print(_table(options.part, pairs))


def _run(checkout: Path, part: str, more: list[str]) -> Figures:
    """Run a part in a process of its own, with the packages of `checkout`. Return its figures that are numbers."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "bench.json")
        command = [sys.executable, "-P", "-m", "benchmarks", "--part", part, *more, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=True)
        figures = json.loads(out.read_text())[part]
    return {name: value for name, value in flat(figures) if isinstance(value, int | float)}


def flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all figures, those of inner tables with the names of both."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name} ")
        else:
            yield prefix + name, value


def _table(part: str, pairs: list[dict[str, Figures]]) -> Table:
    table = Table("figure", "this", "other", "this / other", "interval", title=f"{part}, {len(pairs)} pairs")
    for name in filter(pairs[0]["other"].__contains__, pairs[0]["this"]):
        these, others = ([pair[side][name] for pair in pairs] for side in ("this", "other"))
        row = [name, f"{statistics.median(these):g}", f"{statistics.median(others):g}"]
        if all(others):
            ratios = [this / other for this, other in zip(these, others, strict=True)]
            low, high = median_interval(ratios)
            row += [f"{statistics.median(ratios):.4f}", f"{low:.4f} to {high:.4f}"]
        table.add_row(*row)
    return table


if __name__ == "__main__":
    main()
