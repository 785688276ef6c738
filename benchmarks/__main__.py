"""Run benchmarks against a private Redis, and write JSON. Run it in the root of a checkout.

parts:
  queue        the queue protocol alone, against Redis Streams and RQ
  scheduling   the scheduler and the block pool alone
  kernels      the CPU's kernels, for each instruction set, against torch
  step         one decode step by its phases, for 1 to 256 sequences and contexts up to 4,096
  offline      tokens per second of LLM: workloads W1, W2, W3 and the example model
  service      the same workloads through Redis, against LLM
  peers        Millrace against the other engines that are installed; see benchmarks/peers.py
  recovery     how long jobs stop when the worker is killed

Without --part all but the last one run: in about an hour, and in two with all peers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

from rich.console import Console

from benchmarks import (
    kernels,
    offline,
    peers,
    queueing,
    recovery,
    roofline,
    scheduling,
    step_times,
    through_redis,
    workloads,
)
from benchmarks.environment import ROOT, describe
from benchmarks.options import Options
from millrace.embedded import EmbeddedServer
from millrace.results.connection import connect

PARTS: dict[str, ModuleType] = {
    "queue": queueing,
    "scheduling": scheduling,
    "kernels": kernels,
    "step": step_times,
    "offline": offline,
    "service": through_redis,
    "peers": peers,
    "recovery": recovery,
}
"""Each has NUM_ROUNDS and `measure(options)`, which returns its figures by name."""
USE_RATES = {"kernels", "step", "offline", "peers"}


def main() -> None:
    """Run the chosen parts, or all."""
    options = _parse()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with EmbeddedServer() as server:
        result = {"is_quick": options.quick, **describe(dict(connect(server.url).info("server")))}
        if USE_RATES & set(options.part):
            result["rates"] = roofline.machine_rates()
        for name in options.part:
            part = PARTS[name]
            num_rounds = options.repeat or (1 if options.quick else part.NUM_ROUNDS)
            limit_s = options.limit or getattr(part, "LIMIT_S", 0.0)
            chosen = (options.quick, limit_s, options.workload, options.engine)
            result[name] = part.measure(Options(server.url, num_rounds, *chosen))
            options.out.write_text(json.dumps(result, indent=2) + "\n")  # a later part may fail
    Console().print_json(data=result)
    print(f"wrote {options.out}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_parts = [name for name in PARTS if name != "recovery"]
    parser.add_argument("--part", nargs="+", choices=PARTS, default=default_parts, metavar="PART", help="parts to run")
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds of each part (default: the part's own number)")
    parser.add_argument("--quick", action="store_true", help="one round with little work: shows that a part runs")
    workload_help = "of offline, service and peers: W1 W2 W3 W4 W5 W6 TINY STEP1 STEP256 ...; of offline: W1-SCHEMAS"
    parser.add_argument("--workload", nargs="+", default=[], metavar="NAME", help=workload_help)
    engines = [kind.name for kind in peers.kinds()]
    parser.add_argument("--engine", nargs="+", default=[], choices=engines, help="of the part peers")
    limit_help = "time for each of offline, service and peers (default: 600, for peers 3600)"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=limit_help)
    default = ROOT / "benchmarks" / "out" / "bench.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"JSON file (default: {default})")
    options = parser.parse_args()
    if options.repeat is not None and options.repeat < 1:
        parser.error(f"--repeat is {options.repeat}: it must be at least 1")
    for name in options.workload:
        try:
            workloads.make(name, is_quick=True)
        except ValueError as error:
            parser.error(f"--workload: {error}; {workload_help}")
    return options


if __name__ == "__main__":
    main()
