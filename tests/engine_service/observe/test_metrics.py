"""What of the executor's figures stands on the page for Prometheus."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine
from millrace.engine_service.observe.health import Health
from millrace.engine_service.observe.metrics import MetricsCollector
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig
from tests.executor.stub import StubWorker


@pytest.mark.parametrize("value", [0.25, None])
def test_how_busy_a_device_is_stands_there_when_it_is_known(
    value: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StubWorker, "stats", lambda worker: {"device_utilization": value})
    executor = UniprocExecutor(WorkerConfig(model="", num_blocks=8), worker_module="tests.executor.stub")
    engine = Engine(executor, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    engine.start()
    registry = CollectorRegistry()
    registry.register(MetricsCollector(engine, Health(engine)))
    assert registry.get_sample_value("millrace_device_utilization_ratio", {"rank": "0"}) == value
    engine.shutdown()
