"""A small HTTP server beside a service: /metrics, /healthz and /readyz.

It runs in threads of its own, so that it answers while the service is busy or waits. Without
requests it costs nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from turnstream.errors import InvalidConfigError, TurnstreamError
from turnstream_server.telemetry.instruments import REGISTRY
from turnstream_server.telemetry.readiness import Readiness

logger = logging.getLogger(__name__)

OPTION: Final = "--metrics-listen"
DEFAULT_HOST: Final = "127.0.0.1"

_SILENT_S: Final = 10.0
"""A peer that sends or takes nothing for so long is disconnected."""

_MAX_REQUESTS: Final = 16
"""Requests at the same time, each in a thread; more of them are disconnected."""

_BEARER: Final = "bearer "

Start = Callable[..., Any]
App = Callable[[dict[str, Any], Start], Iterable[bytes]]


class Listener:
    """Serves metrics and health until it is closed.

    Args:
        host: address, with or without brackets.
        port: 0 takes a free one.
        readiness: state of the dependencies.
        read_key: returns the key that /metrics needs; None if it needs none.
        tls: context of the server; None serves without TLS.
        registry: metrics that are served.

    Attributes:
        port: on which it listens.

    Raises:
        InvalidConfigError: the address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        readiness: Readiness,
        read_key: Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        app = make_app(readiness, read_key=read_key, registry=registry)
        try:
            self._server = _Server(host.strip("[]"), port, app, tls=tls)
        except OSError as error:
            raise InvalidConfigError(OPTION, f"cannot listen on {host}:{port}: {error}") from error
        self.port: int = self._server.server_port
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="telemetry", daemon=True)
        self._thread.start()
        url = f"{'https' if tls else 'http'}://{host}:{self.port}/metrics"
        logger.info("metrics are served", extra={"url": url})

    def close(self) -> None:
        """End the server and its thread."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # a connection ends the wait for the next one
            socket.create_connection((self._server.server_name, self.port), timeout=1).close()
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        # `serve_forever` would wake up twice a second.
        while not self._is_closed:
            self._server.handle_request()


def make_app(
    readiness: Readiness,
    *,
    read_key: Callable[[], str] | None,
    registry: CollectorRegistry = REGISTRY,
) -> App:
    """Return the WSGI application; arguments as of `Listener`."""
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _answer(start, 405, {"detail": "only GET is allowed"})
        if path == "/healthz":
            return _answer(start, 200, {"alive": True})
        if path == "/readyz":
            status, body = readiness.answer()
            return _send(start, status, body)
        if path != "/metrics":
            return _answer(start, 404, {"detail": "there are /metrics, /healthz and /readyz"})
        if read_key is not None and not _is_allowed(environ, read_key):
            detail = "the request has no accepted key: send it as X-API-Key or bearer"
            return _answer(start, 401, {"detail": detail})
        return metrics(environ, start)

    return app


def _is_allowed(environ: Mapping[str, Any], read_key: Callable[[], str]) -> bool:
    given = environ.get("HTTP_X_API_KEY", "")
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    if not given and authorization.lower().startswith(_BEARER):
        given = authorization[len(_BEARER) :].strip()
    try:
        key = read_key()
    except TurnstreamError as error:
        logger.warning("metrics are refused: %s", error)
        return False
    return bool(key) and hmac.compare_digest(given.encode(), key.encode())


_REASONS: Final = {
    200: "200 OK",
    401: "401 Unauthorized",
    404: "404 Not Found",
    405: "405 Method Not Allowed",
    503: "503 Service Unavailable",
}


def _answer(start: Start, status: int, content: Mapping[str, Any]) -> Iterable[bytes]:
    return _send(start, status, json.dumps(content).encode() + b"\n")


def _send(start: Start, status: int, body: bytes) -> Iterable[bytes]:
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    start(_REASONS[status], headers)
    return [body]


class _Handler(WSGIRequestHandler):
    """Answers one request, without a line in the log."""

    timeout = _SILENT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Write nothing."""


class _Server(WSGIServer):
    """A server with a limited number of threads."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, app: App, *, tls: ssl.SSLContext | None) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._tls = tls
        self._free = threading.Semaphore(_MAX_REQUESTS)
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind without a look-up of the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or disconnect if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        work = threading.Thread(
            target=self._process, args=(request, client_address), name="telemetry", daemon=True
        )
        work.start()

    def _process(self, request: Any, client_address: Any) -> None:
        try:
            if self._tls is not None:
                request.settimeout(_Handler.timeout)
                request = self._tls.wrap_socket(request, server_side=True)
            self.finish_request(request, client_address)
        except Exception:  # a peer may disconnect at any time
            logger.debug("a request of %s failed", client_address, exc_info=True)
        finally:
            self.shutdown_request(request)
            self._free.release()
