"""Health by the standard protocol of gRPC, `grpc.health.v1`: red while the store takes no writes.

A balancer or a person asks with any tool that speaks it, such as `grpc_health_probe`. The protocol
has no place for a reason: that is in the trailing metadata of a Check, and in the log.

A store whose memory is full stays green, since what makes room is not refused: the metadata of a
Check says then how full it is, and what holds the bytes.

Red says that nothing new is acknowledged. What is planned may still be served, and to start the
batcher again would mend nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from turnstream.errors import TurnstreamError
from turnstream.store import keys
from turnstream.store.connection import connect_async
from turnstream.store.ending import cancel_all
from turnstream.store.replies import translating
from turnstream_server.batcher.tasks import first_of
from turnstream_server.bus.budget import HeldBytes, read_held_async
from turnstream_server.bus.health import SECTIONS, store_note, store_trouble

logger = logging.getLogger(__name__)

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
TROUBLE: Final = "turnstream-trouble"
"""Name of the trailing metadata that says why a Check is red."""
NOTE: Final = "turnstream-note"
"""Name of the trailing metadata that says that the store is full."""

_EVERY_S: Final = 1.0
_PATIENCE_S: Final = 3.0
"""A store that has not answered for so long takes no writes."""


class Health(IntEnum):
    """`ServingStatus` of the protocol."""

    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class StoreWatch:
    """Asks the store again and again whether it takes writes.

    Args:
        url: of the store.

    Attributes:
        trouble: why not; empty where it does.
        note: the memory of the store is full, and what holds it; empty while it is not.
        is_over: nothing changes any more: this replica stops.
    """

    def __init__(self, url: str) -> None:
        self.trouble = ""
        self.note = ""
        self.is_over = False
        self._client = connect_async(url, num_retries=0)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask once, and from now on."""
        await self._look()
        self._task = asyncio.create_task(self._look_for_ever(), name="health of the store")

    async def wait_for_other(self, trouble: str) -> None:
        """Until there is another trouble than this, or none any more, or this replica stops."""
        while self.trouble == trouble and not self.is_over:
            await self._changed.wait()

    def dismiss(self) -> None:
        """Say that this replica stops, to whoever watches it."""
        self.is_over = True
        self._tell("this replica stops")

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            await cancel_all([self._task])
        await self._client.aclose()

    async def _look_for_ever(self) -> None:
        while not self.is_over:
            await asyncio.sleep(_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        silent = f"the store has not answered for {_PATIENCE_S:.0f} s"
        try:
            trouble = await first_of(self._ask(), asyncio.sleep(_PATIENCE_S, silent))
        except TurnstreamError as error:
            trouble = str(error)
        if self.is_over or trouble == self.trouble:
            return
        if trouble:
            logger.warning("not serving: %s", trouble)
        else:
            logger.info("serving again")
        self._tell(trouble)

    async def _ask(self) -> str:
        with translating():
            facts: Any = await self._client.info(*SECTIONS)
        self._note(store_note(facts, await self._held() if store_note(facts, ()) else ()))
        return store_trouble(facts)

    async def _held(self) -> list[HeldBytes]:
        """Return the bytes that the runs of the store hold."""
        with translating():
            names: Any = await self._client.execute_command("SMEMBERS", keys.RUNS)
        runs = [keys.decode_name(name.decode()) for name in names]
        return [await read_held_async(self._client, run) for run in runs]

    def _note(self, note: str) -> None:
        if note and not self.note:
            logger.warning("%s", note)
        self.note = note

    def _tell(self, trouble: str) -> None:
        self.trouble = trouble
        self._changed.set()
        self._changed = asyncio.Event()


class HealthServicer:
    """The two calls of the protocol.

    Args:
        store: whose state is ours.
        services: names that may be asked for, beside the empty one, which stands for all.
    """

    def __init__(self, store: StoreWatch, services: tuple[str, ...]) -> None:
        self._store = store
        self._services = ("", *services)

    async def check(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The state now."""
        request = await _parsed(data, context)
        if request.value not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.value!r}")
        said = ((TROUBLE, self._store.trouble), (NOTE, self._store.note))
        context.set_trailing_metadata(
            tuple((name, _printable(text)) for name, text in said if text)
        )
        return Int32Value(value=self._state())

    async def watch(
        self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """The state now, and whenever it is another, until the caller or this replica leaves."""
        request = await _parsed(data, context)
        is_known = request.value in self._services
        told: Health | None = None
        while True:
            trouble, is_over = self._store.trouble, self._store.is_over
            state = self._state() if is_known else Health.SERVICE_UNKNOWN
            if state is not told:
                told = state
                yield Int32Value(value=state)
            if is_over:
                return
            await self._store.wait_for_other(trouble)

    def _state(self) -> Health:
        return Health.NOT_SERVING if self._store.trouble else Health.SERVING


def health_handlers(servicer: HealthServicer) -> grpc.GenericRpcHandler:
    """The servicer as gRPC calls it.

    The two messages of the protocol have one field each, with the number and the type of those of
    protobuf's wrappers: `HealthCheckRequest` is a StringValue on the wire, `HealthCheckResponse` an
    Int32Value.
    """
    words: dict[str, Any] = {"response_serializer": Int32Value.SerializeToString}
    calls = {
        "Check": grpc.unary_unary_rpc_method_handler(servicer.check, **words),
        "Watch": grpc.unary_stream_rpc_method_handler(servicer.watch, **words),
    }
    return grpc.method_handlers_generic_handler(HEALTH_SERVICE, calls)


async def _parsed(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> StringValue:
    """Return the request in these bytes; abort the call where they are none."""
    try:
        return StringValue.FromString(data)
    except DecodeError as error:
        details = f"{len(data)} bytes are no HealthCheckRequest: {error}"
        logger.info("a health check of %s is refused: %s", context.peer(), details)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details)


def _printable(text: str) -> str:
    r"""What metadata may carry: printable ASCII.

    >>> _printable("Größe\n0")
    'Gr??e 0'
    """
    return " ".join(text.encode("ascii", "replace").decode().split())
