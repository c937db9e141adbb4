"""Compact records of finished trajectories: in the store, and of old batches in ledger files.

A ledger file in the archive folder is on disk, whole and under its name, before the store deletes
its records. It never changes, and its name has its steps and the hash of its content. If a leader
dies in between, the next one writes the same file again.
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
from turnstream.records.compact import (
    CompactBatch,
    decode_batch,
    decode_ends,
    decode_ledger_file,
    encode_ledger_file,
)
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.types import TrajectoryKey
from turnstream.types.names import file_name
from turnstream_server.bus.core.scan import hash_fields
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.leadership.writes import read_facts, write_decision
from turnstream_server.bus.release.release_writes import move

MAX_FILE_BATCHES: Final = 256
"""Batches of one file. It is read whole to find one of them: some hundreds of kilobytes."""

_FIRST_STEP: Final = re.compile(r"ledger-([0-9]+)-[0-9]+-")


class LedgerFileError(RejectedError):
    """The requested record is in a missing file of the archive folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFolder:
    """The archive folder, and the number of newest batches whose records stay in the store."""

    folder: Path
    hot_batches: int

    def next_steps(self, *, cold: int, folded: int) -> range:
        """Return the steps of the next file; none until all of them are old enough.

        >>> LedgerFolder(folder=Path("archive"), hot_batches=2).next_steps(cold=2, folded=6)
        range(3, 5)
        """
        last = cold + min(self.hot_batches, MAX_FILE_BATCHES)
        return range(cold + 1, last + 1 if last <= folded - self.hot_batches else cold + 1)


def read_past_batch(
    client: redis.Redis, run: str, step: int, *, folder: Path | None = None
) -> CompactBatch | None:
    """Return the compact record of a step, from the store or a file of `folder`, or None."""
    past = keys.run_keys(run).past
    with reading(past), translating():
        record: Any = client.hget(past, str(step))
    if record is None:
        return next(_batches_of_files(client, run, folder=folder, step=step), None)
    with reading(past, str(step)):
        return decode_batch(record)


def find_past_step(
    client: redis.Redis, run: str, key: TrajectoryKey, *, folder: Path | None = None
) -> int | None:
    """Return the step whose compact record names a trajectory, or None; files are read last."""
    batches = past_batches(client, run, folder=folder)
    return next((batch.step for batch in batches if key in batch.trajectories), None)


def past_batches(
    client: redis.Redis, run: str, *, folder: Path | None = None
) -> Iterator[CompactBatch]:
    """Yield the released batches: first those of the store, then those of files of `folder`."""
    yield from _batches_of_store(client, run)
    yield from _batches_of_files(client, run, folder=folder)


def find_past_end(client: redis.Redis, run: str, key: TrajectoryKey) -> str | None:
    """Return "<state>:<reason>" of an untrained trajectory in a compact record, or None."""
    name = keys.run_keys(run).ended
    for number, record in hash_fields(client, name):
        with reading(name, number):
            end = decode_ends(record).get(key)
        if end is not None:
            return end
    return None


def past_reasons(client: redis.Redis, run: str) -> Iterator[tuple[str, int]]:
    """Yield "<state>:<reason>" and its number of untrained trajectories in compact records."""
    name = keys.run_keys(run).reasons
    for reason, number in hash_fields(client, name):
        with reading(name, reason):
            count = parsed_number(number)
        yield reason, count


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
    name = f"ledger-{steps[0]:08d}-{steps[-1]:08d}-{digest}.bin"
    path = folder / file_name(run) / name
    write_durably(path, content)
    return f"{path.parent.name}/{name}"


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
        descriptor = os.open(changed, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # keeps the names in the folder
        finally:
            os.close(descriptor)


async def move_to_file(term: Term, steps: range, *, name: str) -> None:
    """Delete the stored records of steps that are in the file of this name.

    Raises:
        ConflictError: the first step is not the next one, or the last one has no record.
        FencedError: another planner leads the run.
    """
    frontier = keys.run_keys(term.run).frontier

    async def read() -> Any:
        return (await read_facts(term, ("HMGET", frontier, "folded", "cold")))[0]

    await write_decision(
        term, read, lambda facts: move(steps, name, folded=facts[0], cold=facts[1])
    )


def _batches_of_store(client: redis.Redis, run: str) -> Iterator[CompactBatch]:
    past = keys.run_keys(run).past
    for step, record in hash_fields(client, past):
        with reading(past, step):
            batch = decode_batch(record)
        yield batch


def _batches_of_files(
    client: redis.Redis, run: str, *, folder: Path | None, step: int | None = None
) -> Iterator[CompactBatch]:
    """Yield the batches in files: all of them, or that of one step."""
    key = keys.run_keys(run).cold
    for last, value in hash_fields(client, key):
        with reading(key, last):
            name = value.decode()
            match = _FIRST_STEP.search(name)
            if match is None:
                raise ValueError(f"{name!r} names no steps")
            first = int(match[1])
            steps = range(first, parsed_number(last.encode()) + 1)
        wanted = steps if step is None else [step] if step in steps else []
        if wanted:
            records = _read_file(folder, run, name)
            yield from (decode_batch(records[each - first]) for each in wanted)


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
