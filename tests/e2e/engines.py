"""Engine services as real processes, for tests that treat them as a supervisor and a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from tests.processes import ROOT, LoggedProcess, children_of, wait_until

__all__ = ["ROOT", "TINY", "EngineProcess", "wait_until"]

TINY = ROOT / "examples" / "tiny_model"

START_LIMIT_S = 60.0


class EngineProcess(LoggedProcess):
    """One engine service."""

    def __init__(
        self,
        log: Path,
        redis_url: str,
        queue: str,
        *options: str,
        model: str | Path = TINY,
        module: str = "millrace.engine_service",
        before: tuple[str, ...] = (),
        heartbeat_s: float = 0.5,
    ) -> None:
        """`module` and `before`: a launcher in place of the service, and what it wants to be told first."""
        place = ("--model", str(model), "--redis", redis_url, "--queue", queue)
        super().__init__(log, module, [*before, *place, "--device", "cpu", "--heartbeat", str(heartbeat_s), *options])

    def wait_until_serving(self) -> Self:
        return self.wait_until_it_says("serves", START_LIMIT_S)

    def worker_pids(self) -> list[int]:
        """Its worker processes, found as an operator would."""
        return children_of(self.process.pid)
