"""gRPC requests: every field has a limit here, and the key of a call has the role that it needs.

A request that is refused has read and written nothing of a run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import redis.asyncio
from google.protobuf.message import DecodeError, Message

from turnstream.errors import InvalidConfigError, RunNotFoundError, UnknownFormatError
from turnstream.types import RecoveryToken
from turnstream.types.names import encode_name, encode_run
from turnstream.wire.v1 import batches_pb2 as batches
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.wire.v1 import operations_pb2 as operations
from turnstream.wire.v1.operations_pb2 import GetOperationsRequest
from turnstream_server.batcher.serving.running_calls import (
    Context,
    bounded_by_store,
    headers_of,
    store_time_s,
)
from turnstream_server.keys.limits import Held, Meters, Places
from turnstream_server.keys.records import LOCAL_KEY, ApiKey, KeyChecks, Role, secret_of
from turnstream_server.ledger.sessions.observers import MOST_EXPIRY_S
from turnstream_server.operations.keys import MODEL_ID
from turnstream_server.operations.log import MAX_SHARED
from turnstream_server.operations.models import read_model_async

MAX_DP_WORLD_SIZE: Final = 8192
"""Dividing a mini-batch among so many ranks takes about 10 ms, among 10^6 it takes seconds."""

MAX_WORKER_RANKS: Final = 1024
"""Ranks of a worker of hosted models: each pass of its calls is divided among all of them."""

MAX_STEP: Final = 2**31 - 1
"""Ids of inert rows cannot hold a larger step."""

MAX_EXACT: Final = 2**53 - 2
"""The scripts of the store compute with doubles: above it, two numbers may be the same."""

MAX_SECONDS: Final = 1e9

_MAX_MODEL_ID: Final = 512

_LIMITS: Final[dict[str, int | tuple[float, float]]] = {
    "recovery_token": 2048,
    "session": 512,
    "previous_hash": 128,
    "manifest_hash": 128,
    "content_hash": 128,
    "weights_uri": 4096,
    "step": (0, MAX_STEP),
    "GetRequest.step": (1, MAX_STEP),
    "SteppedRequest.step": (1, MAX_STEP),
    "first_step": (0, MAX_STEP),
    "first_mini_batch": (0, MAX_STEP),
    "first_byte": (0, MAX_EXACT),
    "reads_xxh3": (0, 1),
    "dp_rank": (0, MAX_DP_WORLD_SIZE - 1),
    "dp_world_size": (1, MAX_DP_WORLD_SIZE),
    "GetOperationsRequest.dp_world_size": (1, MAX_WORKER_RANKS),
    "session_epoch": (0, MAX_EXACT),
    "version": (0, MAX_EXACT),
    "first": (1, MAX_STEP),
    "last": (1, MAX_STEP),
    "wait_s": (0, MAX_SECONDS),
    "expiry_s": (0.001, MOST_EXPIRY_S),
}
"""Most characters of a text; smallest and largest value of a number."""

_NOT_EMPTY: Final = (
    *("StartRequest.session", "ObserveRequest.observer", "ObservedRequest.observer"),
    "CommittedRequest.recovery_token",
)
"""Fields that must have a value; the name of the run always must."""

_SHOWN: Final = 40
"""Characters of a refused value that its error shows."""

Request = TypeVar("Request", bound=Message)


def parse_request(data: bytes, kind: type[Request]) -> Request:
    """Return the request in these bytes, or raise an InvalidConfigError that names a field."""
    name = kind.DESCRIPTOR.name
    try:
        request = kind.FromString(data)
    except DecodeError as error:
        raise InvalidConfigError("request", f"{len(data)} bytes are no {name}: {error}") from error
    for field in kind.DESCRIPTOR.fields_by_name:
        _check_field(name, field, getattr(request, field))
    if isinstance(request, wire.GetRequest | GetOperationsRequest) and (
        request.dp_rank >= request.dp_world_size
    ):
        raise InvalidConfigError(
            "dp_rank", f"{request.dp_rank} is not below dp_world_size={request.dp_world_size}"
        )
    if isinstance(request, GetOperationsRequest):
        _check_commands(request)
    return request


def _check_field(kind: str, field: str, value: Any) -> None:
    if f"{kind}.{field}" in _NOT_EMPTY and not value:
        raise InvalidConfigError(field, f"a {kind} needs one, and has ''")
    if field == "run":
        encode_run(value)
    elif field == "observer":
        _check_observer(value)
    elif field == "model_id":
        _check_model_id(value)
    elif field == "skipped":
        _check_limits(field, value, MAX_SHARED - 1)
    else:
        _check_limits(field, value, _LIMITS.get(f"{kind}.{field}") or _LIMITS[field])


def _check_model_id(model_id: str) -> None:
    _check_limits("model_id", model_id, _MAX_MODEL_ID)
    if MODEL_ID.fullmatch(model_id) is None:
        raise InvalidConfigError("model_id", f"{_shown(model_id)} is not <session>:train:<n>")


def _check_commands(request: GetOperationsRequest) -> None:
    first, last = request.first, request.last
    if not first <= last < first + MAX_SHARED:
        raise InvalidConfigError(
            "last", f"{last} is not from first={first} to {first + MAX_SHARED - 1}"
        )
    for number in request.skipped:
        if not first <= number <= last:
            raise InvalidConfigError("skipped", f"{number} is not from {first} to {last}")
    if len({*request.skipped}) > last - first:
        raise InvalidConfigError("skipped", f"all commands from {first} to {last} are skipped")


def parse_token(text: str) -> RecoveryToken:
    """Return the recovery token that a trainer presents."""
    try:
        token = RecoveryToken.parse(text)
    except UnknownFormatError:
        raise
    except ValueError as error:
        reason = f"{_shown(text)} is not a recovery token"
        raise InvalidConfigError("recovery_token", reason) from error
    if not 0 <= token.step <= MAX_STEP:
        raise InvalidConfigError(
            "recovery_token", f"{_shown(text)} has a step that is not from 0 to {MAX_STEP}"
        )
    return token


def _check_observer(name: str) -> None:
    """Refuse a name that no observer can have. An empty one says that the trainer calls."""
    try:
        if name:
            encode_name(name)
    except ValueError as error:
        raise InvalidConfigError("observer", str(error)) from error


def _check_limits(field: str, value: Any, limit: int | tuple[float, float]) -> None:
    if isinstance(limit, tuple):
        least, most = limit
        if not least <= value <= most:  # also refuses NaN
            raise InvalidConfigError(field, f"{value} is not from {least:.16g} to {most:.16g}")
    elif len(value) > limit:
        unit = "characters" if isinstance(value, str) else "values"
        raise InvalidConfigError(
            field, f"{len(value)} {unit}, at most {limit} are allowed: {_shown(value)}"
        )


def _shown(value: Sequence[Any]) -> str:
    r"""Return the beginning of a text or a list, as an error shows it.

    >>> _shown("main\n:1"), _shown("a" * 100)[-5:]
    ("'main\\n:1'", "aa'..")
    """
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}.."


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
