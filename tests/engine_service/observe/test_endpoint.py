"""What the HTTP endpoint tells of its own troubles."""

from __future__ import annotations

import http.client
import logging
import socket
import struct
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from millrace.engine_service.core.scheduler import SchedulerConfig
from millrace.engine_service.engine import Engine
from millrace.engine_service.observe.endpoint import Endpoint
from millrace.engine_service.observe.health import Health
from millrace.executor.launch.uniproc import UniprocExecutor
from millrace.executor.wire.messages import WorkerConfig
from tests.processes import wait_until


class Broken(Collector):
    """Figures that our own bug keeps from the page."""

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("a bug in the figures")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def address(registry: CollectorRegistry) -> Iterator[tuple[str, int]]:
    executor = UniprocExecutor(WorkerConfig(model=""), worker_module="tests.executor.stub")
    endpoint = Endpoint(
        "127.0.0.1",
        0,
        registry,
        Health(Engine(executor, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))),
    )
    host, _, port = endpoint.address.rpartition(":")
    yield host, int(port)
    endpoint.close()


def test_our_own_error_is_in_the_log(
    address: tuple[str, int], registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    registry.register(Broken())
    client = http.client.HTTPConnection(*address, timeout=60)
    client.request("GET", "/metrics")
    with pytest.raises(http.client.RemoteDisconnected):
        client.getresponse()
    client.close()
    wait_until(lambda: "a bug in the figures" in caplog.text)
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


@pytest.mark.parametrize("accepted", ["text/plain;version=x", "application/openmetrics-text; version=abc", "\xff;;q=="])
def test_an_odd_accept_header_gets_the_plain_format(
    address: tuple[str, int], accepted: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = http.client.HTTPConnection(*address, timeout=60)
    client.request("GET", "/metrics", headers={"Accept": accepted})
    answer = client.getresponse()
    assert (answer.status, answer.headers.get_content_type()) == (HTTPStatus.OK, "text/plain")
    client.close()
    assert not caplog.records


def test_a_client_that_goes_away_is_no_news(address: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.create_connection(address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets the connection
    wait_until(lambda: "a client of the endpoint failed" in caplog.text)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_client_that_sends_nothing_is_closed_when_its_time_is_over(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine_service.observe.endpoint._Handler.timeout", 0.3)
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(b"GET /health")
        assert client.recv(1) == b""
