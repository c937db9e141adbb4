"""The key of a gRPC call, in its metadata: its limits, and the role that each request needs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import redis.asyncio
from google.protobuf.message import Message

from turnstream.errors import RunNotFoundError
from turnstream.wire.v1 import batches_pb2 as batches
from turnstream.wire.v1 import operations_pb2 as operations
from turnstream_server.batcher.serving.requests import parse_request
from turnstream_server.batcher.serving.running_calls import (
    Context,
    bounded_by_store,
    headers_of,
    store_time_s,
)
from turnstream_server.keys.limits import Held, Meters, Places
from turnstream_server.keys.records import LOCAL_KEY, ApiKey, KeyChecks, Role, secret_of
from turnstream_server.operations.models import read_model_async

_CALLER: ContextVar[ApiKey] = ContextVar("caller", default=LOCAL_KEY)

_ROLES: Final[dict[type[Message], Role]] = {
    batches.StartRequest: "train",
    batches.GetRequest: "train",
    batches.SteppedRequest: "train",
    batches.CommittedRequest: "train",
    batches.AnnounceVersionRequest: "train",
    batches.ObserveRequest: "read",
    batches.ObservedRequest: "read",
    operations.GetOperationsRequest: "train",
}
"""A request that is missing here is never answered."""

_HELD: Final = (batches.GetRequest, operations.GetOperationsRequest)
MAX_HELD: Final = 32_768
"""Requests for batches in progress, at most."""

MAX_OF_KEY: Final = 16_384
"""Those of one key: each of at most 8,192 ranks has one or two."""

Request = TypeVar("Request", bound=Message)


class Access:
    """Reads requests of callers that may send them."""

    def __init__(self, client: redis.asyncio.Redis, keys: KeyChecks) -> None:
        self._client = client
        self._keys = keys
        self._meters = Meters()
        self._places = Places(shared=4, alone=64)
        self._held = Held("requests for batches", num=MAX_HELD, num_of_key=MAX_OF_KEY)

    @contextlib.asynccontextmanager
    async def reading(
        self, data: bytes, kind: type[Request], context: Context
    ) -> AsyncIterator[Request]:
        """Yield a request whose caller may send it; it holds a place of its key in the block.

        A request for batches only waits and sends in the block. It is counted, and holds none.
        """
        async with bounded_by_store(self._client, store_time_s(context.time_remaining())):
            key = await self._keys.identify(secret_of(headers_of(context)))
        self._meters.admit(key, num_bytes=len(data), now_s=time.monotonic())
        async with self._places.borrow(key.key_id) as place:
            await place.take()
            request = parse_request(data, kind)
            if isinstance(request, operations.GetOperationsRequest):
                await self._check_model(key, request.model_id)
            else:
                run: str = getattr(request, "run")  # noqa: B009 - every other request has one
                key.require(_role_of(request), run=run)
            _CALLER.set(key)
            if kind not in _HELD:
                yield request
                return
            place.release()
            with self._held.one_more(key.key_id):
                yield request

    async def _check_model(self, key: ApiKey, model_id: str) -> None:
        """Refuse a key that is neither of the owner of the model nor of a service."""
        key.require(_ROLES[operations.GetOperationsRequest])
        if "admin" in key.roles:
            return
        record = await read_model_async(self._client, model_id)
        if record.owner != key.owner:
            raise RunNotFoundError(f"there is no model {model_id!r}")


def observer_rights() -> dict[str, Any]:
    """Return the arguments of the functions of observers that say who calls."""
    key = _CALLER.get()
    return {"owner": key.owner, "is_admin": "admin" in key.roles}


def _role_of(request: Message) -> Role:
    """Return the role that a request needs; an observer only reads."""
    if isinstance(request, batches.GetRequest) and request.observer:
        return "read"
    return _ROLES[type(request)]
