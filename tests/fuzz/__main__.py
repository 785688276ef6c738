"""`make fuzz N=2000 SEED=1`: bad input through every entry point, beside good jobs. Exit status 1: a problem was found."""

from __future__ import annotations

import argparse
import sys

import msgspec

from tests.fuzz.run import run_fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -P -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=500, metavar="N", help="bad inputs to send (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the generator (default: %(default)s)")
    options = parser.parse_args()
    report = run_fuzz(options.inputs, options.seed, progress=_show)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 1 if report.problems else 0


def _show(number: int) -> None:
    if number % 100 == 0:
        print(f"{number} inputs", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
