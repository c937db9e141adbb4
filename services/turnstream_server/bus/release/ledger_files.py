"""Compact records of old batches, in files of the archive folder.

A file is on disk, whole and under its name, before the store deletes its records. It never changes,
and its name has its steps and the hash of its content. If a leader dies in between, the next one
writes the same file again.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis
import redis.asyncio

from turnstream.errors import RejectedError
from turnstream.records.compact import decode_ledger_file, encode_ledger_file
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream_server.bus.core.scan import hash_fields
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

MAX_FILE_BATCHES: Final = 256
"""Batches of one file. It is read whole to find one of them: some hundreds of kilobytes."""

_MOVE = LeaderScript("move_to_file", "release", "frontier past cold")
_RANGE: Final = re.compile(r"ledger-([0-9]+)-([0-9]+)-")


class LedgerFileError(RejectedError):
    """The requested record is in a missing file of the archive folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFolder:
    """The archive folder, and the number of newest batches whose records stay in the store."""

    folder: Path
    hot_batches: int

    @property
    def file_batches(self) -> int:
        """Number of batches in one file; the store holds up to as many more than `hot_batches`."""
        return min(self.hot_batches, MAX_FILE_BATCHES)

    def next_steps(self, *, cold: int, folded: int) -> range:
        """Return the steps of the next file; none until all of them are old enough.

        >>> LedgerFolder(folder=Path("archive"), hot_batches=2).next_steps(cold=2, folded=6)
        range(3, 5)
        """
        last = cold + self.file_batches
        return range(cold + 1, last + 1 if last <= folded - self.hot_batches else cold + 1)


async def read_hot_records(
    client: redis.asyncio.Redis, run: str, steps: range
) -> list[bytes] | None:
    """Return the stored compact records of these steps, or None if one is missing."""
    past = keys.run_keys(run).past
    with translating():
        records: Any = await client.execute_command("HMGET", past, *steps)
    return None if None in records else records


def write_ledger_file(folder: Path, run: str, steps: range, records: Sequence[bytes]) -> str:
    """Write the records of these steps to a file, fsync it and return its name in the folder."""
    content = encode_ledger_file(records)
    digest = hashlib.sha256(content).hexdigest()[:12]
    file_name = f"ledger-{steps[0]:08d}-{steps[-1]:08d}-{digest}.bin"
    path = folder / keys.encode_name(run) / file_name
    write_durably(path, content)
    return f"{path.parent.name}/{file_name}"


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a file that appears whole or not at all, and is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    for changed in (path.parent, path.parent.parent):
        _sync_folder(changed)


async def move_to_file(term: Term, steps: range, *, name: str) -> None:
    """Delete the stored records of steps that are in the file of this name."""
    await _MOVE.run(term, steps[0], steps[-1], name)


def read_cold_record(
    client: redis.Redis, run: str, step: int, *, folder: Path | None
) -> bytes | None:
    """Return the compact record of a step from its file, or None if no file has it."""
    for last, name in _files(client, run):
        if last >= step:
            index = step - _first_step(name)
            return _read_file(folder, run, name)[index] if index >= 0 else None
    return None


def cold_records(client: redis.Redis, run: str, *, folder: Path | None) -> Iterator[bytes]:
    """Yield all compact records of files, the oldest first."""
    before = 0
    for last, name in _files(client, run):
        first = _first_step(name)
        start = max(first, before + 1)
        yield from _read_file(folder, run, name)[start - first : last + 1 - first]
        before = last


def _files(client: redis.Redis, run: str) -> list[tuple[int, str]]:
    """Return the last step and the name of each file, in order."""
    key = keys.run_keys(run).cold
    files: list[tuple[int, str]] = []
    for last, name in hash_fields(client, key):
        with reading(key, last):
            text = name.decode()
            _first_step(text)
            files.append((parsed_number(last.encode()), text))
    return sorted(files)


def _first_step(name: str) -> int:
    """Return the first step of a file.

    >>> _first_step("maze/ledger-00000257-00000512-0a1b2c3d4e5f.bin")
    257
    """
    match = _RANGE.search(name)
    if match is None:
        raise ValueError(f"{name!r} names no steps")
    return int(match[1])


def _read_file(folder: Path | None, run: str, name: str) -> list[bytes]:
    if folder is None:
        raise LedgerFileError(
            f"run {run!r}: the record is in {name}; name the archive folder in "
            "TURNSTREAM_ARCHIVE_DIR"
        )
    try:
        return decode_ledger_file((folder / name).read_bytes())
    except FileNotFoundError as error:
        raise LedgerFileError(f"run {run!r}: the record is in {name}: {error}") from error


def _sync_folder(path: Path) -> None:
    """Fsync the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
