"""The queue with the calls that clients and operators have, so that tests need one object."""

from __future__ import annotations

from millrace.results import commands, replies
from millrace.results.counts import BatchStatus, Position
from millrace.results.queue import JobQueue
from millrace.results.scripts import Command
from millrace.results.transport import Reply


class FullQueue(JobQueue):
    def redrive(self, job_id: str) -> str:
        return replies.redriven(job_id, self.keys.queue, self._send(commands.redrive(self.keys, job_id)))

    def pause(self, is_paused: bool) -> None:
        self._send(commands.pause(self.keys, is_paused))

    def sleep(self, level: int, engine_id: str | None = None) -> list[str]:
        reply = self._send(commands.sleep(self.keys, level, engine_id))
        return replies.signalled_engines(engine_id, self.keys.queue, reply)

    def position(self, job_id: str) -> Position:
        return replies.position(job_id, self.keys.queue, self._send(commands.position(self.keys, job_id)))

    def batch_status(self, batch: str) -> BatchStatus:
        return replies.batch_status(batch, self.keys.queue, self._send(commands.batch_status(self.keys, batch)))

    def _send(self, command: Command) -> Reply:
        return self._transport.send(command)
