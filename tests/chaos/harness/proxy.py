"""A TCP proxy whose faults a test sets while it runs, and a gRPC server that repeats every call."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import grpc

_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class Lane:
    """The faults of one direction.

    Attributes:
        delay_s: delay of every piece.
        held_until_s: time of `time.monotonic` until which all bytes are held.
        cut_after_bytes: bytes that pass before one connection is reset; None resets none.
        is_silent: whether bytes are received and not forwarded; the connection stays open.
        num_cuts: number of reset connections.
        stop_within: one connection stays open and forwards nothing after the first half of these
            bytes.
        stop_after_bytes: bytes that pass before one connection stops in the same way; None stops
            none.
        num_stops: number of stopped connections.
        unanswered: bytes of a request after which no reply is forwarded.
        is_recorded: whether forwarded bytes are also kept in `recorded`, by connection.
    """

    delay_s: float = 0.0
    held_until_s: float = 0.0
    cut_after_bytes: int | None = None
    is_silent: bool = False
    num_cuts: int = 0
    stop_within: bytes = b""
    stop_after_bytes: int | None = None
    num_stops: int = 0
    unanswered: bytes = b""
    is_recorded: bool = False
    recorded: list[bytearray] = field(default_factory=list[bytearray])


class Proxy:
    """Listens on a port of its own; a context manager.

    Args:
        target: "host:port" of the server, or its URL.

    Attributes:
        requests: from the client to the server.
        replies: from the server to the client.
    """

    def __init__(self, target: str) -> None:
        address = urlsplit(target if "//" in target else f"//{target}")
        self._server = (address.hostname or "", address.port or 0)
        self.requests = Lane()
        self.replies = Lane()
        self._lock = threading.Lock()
        self._cut_request = b""
        self._cuts: deque[int | None] = deque()
        self._cut_clients: dict[socket.socket, int] = {}
        self._bytes_per_connection: deque[int] = deque()
        self._bytes_left: dict[socket.socket, int] = {}
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where clients connect, "host:port"."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def url(self) -> str:
        """The same for a client of Redis."""
        return f"redis://{self.address}/0"

    def cut_next_reply(self, *, after_bytes: int = 0) -> None:
        """Reset the connection whose reply comes next, after so many bytes of it.

        The request has arrived by then: the server has done what it was asked.
        """
        with self._lock:
            self.replies.cut_after_bytes = after_bytes

    def cut_answers(self, to: bytes, *, after_bytes: Iterable[int | None]) -> None:
        """Reset connections within the answers to requests with these bytes.

        Args:
            to: bytes of the requests.
            after_bytes: bytes of each answer that pass before the reset, in the order of the
                requests; None lets an answer pass.
        """
        with self._lock:
            self._cut_request = to
            self._cuts = deque(after_bytes)

    def cut_connections(self, *, after_bytes: Iterable[int]) -> None:
        """Reset each of the next connections after a number of answered bytes, in their order."""
        with self._lock:
            self._bytes_per_connection = deque(after_bytes)

    def cut_all(self) -> None:
        """Reset every connection that is open now."""
        with self._lock:
            opened = list(self._sockets)
        for each in opened:
            _reset(each)

    def close(self) -> None:
        """Reset everything and wait for the threads."""
        self._is_closed = True
        _reset(self._listener)
        self.cut_all()
        for thread in self._threads:
            thread.join(10)

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
            with self._lock:
                self._sockets |= {client, server}
                if self._bytes_per_connection:
                    self._bytes_left[client] = self._bytes_per_connection.popleft()
            self._start(lambda c=client, s=server: self._pump(c, s, self.requests))
            self._start(lambda c=client, s=server: self._pump(s, c, self.replies))

    def _pump(self, source: socket.socket, sink: socket.socket, lane: Lane) -> None:
        kept = bytearray()
        if lane.is_recorded:
            lane.recorded.append(kept)
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                kept += data if lane.is_recorded else b""
                time.sleep(max(lane.delay_s, lane.held_until_s - time.monotonic()))
                if lane.is_silent:
                    continue
                if lane.unanswered and lane.unanswered in data:
                    self.replies.is_silent = True
                if (begun := self._begun(lane, data)) is not None:
                    sink.sendall(begun)
                    _swallow(source)
                    break
                if lane is self.requests:
                    self._await_answer(source, data)
                passed, is_cut = self._take(lane, data, sink)
                sink.sendall(passed)
                if is_cut:
                    break
        for each in (source, sink):
            _reset(each)
            with self._lock:
                self._sockets.discard(each)
                self._cut_clients.pop(each, None)
                self._bytes_left.pop(each, None)

    def _begun(self, lane: Lane, data: bytes) -> bytes | None:
        """Return the forwarded part of a piece in which the connection stops, or None."""
        with self._lock:
            passed = self._passed_before_stop(lane, data)
            lane.num_stops += passed is not None
        return passed

    def _passed_before_stop(self, lane: Lane, data: bytes) -> bytes | None:
        if lane.stop_after_bytes is not None:
            passed = data[: lane.stop_after_bytes]
            lane.stop_after_bytes -= len(passed)
            if len(passed) == len(data):
                return None
            lane.stop_after_bytes = None
            return passed
        wanted = lane.stop_within
        if not wanted or wanted not in data:
            return None
        lane.stop_within = b""
        return data[: data.index(wanted) + len(wanted) // 2]

    def _await_answer(self, client: socket.socket, request: bytes) -> None:
        """Note where the answer to a request is to be cut, if it is."""
        with self._lock:
            is_meant = self._cuts and self._cut_request in request
            after_bytes = self._cuts.popleft() if is_meant else None
            if after_bytes is not None:
                self._cut_clients[client] = after_bytes

    def _take(self, lane: Lane, data: bytes, sink: socket.socket) -> tuple[bytes, bool]:
        """Return the bytes to forward, and whether the connection ends after them."""
        with self._lock:
            if sink in self._cut_clients:
                lane.num_cuts += 1
                return data[: self._cut_clients[sink]], True
            if sink in self._bytes_left:
                left = self._bytes_left[sink]
                self._bytes_left[sink] = left - len(data)
                lane.num_cuts += left < len(data)
                return data[:left], left < len(data)
            if lane.cut_after_bytes is None:
                return data, False
            if lane.cut_after_bytes >= len(data):
                lane.cut_after_bytes -= len(data)
                return data, False
            passed = data[: lane.cut_after_bytes]
            lane.cut_after_bytes = None
            lane.num_cuts += 1
            return passed, True

    def _start(self, work: object) -> None:
        thread = threading.Thread(target=work, daemon=True)  # pyright: ignore[reportArgumentType]
        self._threads = [old for old in self._threads if old.is_alive()]
        self._threads.append(thread)
        thread.start()


def _swallow(source: socket.socket) -> None:
    """Take bytes until their sender is gone."""
    while source.recv(_PIECE_BYTES):
        pass


def _reset(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


def own_host() -> str:
    """Return a loopback address that no other rig uses for its ports.

    All of 127.0.0.0/8 is this machine.
    """
    return ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])


_MAX_CALLS = 64
_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The messages and the status of a call."""

    messages: tuple[bytes, ...]
    code: grpc.StatusCode
    details: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """A call, and the outcome of each of its copies."""

    method: str
    request: bytes
    outcomes: tuple[Outcome, ...]


