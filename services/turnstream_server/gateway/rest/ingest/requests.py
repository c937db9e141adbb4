"""A request of an ingest route: its headers, its body, and the writer that it stands for."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Annotated, Final, TypeVar

from fastapi import Depends, FastAPI, Header, Request

from turnstream.errors import InvalidTurnError
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.bodies import ARROW, JSON, media_type_of, read_content
from turnstream_server.gateway.rest.caller import Caller, Produce, RunName
from turnstream_server.gateway.rest.ingest.publishers import Publishers, RunWriter, Slots
from turnstream_server.gateway.state import Gateway

WriterName = Annotated[
    str | None,
    Header(
        alias="X-Turnstream-Writer",
        min_length=1,
        max_length=128,
        description="Name of the generator process, which holds the leases of its trajectories. By "
        "default all requests of a key are one writer.",
        examples=["generator-7"],
    ),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=256,
        description="Name of the request. The same key with another body is refused.",
        examples=["7c1a9a6e-7f9b-4c8e-9f0e-2f3f0a4d1b7e"],
    ),
]

_MEDIA_TYPES: Final = {"json": JSON, "arrow": ARROW}

_Parsed = TypeVar("_Parsed")

MAX_KEYS: Final = 10_000
"""Idempotency keys that a process remembers, the newest."""


class RequestKeys:
    """The newest idempotency keys, with hashes of the bodies that came with them.

    Writes are idempotent by their content. A key only guards against its use for another body.
    """

    def __init__(self) -> None:
        self._hashes: OrderedDict[tuple[str, ...], bytes] = OrderedDict()

    def check(self, found: bytes, *scope: str) -> None:
        """Raise InvalidTurnError if the same key came with another body.

        Args:
            found: hash of the decompressed body.
            scope: id of the API key, path, and the idempotency key.
        """
        known = self._hashes.setdefault(scope, found)
        self._hashes.move_to_end(scope)
        if len(self._hashes) > MAX_KEYS:
            self._hashes.popitem(last=False)
        if known != found:
            raise InvalidTurnError(
                "Idempotency-Key", f"{scope[-1]!r} was used with another body: choose another key"
            )


def add_ingest_state(app: FastAPI, gateway: Gateway) -> None:
    """Add what the ingest routes share; publishers are closed with the resources of the gateway."""
    publishers = Publishers(gateway.options.redis_url, gateway.client)
    gateway.resources.push_async_callback(publishers.close)
    app.state.publishers = publishers
    app.state.request_keys = RequestKeys()


class IngestCall:
    """One request of an ingest route.

    Attributes:
        run: name of the run.
        caller: who asks.
        publishers: those of the process.
    """

    def __init__(
        self,
        request: Request,
        run: str,
        caller: Caller,
        writer: str | None = None,
        key: str | None = None,
    ) -> None:
        self.run = run
        self.caller = caller
        self.publishers: Publishers = request.app.state.publishers
        self._request = request
        self._writer = writer
        self._key = key

    @property
    def writer_name(self) -> str:
        """Return the name of the writer; by default all requests of a key have the same."""
        return self._writer or f"http-{self.caller.key.name}"

    async def parsed(self, **parsers: Callable[[bytes], _Parsed]) -> _Parsed:
        """Return the parsed body; see `Parsers.run`.

        Args:
            parsers: "json" and "arrow", the accepted media types, with their parsers: functions of
                a module.

        Raises:
            HTTPException: 413 or 415, as of `media_type_of` and `read_content`.
            InvalidTurnError: something in it is wrong, or its idempotency key is that of another.
            RecordError: it cannot be read.
        """
        accepted = {_MEDIA_TYPES[name]: parse for name, parse in parsers.items()}
        media_type = media_type_of(self._request, accepted=tuple(accepted))
        body = await read_content(self._request, media_type=media_type)
        parsed, found = await self.caller.gateway.parsers.run(
            functools.partial(_parsed, accepted[media_type], self._key is not None),
            body,
            owner=self.caller.key.owner,
            is_json=media_type == JSON,
        )
        if self._key is not None:
            known: RequestKeys = self._request.app.state.request_keys
            known.check(found, self.caller.key.key_id, self._request.url.path, self._key)
        return parsed

    @contextlib.asynccontextmanager
    async def borrow(self, keys: Iterable[TrajectoryKey]) -> AsyncIterator[tuple[RunWriter, Slots]]:
        """Yield the writer of the request, with the locked places of some trajectories.

        Without a name in the request, several clients may share the writer of their key.
        """
        is_shared, owner = self._writer is None, self.caller.key.owner
        async with (
            self.publishers.borrow(
                self.run, self.writer_name, owner=owner, is_shared=is_shared
            ) as run_writer,
            run_writer.locked(keys) as slots,
        ):
            try:
                yield run_writer, slots
            finally:
                self.publishers.keep(run_writer, slots.values(), owner=owner)


def _parsed(parse: Callable[[bytes], _Parsed], has_key: bool, body: bytes) -> tuple[_Parsed, bytes]:
    """Return the content of a body, and its hash if the request has an idempotency key."""
    return parse(body), hashlib.blake2b(body, digest_size=16).digest() if has_key else b""


async def _ingest_call(
    request: Request,
    run: RunName,
    caller: Produce,
    writer: WriterName = None,
    key: IdempotencyKey = None,
) -> IngestCall:
    """Return the call of a request. A class would be called in a thread."""
    return IngestCall(request, run, caller, writer, key)


Call = Annotated[IngestCall, Depends(_ingest_call)]
