"""The saved checkpoints of owners: paths, records, and links to their files.

A path is `tinker://<model id>/<kind>/<name>`. The folder lies below the folder that all workers
share, at `folder_of(path)`. The worker that runs a save writes the folder first, then the record. A
record that is deleted or has expired is hidden at once; `due_folders` names the folders that a
worker removes. The token of a link is enough to read the files until it expires.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final, Literal, NamedTuple, cast, get_args
from urllib.parse import quote

import redis
import redis.asyncio

from turnstream.errors import BatchingError, RunNotFoundError
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command, Script, run_command
from turnstream.types.names import file_name
from turnstream_server.ledger.core.scan import server_ms
from turnstream_server.operations.announcing import essential_write
from turnstream_server.operations.keys import EXPIRIES, download_key, model_keys, owner_keys

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]

_SCHEME: Final = "tinker://"
_MAX_LENGTH: Final = 200
"""Longest encoded name: it is the name of a folder, which has at most 255 bytes."""

_FORM: Final = f"{_SCHEME}<model id>/<{' | '.join(get_args(CheckpointKind))}>/<name>"


class CheckpointPath(NamedTuple):
    """Where a checkpoint is; its text is the path.

    >>> str(CheckpointPath.parse("tinker://S:train:0/weights/s1"))
    'tinker://S:train:0/weights/s1'
    """

    model_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """Return the path in a text; BatchingError for another text."""
        parts = text.removeprefix(_SCHEME).split("/")
        is_path = text.startswith(_SCHEME) and len(parts) == 3
        if not is_path or not parts[0].strip(".") or parts[1] not in get_args(CheckpointKind):
            raise BatchingError(f"path is {text!r}, expected {_FORM}")
        model_id, kind, name = parts
        return cls(model_id, cast(CheckpointKind, kind), checkpoint_name(name))

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"


def checkpoint_name(name: str) -> str:
    """Return the name; BatchingError if it cannot be the last part of a path."""
    if name in ("", ".", ".."):
        raise BatchingError(f"name of a checkpoint is {name!r}, expected a word")
    for character in name:
        if character in "/\\" or not character.isprintable():
            raise BatchingError(f"name of a checkpoint is {name!r}: {character!r} is not allowed")
    if (length := len(quote(name, safe=""))) > _MAX_LENGTH:
        limit = f"expected {_MAX_LENGTH} characters at most, encoded as in a URL"
        raise BatchingError(f"name of a checkpoint is {name[:32]!r}.. of {length}, {limit}")
    return name


_DROP: Final = Script("drop_expired", "turnstream_server.operations")

SESSION_WEIGHTS: Final = "session_weights"
"""Folder of weights that were saved for one sampling session; they have no record."""


class SavedCheckpoint(NamedTuple):
    """A saved checkpoint.

    Attributes:
        path: see `CheckpointPath`.
        request_id: the operation that saved it. The same operation may write it again.
        base_model, lora_rank, train_attn, train_mlp, train_unembed: as in `ModelRecord`.
        created_ms: server ms.
        expires_ms: server ms of its deletion; None keeps it.
        size_bytes: size of its files.
        public: a mark of the owner, without effect.
        user_metadata: kept for the client.
    """

    path: CheckpointPath
    request_id: str
    base_model: str
    lora_rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    created_ms: int
    expires_ms: int | None
    size_bytes: int
    public: bool = False
    user_metadata: Mapping[str, str] = {}


def folder_of(path: CheckpointPath) -> PurePosixPath:
    """Return the folder of a checkpoint below the shared folder of the workers.

    >>> folder_of(CheckpointPath("S:train:0", "weights", "s1"))
    PurePosixPath('saved/S%3Atrain%3A0/weights/s1')
    >>> folder_of(CheckpointPath("S:train:0", "weights", "..")).name
    '%2E%2E'
    """
    names = (path.model_id, path.kind, path.name)
    return PurePosixPath("saved", *(file_name(each) for each in names))


def session_folder(model_id: str, number: int) -> PurePosixPath:
    """Return the folder of weights that were saved for a sampling session of this number."""
    return PurePosixPath("saved", file_name(model_id), SESSION_WEIGHTS, str(number))


def write_checkpoint(client: redis.Redis, owner: str, saved: SavedCheckpoint) -> None:
    """Write the record of a checkpoint whose folder is on disk, or replace an older record."""
    for command in _writes(owner, saved):
        run_command(client, command)


def delete_checkpoint(client: redis.Redis, owner: str, path: CheckpointPath) -> None:
    """Delete a checkpoint; its folder is removed later. RunNotFoundError if there is none."""
    read_checkpoint(client, owner, path)
    due = essential_write("ZADD", EXPIRIES, 0, f"{owner} {path}")
    run_command(client, due)
    with translating():
        client.hdel(owner_keys(owner).checkpoints, str(path))
    # Again: a worker that still saw the record has postponed the removal of the folder.
    run_command(client, due)


def read_checkpoint(client: redis.Redis, owner: str, path: CheckpointPath) -> SavedCheckpoint:
    """Return the record of a checkpoint; RunNotFoundError if this owner has none."""
    now_ms = server_ms(client)
    with translating():
        stored = cast("bytes | None", client.hget(owner_keys(owner).checkpoints, str(path)))
    if stored is not None and not _is_expired(saved := _decode(stored), now_ms):
        return saved
    raise RunNotFoundError(f"there is no checkpoint {str(path)!r} of this key")


def read_shared(client: redis.Redis, owner: str, path: CheckpointPath) -> SavedCheckpoint:
    """Return a checkpoint of an owner, or a published one; RunNotFoundError if there is none."""
    try:
        return read_checkpoint(client, owner, path)
    except RunNotFoundError:
        with translating():
            other = cast(Any, client.hget(model_keys(path.model_id).model, "owner"))
        saved = None if other is None else read_checkpoint(client, json.loads(other), path)
        if saved is None or not saved.public:
            raise
        return saved


def checkpoints_of(
    client: redis.Redis, owner: str, *, model_id: str | None = None
) -> list[SavedCheckpoint]:
    """Return the checkpoints of an owner, or of one model, the oldest first."""
    now_ms = server_ms(client)
    with translating():
        stored = cast("dict[bytes, bytes]", client.hgetall(owner_keys(owner).checkpoints))
    every = [_decode(each) for each in stored.values()]
    own = [
        each
        for each in every
        if model_id in (None, each.path.model_id) and not _is_expired(each, now_ms)
    ]
    return sorted(own, key=lambda each: (each.created_ms, each.path))


def due_folders(client: redis.Redis) -> list[tuple[str, PurePosixPath]]:
    """Return what a worker has to remove now: entries for `folder_removed`, and their folders.

    The records of expired checkpoints are deleted by this call.
    """
    now_ms = server_ms(client)
    with translating():
        entries = cast("list[bytes]", client.zrangebyscore(EXPIRIES, 0, now_ms))
    due: list[tuple[str, PurePosixPath]] = []
    for entry in entries:
        owner, path = _parse_entry(entry.decode())
        with translating():
            stored = cast("bytes | None", client.hget(owner_keys(owner).checkpoints, str(path)))
            if stored is not None and not _is_expired(saved := _decode(stored), now_ms):
                # Saved again under this name, or the expiry has changed.
                run_command(client, _expiry(owner, saved))
                continue
        key = owner_keys(owner).checkpoints
        if run_command(client, _DROP([key], str(path), stored or b"")):
            due.append((entry.decode(), folder_of(path)))
    return due


def folder_removed(client: redis.Redis, entry: str) -> None:
    """Record that the folder of an entry of `due_folders` is gone."""
    with translating():
        client.zrem(EXPIRIES, entry)


def _writes(owner: str, saved: SavedCheckpoint) -> tuple[Command, Command]:
    """Return the writes of a record and its expiry: a record without its expiry would stay."""
    record = essential_write("HSET", owner_keys(owner).checkpoints, *_field(saved))
    expiry = _expiry(owner, saved)
    return (record, expiry) if saved.expires_ms is None else (expiry, record)


def _expiry(owner: str, saved: SavedCheckpoint) -> Command:
    entry = f"{owner} {saved.path}"
    if saved.expires_ms is None:
        return essential_write("ZREM", EXPIRIES, entry)
    return essential_write("ZADD", EXPIRIES, saved.expires_ms, entry)


def _field(saved: SavedCheckpoint) -> tuple[str, str]:
    values = {**saved._asdict(), "path": str(saved.path)}
    return str(saved.path), json.dumps(values, sort_keys=True)


def _decode(stored: bytes) -> SavedCheckpoint:
    values = json.loads(stored)
    return SavedCheckpoint(**{**values, "path": CheckpointPath.parse(values["path"])})


def _is_expired(saved: SavedCheckpoint, now_ms: int) -> bool:
    return saved.expires_ms is not None and saved.expires_ms <= now_ms


def _parse_entry(entry: str) -> tuple[str, CheckpointPath]:
    owner, _, path = entry.partition(" ")
    return owner, CheckpointPath.parse(path)


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
