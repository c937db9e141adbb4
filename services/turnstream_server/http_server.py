"""An HTTP server in a thread beside a service: uvicorn on a socket that listens at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from asyncio import Transport
from collections.abc import Callable
from typing import Any, Final, Self

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnstream.errors import InvalidConfigError
from turnstream_server.tls import Tls

BACKLOG: Final = 4_096
"""Connections that wait until the server accepts them."""

_HANDSHAKE_S: Final = 10.0
"""Time for a handshake of TLS."""

_MAX_BRIEF: Final = 16
_BRIEF_S: Final = 20.0
"""Brief connections at the same time, and the longest time of each."""


class HttpServer:
    """Serves an application from a thread until it is closed. Without requests it costs nothing.

    Args:
        app: the ASGI application.
        host: address, with or without brackets.
        port: 0 takes a free one.
        option: name of the option with the address, for errors.
        tls: certificate and key; None serves without TLS.
        is_brief: each connection has one request and 20 s, and there are 16 of them at most; more
            are disconnected.

    Attributes:
        port: on which it listens.
        url: address at which it listens, without a slash at its end.

    Raises:
        InvalidConfigError: the address cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        option: str,
        tls: Tls | None = None,
        is_brief: bool = False,
    ) -> None:
        try:
            self._socket = listening_socket(host, port)
        except OSError as error:
            message = f"{host}:{port} cannot be used: {error}; port 0 takes a free one"
            raise InvalidConfigError(option, message) from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"
        config = uvicorn.Config(
            app,
            http=_BriefProtocol if is_brief else "auto",
            headers=[("Connection", "close")] if is_brief else [],
            loop="asyncio",
            ws="none",
            access_log=False,
            log_config=None,
            date_header=False,
            ssl_certfile=tls and tls.cert,
            ssl_keyfile=tls and tls.key,
        )
        self._server = _Server(config)
        run = functools.partial(self._server.run, [self._socket])
        self._thread = threading.Thread(target=run, name=f"http {option}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server and its thread; answers in progress are cut."""
        self._server.end()
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(uvicorn.Server):
    """A server whose loop wakes up for requests alone, and not ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._wake: Callable[[], object] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn has no option for the time of a handshake."""
        loop: Any = asyncio.get_running_loop()
        if self.config.is_ssl:
            create = functools.partial(loop.create_server, ssl_handshake_timeout=_HANDSHAKE_S)
            loop.create_server = create
        await super().startup(sockets)

    async def main_loop(self) -> None:
        """Wait for the end."""
        await self.on_tick(0)  # makes the headers
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = functools.partial(loop.call_soon_threadsafe, stop.set)
        if not self.should_exit:
            await stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and end the application too; uvicorn omits that where it is in a hurry."""
        await super().shutdown(sockets)
        await self.lifespan.shutdown()

    def end(self) -> None:
        """End the server; from another thread."""
        self.should_exit = self.force_exit = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._wake()


class _BriefProtocol(H11Protocol):
    """A connection with a limited time, so that silent and slow peers cannot use up the server."""

    def connection_made(self, transport: Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Limit the number of connections and the time of this one."""
        super().connection_made(transport)
        if len(self.connections) > _MAX_BRIEF:
            transport.abort()
        else:
            self.loop.call_later(_BRIEF_S, transport.abort)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; OSError if the address cannot be used."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With protocol 0 asyncio does not set TCP_NODELAY, and each answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
