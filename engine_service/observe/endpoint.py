"""The HTTP endpoint of an engine: `/metrics` for Prometheus, `/health` for supervisors. Off unless it is asked for.

It has threads of its own and only reads, so it answers also when the engine does not move.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from millrace.engine_service.errors import ConfigurationError
from millrace.engine_service.observe.health import Health

logger = logging.getLogger("millrace.engine")

_PLAIN = "text/plain; charset=utf-8"
_CLIENT_LIMIT_S = 10.0
"""What a client gets to send its request and to read the answer."""


class Endpoint:
    """Owns the listening socket and the thread that serves it. The socket is taken at once, so that a port that is not
    free is known before a model is loaded."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        """Port 0 takes any that is free. Raises `ConfigurationError`."""
        try:
            self._server = _Server(host, port, registry, health)
        except OSError as error:
            raise ConfigurationError(
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
        """Without the name lookup of the base class, which may take seconds."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle is no news; all else is our bug."""
        if isinstance(sys.exception(), ConnectionError | TimeoutError):
            logger.debug("a client of the endpoint failed", exc_info=True)
        else:
            logger.exception("the endpoint could not answer")


def _encoder(accepted: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """How to write the metrics, and as which content type; the plain format for a header that can't be read."""
    try:
        return choose_encoder(accepted)
    except (TypeError, ValueError):
        return choose_encoder("")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_LIMIT_S

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                encode, content_type = _encoder(self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, content_type, encode(self.server.registry))
            case "/health":
                reason = self.server.health.unhealthy_reason()
                status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
                self._say(status, self.server.health.state() if reason is None else " ".join(reason.split()))
            case _:
                self._say(HTTPStatus.NOT_FOUND, "there are /metrics and /health")

    do_HEAD = do_GET  # noqa: N815

    def _say(self, status: HTTPStatus, line: str) -> None:
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
