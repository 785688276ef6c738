"""One rank in a process of its own: `python -P -m millrace.worker`, started and spoken to by an executor."""

from __future__ import annotations

import sys

from millrace.executor.rank.serve import serve_rank
from millrace.worker import create_worker

if __name__ == "__main__":
    sys.exit(serve_rank(create_worker))
