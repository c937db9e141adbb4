"""A gRPC server that forwards every call several times at once, as a storm of retries does.

The caller gets the outcome of the first copy. The other outcomes are recorded.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc

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
