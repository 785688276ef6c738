"""`make chaos N=500`: run the soak, print its progress, and write its results as JSON to `benchmarks/results/`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.environment import ROOT, describe
from tests.chaos.soak import soak
from tests.chaos.workload import Undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    options = parser.parse_args()
    undisturbed = Undisturbed()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        account = soak(options.kills, options.seed, Path(folder), undisturbed, lambda line: print(line, flush=True))
    undisturbed.close()
    account = {**describe(account.pop("server_info")), **account}
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"chaos-{time.strftime('%Y-%m-%d')}-{options.kills}-kills.json"
    file.write_text(json.dumps(account, indent=2) + "\n")
    print(f"lost {account['lost']}, doubled {account['doubled']}, torn {account['torn']}; written to {file}")
    if account["violation"]:
        print(account["violation"], file=sys.stderr)
    return 1 if account["violation"] else 0


if __name__ == "__main__":
    sys.exit(main())
