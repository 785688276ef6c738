"""The metrics of an executor: counts and histograms."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec

from millrace.executor.histogram import STEP_BOUNDS_S, Histogram


def _histogram() -> Histogram:
    return Histogram(STEP_BOUNDS_S)


class ExecutorMetrics(msgspec.Struct, kw_only=True):
    """Metrics since the executor was made. A request is one step or one call."""

    name: str = ""
    world_size: int = 0
    wanted_world_size: int = 0
    """The configured number of ranks. More than `world_size` while devices are lost."""
    epoch: int = 0
    num_active_workers: int = 0
    num_failed_workers: int = 0
    """Workers lost so far, for any reason."""
    num_restarts: int = 0
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_stale_replies: int = 0
    """Replies that came too late, and messages that no worker of ours sent."""
    latency_s: Histogram = msgspec.field(default_factory=_histogram)
    """From sending a step or a call to its last needed reply."""
    step_s: Histogram = msgspec.field(default_factory=_histogram)
    """Duration of a step: from sending it, or from the reply before it where steps overlap, to its reply."""
    host_s: Histogram = msgspec.field(default_factory=_histogram)
    """From a reply to sending the next step when no other step was in flight, so the workers waited for the host. Time
    without work, asleep or in recovery does not count."""
    rpc_s: Histogram = msgspec.field(default_factory=_histogram)
    """Latency of a step minus the time that its worker reports: the cost of the transport."""
    device_s: float = 0.0
    """Seconds in which the device computed steps. Its growth in a second of full load is the share of the time in which it
    was busy."""
    plan_bytes: int = 0
    """Payload of all step plans so far. 0 where the worker is in this process; so is the next field."""
    reply_bytes: int = 0
    """Payload of all ranks' replies to steps so far."""
    recovery_s: float = 0.0
    """Duration of the last replacement of the workers: from noticing the loss, or from the first attempt if none was
    lost, until the KV pool was allocated again. Includes pauses and failed attempts. 0 before the first."""
    num_blocks: int = 0
    """Size of the KV pool, 0 before it is allocated."""
    device_bytes: list[int | None] = []
    """By rank: device memory held, at most some seconds ago. None where the device is the host."""
    device_total_bytes: list[int | None] = []
    """By rank: memory of the device."""
    device_utilization: list[float | None] = []
    """By rank: share of the time that the device computed, 0 to 1, at most some seconds ago. None where it is unknown."""


class Recorder(ExecutorMetrics, kw_only=True):
    """Owns the metrics of one executor while it runs. Costs 1 to 2 microseconds per step."""

    _step_ended_s: float | None = None

    def step_sent(self, now_s: float, num_bytes: int, num_in_flight: int) -> None:
        """`num_in_flight`: other steps in flight."""
        self.num_steps += 1
        self.plan_bytes += num_bytes
        if num_in_flight == 0 and self._step_ended_s is not None:
            self.host_s.add(now_s - self._step_ended_s)

    def request_done(self, latency_s: float, *, is_failure: bool) -> None:
        self.num_failed += is_failure
        self.num_completed += not is_failure
        self.latency_s.add(latency_s)
        if is_failure:
            self.mark_idle()

    def step_done(self, sent_s: float, now_s: float, device_s: float, num_tokens: int) -> None:
        """Call it before `request_done` of the same step."""
        began_s = max(sent_s, self._step_ended_s or 0.0)
        self._step_ended_s = now_s
        self.num_tokens += num_tokens
        self.device_s += device_s
        self.step_s.add(now_s - began_s)
        self.rpc_s.add(max(0.0, now_s - sent_s - device_s))

    def set_worker_stats(self, by_rank: list[dict[str, Any]]) -> None:
        """`by_rank`: see `Worker.stats`."""
        self.device_bytes = [figures.get("device_bytes") for figures in by_rank]
        self.device_total_bytes = [figures.get("device_total_bytes") for figures in by_rank]
        self.device_utilization = [figures.get("device_utilization") for figures in by_rank]

    def set_device_sample(self, rank: int, num_bytes: int | None, utilization: float | None) -> None:
        """A heartbeat has brought newer values. None: no newer one."""
        if num_bytes is not None and rank < len(self.device_bytes):
            self.device_bytes[rank] = num_bytes
        if utilization is not None and rank < len(self.device_utilization):
            self.device_utilization[rank] = utilization

    def mark_idle(self) -> None:
        """Do not count the time until the next step as the host's: there is no work, or there are no workers."""
        self._step_ended_s = None

    def metrics(self, **facts: Any) -> ExecutorMetrics:
        """Return a copy of all metrics. `facts`: the fields that the executor knows itself."""
        recorded = [name for name in ExecutorMetrics.__struct_fields__ if name not in facts]
        return ExecutorMetrics(**{name: deepcopy(getattr(self, name)) for name in recorded}, **facts)
