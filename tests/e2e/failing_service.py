"""The engine service with a bug of its loop: it raises when the job "poison" has output."""

from __future__ import annotations

import sys
from typing import Any

from millrace.engine_service import serve
from millrace.engine_service.serving.output import Output


def main(arguments: list[str]) -> int:
    advance: Any = Output.advance

    def failing(self: Output, job: Any, candidate: Any, now_s: float, num_watched: int) -> None:
        if job.job_id == "poison":
            raise IndexError("list index out of range")
        advance(self, job, candidate, now_s, num_watched)

    Output.advance = failing  # type: ignore[method-assign]
    return serve.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
