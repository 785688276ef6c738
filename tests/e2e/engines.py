"""Engine services as real processes, for tests that act as a supervisor or a user."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from tests.processes import LIMIT_S, ROOT, LoggedProcess, children_of, module_command, wait_until

__all__ = ["LIMIT_S", "ROOT", "TINY", "EngineProcess", "wait_until"]

TINY = ROOT / "examples" / "tiny_model"


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
        heartbeat_s: float = 3.0,
    ) -> None:
        """`module` and `before`: a launcher that runs the service, and the launcher's own arguments."""
        place = ("--model", str(model), "--redis", redis_url, "--queue", queue)
        arguments = (*before, *place, "--device", "cpu", "--heartbeat", str(heartbeat_s), *options)
        super().__init__(log, module_command(module, *arguments))

    def wait_until_serving(self) -> Self:
        return self.wait_for_log("serves")

    def worker_pids(self) -> list[int]:
        """Return the ids of its worker processes."""
        return children_of(self.process.pid)
