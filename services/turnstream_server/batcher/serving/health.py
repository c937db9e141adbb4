"""Health by the standard protocol of gRPC, `grpc.health.v1`: red while the store takes no writes.

The trailing metadata of a Check and the log have the reason. Planned batches may still be served,
and a restart of the batcher does not help.

A store with full memory stays green, because it still accepts the calls that free memory. The
metadata of a Check then names the bytes in use and their holders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from turnstream.errors import TurnstreamError
from turnstream.store.client import keys
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import connect_async
from turnstream.store.client.fullness import Bytes, store_trouble
from turnstream.store.client.replies import translating
from turnstream_server.batcher.planner.event_loop import first_of
from turnstream_server.bus.queries.budget import HeldBytes, read_held_async

logger = logging.getLogger(__name__)

TROUBLE: Final = "turnstream-trouble"
"""Name of the trailing metadata that says why a Check is red."""
NOTE: Final = "turnstream-note"
"""Name of the trailing metadata that says that the store is full."""

_EVERY_S: Final = 1.0
_SILENT_AFTER_S: Final = 3.0
"""A store that has not answered within this time counts as one that refuses writes."""


class StoreHealth(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """The health servicer of a batcher; it reads the state of the store every second.

    Args:
        url: address of the store.
        service: name that callers may ask for, in addition to the empty name of the server.
    """

    def __init__(self, url: str, service: str) -> None:
        super().__init__()
        self._services = ("", service)
        self._trouble = ""
        self._note = ""
        self._client = connect_async(url, num_retries=0)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the state once, then keep reading it in a task."""
        await self._publish(await self._read())
        self._task = asyncio.create_task(self._keep_reading(), name="health of the store")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            await cancel_all([self._task])
        await self._client.aclose()

    async def Check(  # noqa: N802 - name of the protocol
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> HealthCheckResponse:
        """Return the state, with its reason in the trailing metadata."""
        texts = ((TROUBLE, self._trouble), (NOTE, self._note))
        context.set_trailing_metadata(
            tuple((name, _printable(text)) for name, text in texts if text)
        )
        return await super().Check(request, context)

    async def _keep_reading(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            trouble = await self._read()
            if trouble != self._trouble:
                logger.warning("health: %s", trouble or "serving again")
                await self._publish(trouble)

    async def _publish(self, trouble: str) -> None:
        self._trouble = trouble
        states = HealthCheckResponse.ServingStatus
        for service in self._services:
            await self.set(service, states.NOT_SERVING if trouble else states.SERVING)

    async def _read(self) -> str:
        """Return why the store takes no writes; empty where it takes them."""
        silent = f"the store has not answered for {_SILENT_AFTER_S:.0f} s"
        try:
            return await first_of(self._read_store(), asyncio.sleep(_SILENT_AFTER_S, silent))
        except TurnstreamError as error:
            return str(error)

    async def _read_store(self) -> str:
        with translating():
            facts: Any = await self._client.info("persistence", "memory")
        note = store_note(facts, await self._held() if store_note(facts, ()) else ())
        if note and not self._note:
            logger.warning("%s", note)
        self._note = note
        return store_trouble(facts)

    async def _held(self) -> list[HeldBytes]:
        """Return the bytes that the runs of the store hold."""
        with translating():
            names: Any = await self._client.execute_command("SMEMBERS", keys.RUNS)
        runs = [keys.decode_name(name.decode()) for name in names]
        return [await read_held_async(self._client, run) for run in runs]


def store_note(facts: Mapping[str, Any], held: Iterable[HeldBytes]) -> str:
    """Return that the memory of a store is full, with its holders; empty if it is not.

    Args:
        facts: the reply to INFO, by name.
        held: bytes of each run.
    """
    runs = list(held)
    known = Bytes(
        used=int(facts.get("used_memory", 0)),
        allowed=int(facts.get("maxmemory", 0)),
        reserved=sum(each.reserved for each in runs),
        stored=sum(each.stored for each in runs),
        planned=sum(each.planned for each in runs),
    )
    if not known.refuses_writes:
        return ""
    return known.why_full(is_urgent=True).replace("this run holds", "its runs hold", 1)


def _printable(text: str) -> str:
    r"""Return the printable ASCII of a text, the only content that metadata may carry.

    >>> _printable("Größe\n0")
    'Gr??e 0'
    """
    return " ".join(text.encode("ascii", "replace").decode().split())