class Repeater:
    """A gRPC server in front of another; a context manager.

    Args:
        target: "host:port" of the batcher.
        num_copies: how often the first, second, ... call of each method is sent, and round again.

    Attributes:
        address: where clients connect, "host:port".
        calls: all that came, in the order in which they ended.
    """

    def __init__(self, target: str, *, num_copies: tuple[int, ...] = (3, 2, 1)) -> None:
        self.calls: list[Repeated] = []
        self._copies = defaultdict[str, Iterator[int]](lambda: itertools.cycle(num_copies))
        self._channel = grpc.insecure_channel(target, options=_UNLIMITED)
        self._senders = ThreadPoolExecutor(_MAX_CALLS)
        self._server = grpc.server(ThreadPoolExecutor(_MAX_CALLS), options=_UNLIMITED)
        self._server.add_generic_rpc_handlers((_AnyCall(self._answer),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop(None).wait()
        self._channel.close()
        self._senders.shutdown()

    def send_again(self, calls: Sequence[Repeated], *, num_copies: int) -> list[Repeated]:
        """These calls once more, all copies of all of them at once."""
        pending = [
            [self._senders.submit(self._send, call.method, call.request) for _ in range(num_copies)]
            for call in calls
        ]
        return [
            Repeated(call.method, call.request, tuple(each.result(_TIMEOUT_S) for each in copies))
            for call, copies in zip(calls, pending, strict=True)
        ]

    def _answer(
        self, method: str, request: bytes, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        copies = [
            self._senders.submit(self._send, method, request)
            for _ in range(next(self._copies[method]))
        ]
        outcomes = tuple(copy.result(_TIMEOUT_S) for copy in copies)
        self.calls.append(Repeated(method, request, outcomes))
        yield from outcomes[0].messages
        if outcomes[0].code is not grpc.StatusCode.OK:
            context.abort(outcomes[0].code, outcomes[0].details)

    def _send(self, method: str, request: bytes) -> Outcome:
        # One message or many look the same to a caller that takes whatever comes.
        call: Any = self._channel.unary_stream(method)(request, timeout=_TIMEOUT_S)
        messages: list[bytes] = []
        try:
            messages.extend(call)
        except grpc.RpcError as error:
            failed: Any = error
            return Outcome(tuple(messages), failed.code(), failed.details())
        return Outcome(tuple(messages), grpc.StatusCode.OK, "")


class _AnyCall(grpc.GenericRpcHandler):
    """Takes calls of any name; bytes pass as they are."""

    def __init__(
        self, answer: Callable[[str, bytes, grpc.ServicerContext], Iterator[bytes]]
    ) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The handler of one method."""
        method = handler_call_details.method
        return grpc.unary_stream_rpc_method_handler(
            lambda request, context: self._answer(method, request, context)
        )
