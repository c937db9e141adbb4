"""A fake batcher with faults to order, over real gRPC; and a real batcher."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest

import testkit
from testkit.services.batchers import BatcherThread
from turnstream.errors import (
    FencedError,
    NotReadyError,
    TurnstreamError,
    UnavailableError,
    WaitReason,
)
from turnstream.records.batches import decode_mini_batch, encode_mini_batch, with_sha256
from turnstream.records.configs import encode_config
from turnstream.records.statuses import error_to_status
from turnstream.types import MiniBatch, RecoveryToken
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.worker import BatchStream
from turnstream_server.embedded import EmbeddedServer, free_port

Fault = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
"""Fault of one Get: a function from the intended messages to the sent ones."""


class FakeBatcher:
    """Steps in memory; step n + 1 is sent once step n is stepped.

    Attributes:
        faults: one for every coming Get, in order; None for none.
        refusals: errors for the coming acknowledgements, in order.
        calls: calls in order, such as ("Get", 1).
        gets: every Get, in order.
        is_older: whether it sends the hashes of an earlier release.
    """

    def __init__(self) -> None:
        self.steps: dict[int, list[MiniBatch]] = {}
        self.faults: list[Fault | None] = []
        self.refusals: list[TurnstreamError | None] = []
        self.calls: list[tuple[Any, ...]] = []
        self.gets: list[wire.GetRequest] = []
        self.chunk_bytes = 300
        self.needs_stepped = True
        self.num_open_gets = 0
        self.is_older = False
        self.stepped = 0
        self.changed = threading.Condition()
        self._server: grpc.Server | None = None
        self.port = 0

    def start(self) -> None:
        """Serve on the same port as before, if any; no outgoing connection can take that port."""
        self._server = grpc.server(
            ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=8
        )
        self._server.add_generic_rpc_handlers([_handlers(self)])
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port or free_port()}")
        self._server.start()

    def stop(self) -> None:
        """Cut every connection."""
        with self.changed:
            self.changed.notify_all()
        if self._server is not None:
            self._server.stop(grace=None).wait()
            self._server = None

    @property
    def target(self) -> str:
        """Address of the server."""
        return f"127.0.0.1:{self.port}"

    def stream(self, **changes: Any) -> BatchStream:
        """Begin a session."""
        return BatchStream(self.target, "run", **{"timeout_s": 10.0, **changes})

    def add_step(self, step: int, *texts: str, num_mini_batches: int = 1, **info: Any) -> None:
        """Add a step whose mini-batches all have these rows."""
        with self.changed:
            self.steps[step] = [
                testkit.mini_batch(
                    *texts,
                    step=step,
                    mini_batch=index,
                    num_mini_batches=num_mini_batches,
                    manifest_hash=f"{step:064}",
                    **info,
                )
                for index in range(num_mini_batches)
            ]
            self.changed.notify_all()

    def start_session(self, request: wire.StartRequest, context: Any) -> wire.StartReply:
        """Begin a session of epoch 7."""
        self.calls.append(("Start", request.session, request.dp_world_size))
        self._refuse(context)
        token = request.recovery_token
        step = RecoveryToken.parse(token).step if token else 0
        return wire.StartReply(
            session_epoch=7,
            next_step=step + 1,
            config_json=encode_config(testkit.config(4)),
            lineage="main",
            newest_version=3,
        )

    def get(self, request: wire.GetRequest, context: Any) -> Iterator[bytes]:
        """Send a step once it is due, with the next fault."""
        self.calls.append(("Get", request.step))
        self.gets.append(request)
        _check_epoch(request, context)
        with self.changed:
            fault = self.faults.pop(0) if self.faults else None
            self.num_open_gets += 1
        try:
            messages = self._messages(request, context)
            yield from messages if fault is None else fault(messages, context)
        finally:
            with self.changed:
                self.num_open_gets -= 1
                self.changed.notify_all()

    def _messages(self, request: wire.GetRequest, context: Any) -> Iterator[bytes]:
        context.add_callback(self._wake)
        deadline_s = time.monotonic() + request.wait_s
        with self.changed:
            while not self._is_ready(request.step):
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or not context.is_active():
                    reason = WaitReason("member_open", "sample 3", {"sample": 3})
                    message = f"group g7 of step {request.step} is open"
                    abort(context, NotReadyError(message, [reason]))
                self.changed.wait(remaining_s)
        for mini_batch in self.steps[request.step]:
            yield from self.encode(mini_batch, request)

    def encode(self, mini_batch: MiniBatch, request: wire.GetRequest) -> Iterator[bytes]:
        """Yield the messages of one mini-batch; every rank gets the same rows."""
        share = {"dp_rank": request.dp_rank, "dp_world_size": request.dp_world_size}
        mini_batch = replace(mini_batch, info=replace(mini_batch.info, **share))
        encoded = encode_mini_batch(mini_batch)
        if self.is_older or not request.reads_xxh3:
            encoded = with_sha256(encoded)
        header = wire.MiniBatchHeader(
            step=mini_batch.info.step,
            mini_batch=mini_batch.info.mini_batch,
            num_mini_batches=mini_batch.info.num_mini_batches,
            num_bytes=encoded.num_bytes,
            content_hash=encoded.content_hash,
        )
        yield wire.GetChunk(header=header).SerializeToString()
        for start in range(0, encoded.num_bytes, self.chunk_bytes):
            chunk = bytes(encoded.data[start : start + self.chunk_bytes])
            yield wire.GetChunk(data=chunk).SerializeToString()

    def acknowledge(self, request: wire.SteppedRequest, context: Any) -> wire.SteppedReply:
        """Move the frontier."""
        self._receive(request, context, "Stepped", request.step, request.manifest_hash)
        with self.changed:
            self.stepped = request.step
            self.changed.notify_all()
        token = RecoveryToken(lineage="main", step=request.step, chain_hash="c" * 8)
        return wire.SteppedReply(recovery_token=str(token))

    def commit(self, request: wire.CommittedRequest, context: Any) -> wire.CommittedReply:
        """Record the call."""
        self._receive(request, context, "Committed", request.recovery_token)
        return wire.CommittedReply()

    def announce(
        self, request: wire.AnnounceVersionRequest, context: Any
    ) -> wire.AnnounceVersionReply:
        """Record the call."""
        announced = request.version, request.step, request.weights_uri
        self._receive(request, context, "Announce", *announced)
        return wire.AnnounceVersionReply()

    def _receive(self, request: Any, context: Any, *call: Any) -> None:
        self.calls.append(call)
        _check_epoch(request, context)
        self._refuse(context)

    def _is_ready(self, step: int) -> bool:
        is_due = step == 1 or not self.needs_stepped or self.stepped >= step - 1
        return step in self.steps and is_due

    def _refuse(self, context: Any) -> None:
        error = self.refusals.pop(0) if self.refusals else None
        if error is not None:
            abort(context, error)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


def abort(context: Any, error: TurnstreamError) -> None:
    code, details = error_to_status(error)
    context.abort(grpc.StatusCode[code], details)


def _check_epoch(request: Any, context: Any) -> None:
    if request.session_epoch != 7:
        abort(context, FencedError(f"epoch {request.session_epoch} is not 7"))


def _handlers(batcher: FakeBatcher) -> grpc.GenericRpcHandler:
    def serialize(reply: Any) -> bytes:
        return reply.SerializeToString()

    def unary(method: Callable[..., Any], request: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(method, request.FromString, serialize)

    return grpc.method_handlers_generic_handler(
        "turnstream.wire.v1.Batches",
        {
            "Start": unary(batcher.start_session, wire.StartRequest),
            "Get": grpc.unary_stream_rpc_method_handler(batcher.get, wire.GetRequest.FromString),
            "Stepped": unary(batcher.acknowledge, wire.SteppedRequest),
            "Committed": unary(batcher.commit, wire.CommittedRequest),
            "AnnounceVersion": unary(batcher.announce, wire.AnnounceVersionRequest),
        },
    )


@pytest.fixture
def batcher() -> Iterator[FakeBatcher]:
    fake = FakeBatcher()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture(scope="session")
def failing() -> Callable[[TurnstreamError], Fault]:
    """`failing(error)` is the fault of a Get that ends with this error at once."""

    def make(error: TurnstreamError) -> Fault:
        def fail(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            abort(context, error)
            yield from messages

        return fail

    return make


@pytest.fixture(scope="session", autouse=True)
def libraries_are_loaded() -> None:
    """Load the libraries of Arrow's first batch, which takes longer than a test's deadline."""
    encoded = encode_mini_batch(testkit.mini_batch("abC"))
    decode_mini_batch(encoded.data, expected_hash=encoded.content_hash)


@pytest.fixture
def retried() -> Callable[[Callable[[], Any]], Any]:
    """`retried(call)` returns the result of the call, after any number of timeouts.

    A short timeout of a stream also limits its beginning and every wait: it must not fail a test.
    """

    def call_until_answered(call: Callable[[], Any]) -> Any:
        results: list[Any] = []

        def has_answer() -> bool:
            with contextlib.suppress(UnavailableError):
                results.append(call())
            return bool(results)

        testkit.wait_until(has_answer, describe="an answer of the batcher")
        return results[0]

    return call_until_answered


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server for each test: a batcher serves every run of its store."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def start_batcher(server: EmbeddedServer) -> Iterator[Callable[[], BatcherThread]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(BatcherThread(server.url))
