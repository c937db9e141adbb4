"""Health by the standard protocol of gRPC, `grpc.health.v1`: red while the store takes no writes.

The trailing metadata of a Check and the log have the reason. Planned batches may still be served,
and a restart of the batcher does not help. A store with full memory stays green, because it still
accepts the calls that free memory.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import grpc.aio
import redis.asyncio
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from turnstream.errors import TurnstreamError
from turnstream.store.client.fullness import store_trouble
from turnstream.store.client.replies import translating
from turnstream_server.loops import first_result, repeat

logger = logging.getLogger(__name__)

TROUBLE: Final = "turnstream-trouble"
"""Name of the trailing metadata that says why a Check is red."""

_EVERY_S: Final = 1.0
_SILENT_AFTER_S: Final = 3.0
"""A store that has not answered within this time counts as one that refuses writes."""


class StoreHealth(health.aio.HealthServicer):  # pyright: ignore[reportAttributeAccessIssue]
    """The health of the server, whose name is empty, and of a service."""

    def __init__(self, client: redis.asyncio.Redis, service: str) -> None:
        super().__init__()
        self._client = client
        self._services = ("", service)
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why the store takes no writes; "" if it takes them."""
        return self._trouble

    async def update(self) -> None:
        """Read the state of the store, and report it from now on."""
        trouble = await self._read()
        if trouble != self._trouble:
            logger.warning("health: %s", trouble or "serving again")
        self._trouble = trouble
        states = HealthCheckResponse.ServingStatus
        for service in self._services:
            await self.set(service, states.NOT_SERVING if trouble else states.SERVING)

    async def keep_updating(self) -> None:
        """Read the state of the store every second, until cancelled."""
        await repeat(self._update_later, what="the health of the store is not read")

    async def _update_later(self) -> None:
        await asyncio.sleep(_EVERY_S)
        await self.update()

    async def Check(  # noqa: N802 - name of the protocol
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> HealthCheckResponse:
        """Return the state, with its reason in the trailing metadata."""
        if self._trouble:
            context.set_trailing_metadata(((TROUBLE, _printable(self._trouble)),))
        return await super().Check(request, context)

    async def _read(self) -> str:
        silent = f"the store has not answered for {_SILENT_AFTER_S:.0f} s"
        try:
            return await first_result(self._read_store(), asyncio.sleep(_SILENT_AFTER_S, silent))
        except TurnstreamError as error:
            return str(error)

    async def _read_store(self) -> str:
        with translating():
            facts: Any = await self._client.info("persistence")
        return store_trouble(facts)


def _printable(text: str) -> str:
    r"""Return the printable ASCII of a text, the only content that metadata may carry.

    >>> _printable("Größe\n0")
    'Gr??e 0'
    """
    return " ".join(text.encode("ascii", "replace").decode().split())
