"""The served base models, as one gateway process knows them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import redis.asyncio

from turnstream.errors import BatchingError, NotReadyError
from turnstream_server.commands.bases import BaseModel, read_bases

_REFRESH_S: Final = 5.0


class BaseModels:
    """The base models of the workers. One that was registered once stays known."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._known: dict[str, BaseModel] = {}
        self._read_s = -_REFRESH_S

    async def served(self) -> Mapping[str, BaseModel]:
        """Return the names of the served base models, each with its model."""
        return await read_bases(self._client)

    async def require_served(self, name: str) -> BaseModel:
        """Return a served base model; BatchingError lists the names of all if it is not served."""
        served = await self.served()
        if name not in served:
            names = ", ".join(served) or "none"
            raise BatchingError(f"base_model is {name!r}, which is not served; served: {names}")
        return served[name]

    async def known(self, name: str) -> BaseModel:
        """Return a base model whose workers may be away for now.

        Raises:
            NotReadyError: no worker has ever registered it.
        """
        if name not in self._known or time.monotonic() - self._read_s >= _REFRESH_S:
            self._known = await read_bases(self._client, is_served=False)
            self._read_s = time.monotonic()
        if name not in self._known:
            raise NotReadyError(f"no worker has registered base model {name!r}")
        return self._known[name]

    async def find(self, name: str) -> BaseModel | None:
        """Return a base model, or None if it is not known."""
        try:
            return await self.known(name)
        except NotReadyError:
            return None
