"""Runs one rank in its own process: `python -P -m millrace.worker`. An executor starts it and sends it calls."""

from __future__ import annotations

import sys

from millrace.executor.rank.serve import serve_rank
from millrace.worker import create_worker, import_modules

if __name__ == "__main__":
    sys.exit(serve_rank(create_worker, import_modules=import_modules))
