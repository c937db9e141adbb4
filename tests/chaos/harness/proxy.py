"""A TCP proxy whose faults a test sets while it runs."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class TrajectoryQueue:
    """The faults of one direction.

    Attributes:
        delay_s: delay of every piece.
        bytes_per_s: rate of the link for each new connection; 0 for no limit.
        held_until_s: time of `time.monotonic` until which all bytes are delayed.
        is_silent: whether bytes are received and not forwarded; the connection stays open.
        is_recorded: whether bytes are also kept in `recorded`, by connection.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    held_until_s: float = 0.0
    is_silent: bool = False
    is_recorded: bool = False
    recorded: list[bytearray] = field(default_factory=list[bytearray])


@dataclass(slots=True)
class _Break:
    """The end of the replies of a connection after some bytes; a stop leaves it open."""

    after_bytes: int
    is_stop: bool = False


class Proxy:
    """Listens on a port of its own before a server, given by "host:port" or URL.

    Attributes:
        num_breaks: number of connections that were reset or stopped by a request of a test.
        stop_within: bytes of a request after the first half of which its connection stops.
        unanswered: bytes of a request after which no reply is forwarded.
    """

    def __init__(self, target: str) -> None:
        address = urlsplit(target if "//" in target else f"//{target}")
        self._server = (address.hostname or "", address.port or 0)
        self.requests = TrajectoryQueue()
        self.replies = TrajectoryQueue()
        self.num_breaks = 0
        self.stop_within = b""
        self.unanswered = b""
        self._lock = threading.Lock()
        self._breaks: deque[_Break] = deque()
        self._counts_replies = False
        self._request_to_break = b""
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Reset everything and wait for the threads."""
        self._is_closed = True
        _reset(self._listener)
        self.cut_all()
        for thread in self._threads:
            thread.join(10)

    @property
    def address(self) -> str:
        """Return the address for clients, "host:port"."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def url(self) -> str:
        """Return the same for a client of Redis."""
        return f"redis://{self.address}/0"

    def break_replies(
        self, after_bytes: Iterable[int], *, is_stop: bool = False, request: bytes = b""
    ) -> None:
        """Reset a connection after each of these numbers of replied bytes, or stop it.

        Bytes of all connections count, from the next request with these bytes on. That request has
        arrived: the server has done what it asks for. Breaks that were not reached are replaced.
        """
        with self._lock:
            self._counts_replies, self._request_to_break = False, request
            self._breaks = deque(_Break(number, is_stop) for number in after_bytes)

    def cut_all(self) -> None:
        """Reset every connection that is open now."""
        with self._lock:
            opened = list(self._sockets)
        for each in opened:
            _reset(each)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, timeout=5)
                server.settimeout(None)
            except OSError:
                _reset(client)
                continue
            for each, queue in ((client, self.requests), (server, self.replies)):
                if queue.bytes_per_s:  # a slow link holds few bytes
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PIECE_BYTES)
            with self._lock:
                self._sockets |= {client, server}
            self._start(lambda c=client, s=server: self._pump(c, s, self.requests))
            self._start(lambda c=client, s=server: self._pump(s, c, self.replies))

    def _pump(self, source: socket.socket, sink: socket.socket, queue: TrajectoryQueue) -> None:
        kept = bytearray()
        if queue.is_recorded:
            queue.recorded.append(kept)
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                kept += data if queue.is_recorded else b""
                needs_s = len(data) / queue.bytes_per_s if queue.bytes_per_s else 0.0
                time.sleep(max(queue.delay_s + needs_s, queue.held_until_s - time.monotonic()))
                if queue.is_silent:
                    continue
                with self._lock:
                    is_request = queue is self.requests
                    found = self._request(data) if is_request else self._reply(data)
                    self.num_breaks += found is not None
                sink.sendall(data if found is None else data[: found.after_bytes])
                if found is not None:
                    while found.is_stop and source.recv(_PIECE_BYTES):
                        pass
                    break
        for each in (source, sink):
            _reset(each)
            with self._lock:
                self._sockets.discard(each)

    def _request(self, data: bytes) -> _Break | None:
        """Return the break within a request."""
        self._counts_replies = self._counts_replies or self._request_to_break in data
        if self.unanswered and self.unanswered in data:
            self.replies.is_silent = True
        wanted = self.stop_within
        if not wanted or wanted not in data:
            return None
        self.stop_within = b""
        return _Break(data.index(wanted) + len(wanted) // 2, is_stop=True)

    def _reply(self, data: bytes) -> _Break | None:
        """Return the break within a piece of a reply, or count its bytes."""
        if not self._breaks or not self._counts_replies:
            return None
        if self._breaks[0].after_bytes >= len(data):
            self._breaks[0].after_bytes -= len(data)
            return None
        self._counts_replies = False
        return self._breaks.popleft()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()]
        self._threads.append(thread)
        thread.start()


def _reset(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


def own_host() -> str:
    """Return a loopback address that no other rig uses for its ports.

    All of 127.0.0.0/8 is this machine.
    """
    return ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])
