"""Compact records of old batches, in files of the archive folder.

The file is on disk, whole and under its name, before the store forgets what is in it. It never
changes, and its name says what it holds: a leader that dies in between is followed by one that
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
from redis.exceptions import RedisError

from turnstream.errors import RejectedError
from turnstream.records.ledger_files import decode_ledger_file, encode_ledger_file
from turnstream.store import keys
from turnstream.store.replies import translate
from turnstream.store.scripts import Script, run_command_async
from turnstream.store.stored import parsed_number, reading
from turnstream_server.bus.leadership import Term
from turnstream_server.bus.pages import hash_fields

MAX_FILE_BATCHES: Final = 256
"""Batches of one file: read whole to find one of them, some hundreds of kilobytes."""

_MOVE = Script("move_to_file", "turnstream_server.bus")
_RANGE: Final = re.compile(r"ledger-([0-9]+)-([0-9]+)-")


class LedgerFileError(RejectedError):
    """What is asked for is in a file of the archive folder, which is not at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFolder:
    """Where compact records go, and when.

    Attributes:
        folder: the archive folder.
        hot_batches: the newest ones stay in the store.
    """

    folder: Path
    hot_batches: int

    @property
    def file_batches(self) -> int:
        """Batches of one file; so many more than `hot_batches` may wait in the store."""
        return min(self.hot_batches, MAX_FILE_BATCHES)

    def next_steps(self, *, cold: int, folded: int) -> range:
        """The steps of the next file; none while they are hot.

        >>> LedgerFolder(folder=Path("archive"), hot_batches=2).next_steps(cold=2, folded=6)
        range(3, 5)
        """
        last = cold + self.file_batches
        return range(cold + 1, last + 1 if last <= folded - self.hot_batches else cold + 1)


async def read_hot_records(
    client: redis.asyncio.Redis, run: str, steps: range
) -> list[bytes] | None:
    """The compact records of these steps; None where one of them is not there (yet).

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    past = keys.run_keys(run).past
    try:
        records: Any = await client.execute_command("HMGET", past, *steps)
    except (RedisError, OSError) as error:
        raise translate(error) from error
    return None if None in records else records


def write_ledger_file(folder: Path, run: str, steps: range, records: Sequence[bytes]) -> str:
    """Write the records of these steps to a file; its name in the folder, once it is on disk.

    Raises:
        OSError: the file cannot be written.
    """
    content = encode_ledger_file(records)
    digest = hashlib.sha256(content).hexdigest()[:12]
    file_name = f"ledger-{steps[0]:08d}-{steps[-1]:08d}-{digest}.bin"
    path = folder / keys.encode_name(run) / file_name
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
    for changed in (path.parent, folder):
        _sync_folder(changed)
    return f"{path.parent.name}/{file_name}"


async def move_to_file(term: Term, steps: range, *, name: str) -> None:
    """Forget the records of steps that are in the file of this name.

    Raises:
        FencedError: another planner leads the run.
        ConflictError: the steps are not the next ones.
        StoreUnavailableError: the store cannot be reached.
    """
    names = keys.run_keys(term.run)
    where = (names.leader, names.frontier, names.past, names.cold)
    await run_command_async(term.client, _MOVE(where, term.epoch, steps[0], steps[-1], name))


def read_cold_record(
    client: redis.Redis, run: str, step: int, *, folder: Path | None
) -> bytes | None:
    """The compact record of a step that is in a file; None where it is in none.

    Raises:
        LedgerFileError: the file is not at hand.
        CorruptRecordError: it is damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    for last, name in _files(client, run):
        if last >= step:
            index = step - _first_step(name)
            return _read_file(folder, run, name)[index] if index >= 0 else None
    return None


def cold_records(client: redis.Redis, run: str, *, folder: Path | None) -> Iterator[bytes]:
    """All compact records that are in files, the oldest first.

    Raises:
        LedgerFileError: a file is not at hand.
        CorruptRecordError: one is damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    before = 0
    for last, name in _files(client, run):
        first = _first_step(name)
        yield from _read_file(folder, run, name)[before + 1 - first : last + 1 - first]
        before = last


def _files(client: redis.Redis, run: str) -> list[tuple[int, str]]:
    """(last step, name), in order."""
    key = keys.run_keys(run).cold
    files: list[tuple[int, str]] = []
    for last, name in hash_fields(client, key):
        with reading(key, last):
            text = name.decode()
            _first_step(text)
            files.append((parsed_number(last.encode()), text))
    return sorted(files)


def files_up_to(client: redis.Redis, run: str, step: int) -> dict[int, str]:
    """The files of the batches up to a step: the newest such step in it -> the name of each.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    files = _files(client, run)
    return {min(last, step): name for last, name in files if _first_step(name) <= step}


def _first_step(name: str) -> int:
    """The first step of a file.

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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the name, too, is on disk
    finally:
        os.close(descriptor)
