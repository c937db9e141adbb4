"""Links to the files of exported weights. A token is enough to read them until it expires."""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple, cast

import redis.asyncio

from turnstream.errors import RunNotFoundError
from turnstream.store.client.replies import translating
from turnstream_server.operations.checkpoint_paths import CheckpointPath
from turnstream_server.operations.keys import download_key

_TOKEN_BYTES: Final = 32


class Download(NamedTuple):
    """The files of a checkpoint of an owner, which a token makes readable."""

    owner: str
    path: CheckpointPath


async def new_download(client: redis.asyncio.Redis, download: Download, *, seconds: int) -> str:
    """Return a new token for a checkpoint; it expires after this time."""
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    with translating():
        await client.set(download_key(token), f"{download.owner} {download.path}", ex=seconds)
    return token


async def read_download(client: redis.asyncio.Redis, token: str) -> Download:
    """Return the files of a token; RunNotFoundError for one that is unknown or has expired."""
    with translating():
        stored = cast("bytes | None", await cast(Any, client.get(download_key(token))))
    if stored is None:
        raise RunNotFoundError("the link is unknown or has expired: ask for a new one")
    owner, _, path = stored.decode().partition(" ")
    return Download(owner, CheckpointPath.parse(path))
