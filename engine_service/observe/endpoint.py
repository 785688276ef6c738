"""The HTTP endpoint of an engine: `/metrics` for Prometheus, `/health` for supervisors. Off by default. It has threads of
its own and only reads, so it also answers while the engine is stuck."""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from millrace.engine_service.errors import ConfigurationError, PortInUse
from millrace.engine_service.observe.health import Health

logger = logging.getLogger("millrace.engine")

_PLAIN = "text/plain; charset=utf-8"


class Endpoint:
    """Owns the listening socket and the thread that serves it."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        """Bind the port at once, so that a taken port is reported before a model is loaded. Port 0 picks a free one. Raises
        `PortInUse` and `ConfigurationError`."""
        try:
            self._server = _Server(host, port, registry, health)
        except OSError as error:
            kind = PortInUse if error.errno == errno.EADDRINUSE else ConfigurationError
            raise kind(
                f"metrics_port: can't listen on {host} port {port}: {error.strerror or error}; "
                "choose another --metrics-port or --metrics-host"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)
        self._thread.start()
        logger.info("metrics and health on http://%s", self.address)

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        self.registry = registry
        self.health = health
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def server_bind(self) -> None:
        """Bind without the name lookup of the base class, which may take seconds."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log our own bugs as errors, and a client that disconnected only for debugging."""
        if isinstance(sys.exception(), ConnectionError | TimeoutError):
            logger.debug("a client of the endpoint failed", exc_info=True)
        else:
            logger.exception("the endpoint could not answer")


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    timeout = 10
    """Seconds that a client may send or read nothing."""

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                try:
                    encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                except (TypeError, ValueError):  # it does not take versions such as "x"
                    encode, content_type = choose_encoder("")
                self._answer(HTTPStatus.OK, content_type, encode(self.server.registry))
            case "/health":
                reason = self.server.health.unhealthy_reason()
                status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
                self._answer_line(status, self.server.health.state() if reason is None else " ".join(reason.split()))
            case _:
                self._answer_line(HTTPStatus.NOT_FOUND, "only /metrics and /health exist")

    do_HEAD = do_GET  # noqa: N815

    def _answer_line(self, status: HTTPStatus, line: str) -> None:
        self._answer(status, _PLAIN, f"{line}\n".encode())

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
