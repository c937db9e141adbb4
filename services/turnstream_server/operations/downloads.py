"""Links to the files of exported weights. A token is enough to read them until it expires."""

from __future__ import annotations

import secrets
from typing import Any, Final, cast

import redis.asyncio

from turnstream.errors import RunNotFoundError
from turnstream.store.client.replies import translating
from turnstream_server.operations.checkpoint_paths import CheckpointPath
from turnstream_server.operations.keys import download_key

_TOKEN_BYTES: Final = 32
_TOKEN_LENGTH: Final = 43  # characters of so many bytes in base64


async def new_download(
    client: redis.asyncio.Redis, owner: str, path: CheckpointPath, *, seconds: int
) -> str:
    """Return a new token for the files of a checkpoint; it expires after this time."""
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    with translating():
        await client.set(download_key(token), f"{owner} {path}", ex=seconds)
    return token


async def read_download(client: redis.asyncio.Redis, token: str) -> tuple[str, CheckpointPath]:
    """Return owner and checkpoint of a token; RunNotFoundError if there is no such token."""
    stored: bytes | None = None
    if len(token) == _TOKEN_LENGTH:
        with translating():
            stored = cast("bytes | None", await cast(Any, client.get(download_key(token))))
    if stored is None:
        raise RunNotFoundError("the link is unknown or has expired: ask for a new one")
    owner, _, path = stored.decode().partition(" ")
    return owner, CheckpointPath.parse(path)
