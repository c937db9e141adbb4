"""What is left of trajectories that are over: their names for ever, in a byte or two each.

Columns of varints, compressed (zlib), behind the usual frame; what does not compress, the CRCs and
ids in reasons, is the frame's array. Names that count up cost next to nothing::

    maze-17  maze-18  maze-21     template "maze-", numbers 17 +1 +3

A random name costs what is random in it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from turnstream.batching.merge.plan import Manifest
from turnstream.errors import CorruptRecordError
from turnstream.records.columns import ColumnReader, ColumnWriter
from turnstream.records.framing import COMPACT, ENDS, read_frame, write_frame
from turnstream.records.reasons import brief, read_reasons, write_reasons
from turnstream.types import TrajectoryKey

_LAST_NUMBER: Final = re.compile(r"(.*?)([0-9]{1,15})([^0-9]*)", re.DOTALL)
_NO_NUMBER: Final = 0
_PLAIN: Final = 1
"""Kinds of a template; from 2 on the number is padded with zeros to (kind - 1) digits."""

_NEXT: Final = 0
"""The next reason of the table; from 1 on, the one of that number again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactBatch:
    """A batch that is over.

    Attributes:
        manifest_hash: hex SHA-256, its name in the chain.
        trajectories: all of them, in the order of the batch.
        crcs: one per trajectory, see `trajectory_crc`.
    """

    step: int
    manifest_hash: str
    lineage: str
    trajectories: tuple[TrajectoryKey, ...]
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactEnds:
    """Trajectories that ended untrained.

    Attributes:
        trajectories: some of them.
        ends: of each, "<state>:<reason>".
    """

    trajectories: tuple[TrajectoryKey, ...]
    ends: tuple[str, ...]


def compact_batch(manifest: Manifest, *, manifest_hash: str) -> CompactBatch:
    """What is to be left of a batch."""
    members = [member for group in manifest.groups for member in group.trajectories]
    return CompactBatch(
        step=manifest.step,
        manifest_hash=manifest_hash,
        lineage=manifest.lineage,
        trajectories=tuple(member.key for member in members),
        crcs=tuple(trajectory_crc(member.payload_crcs) for member in members),
    )


def compact_ends(ends: Mapping[TrajectoryKey, str]) -> CompactEnds:
    """What is to be left of ended trajectories: of ids in their reasons, the beginning."""
    return CompactEnds(trajectories=tuple(ends), ends=tuple(map(brief, ends.values())))


def trajectory_crc(payload_crcs: Sequence[int]) -> int:
    """One CRC-32 of the CRCs of all turns, each as four little-endian bytes."""
    return zlib.crc32(struct.pack(f"<{len(payload_crcs)}I", *payload_crcs))


def encode_batch(batch: CompactBatch) -> bytes:
    """The record of a batch that is over; the same batch always gives the same bytes."""
    columns = ColumnWriter()
    columns.number(batch.step)
    columns.text(batch.manifest_hash)
    columns.text(batch.lineage)
    _write_keys(columns, batch.trajectories)
    return _frame(columns, np.array(batch.crcs, "<u4"))


def decode_batch(record: bytes) -> CompactBatch:
    """The batch of a record.

    Raises:
        CorruptRecordError: the bytes are damaged or contradict themselves.
        UnknownFormatError: another release wrote it.
    """
    columns, crcs = _unframe(record)
    step, manifest_hash, lineage = columns.number(), columns.text(), columns.text()
    keys = _read_keys(columns)
    if len(keys) != len(crcs):
        raise CorruptRecordError(f"{len(keys)} trajectories of step {step} have {len(crcs)} CRCs")
    return CompactBatch(
        step=step, manifest_hash=manifest_hash, lineage=lineage, trajectories=keys, crcs=crcs
    )


def encode_ends(ended: CompactEnds) -> bytes:
    """The record of ended trajectories; those of a group must stand together."""
    columns = ColumnWriter()
    _write_keys(columns, ended.trajectories)
    table = {end: index for index, end in enumerate(dict.fromkeys(ended.ends))}
    array = write_reasons(columns, [*table])
    num_seen = 0
    for end in ended.ends:
        is_new = table[end] == num_seen
        columns.number(_NEXT if is_new else table[end] + 1)
        num_seen += is_new
    return _frame(columns, np.array(array, "<u4"), kind=ENDS)


def decode_ends(record: bytes) -> CompactEnds:
    """Return the trajectories of a record.

    Raises:
        CorruptRecordError: the bytes are damaged or contradict themselves.
        UnknownFormatError: another release wrote it.
    """
    columns, array = _unframe(record, kind=ENDS)
    keys = _read_keys(columns)
    table = read_reasons(columns, array)
    num_seen = 0
    indices: list[int] = []
    for _ in keys:
        number = columns.number()
        indices.append(num_seen if number == _NEXT else number - 1)
        num_seen += number == _NEXT
    return CompactEnds(trajectories=keys, ends=_looked_up(table, indices))


def _looked_up(table: Sequence[str], indices: Iterable[int]) -> tuple[str, ...]:
    try:
        return tuple([table[index] for index in indices])
    except IndexError as error:
        raise CorruptRecordError("a compact record names a reason that it lacks") from error


class _Template(NamedTuple):
    """A name without its last number, and how that is written."""

    kind: int
    prefix: str
    suffix: str

    def name(self, number: int) -> str:
        if self.kind == _NO_NUMBER:
            return self.prefix
        return f"{self.prefix}{number:0{max(self.kind - 1, 1)}d}{self.suffix}"


def _take_apart(name: str) -> tuple[_Template, int]:
    """Template and number of a name.

    The last number of "a7-b08" is "08": template "a7-b" + two digits.
    """
    match = _LAST_NUMBER.fullmatch(name)
    if match is None:
        return _Template(_NO_NUMBER, name, ""), 0
    prefix, digits, suffix = match.groups()
    is_padded = len(digits) > 1 and digits[0] == "0"
    return _Template(1 + len(digits) if is_padded else _PLAIN, prefix, suffix), int(digits)


def _write_keys(columns: ColumnWriter, keys: Iterable[TrajectoryKey]) -> None:
    groups = [(name, list(members)) for name, members in groupby(keys, key=lambda key: key[0])]
    parts = [_take_apart(name) for name, _ in groups]
    table = {template: index for index, template in enumerate(dict.fromkeys(t for t, _ in parts))}
    columns.number(len(table))
    for template in table:
        columns.number(template.kind)
        columns.text(template.prefix)
        columns.text(template.suffix)
    columns.number(len(groups))
    for template, _ in parts:
        columns.number(table[template])
    last = dict.fromkeys(table, 0)
    for template, number in parts:
        columns.difference(number - last[template])
        last[template] = number
    for _, members in groups:
        _write_members(columns, members)


def _write_members(columns: ColumnWriter, members: Sequence[TrajectoryKey]) -> None:
    """One number where they are the first attempts of samples 0, 1, ..., as nearly always."""
    is_plain = all(key[1:] == (index, 0) for index, key in enumerate(members))
    columns.number(len(members) * 2 + (not is_plain))
    if not is_plain:
        for key in members:
            columns.number(key.sample)
            columns.number(key.attempt)


def _read_keys(columns: ColumnReader) -> tuple[TrajectoryKey, ...]:
    table = [
        _Template(columns.number(), columns.text(), columns.text()) for _ in range(columns.number())
    ]
    indices = [columns.number() for _ in range(columns.number())]
    last = [0] * len(table)
    names: list[str] = []
    for index in indices:
        if index >= len(table):
            raise CorruptRecordError("a compact record names a template that it lacks")
        last[index] += columns.difference()
        names.append(table[index].name(last[index]))
    return tuple([key for name in names for key in _read_members(columns, name)])


def _read_members(columns: ColumnReader, group_id: str) -> list[TrajectoryKey]:
    num_members, is_listed = divmod(columns.number(), 2)
    if not is_listed:
        return [TrajectoryKey(group_id, sample) for sample in range(num_members)]
    return [TrajectoryKey(group_id, columns.number(), columns.number()) for _ in range(num_members)]


def _frame(
    columns: ColumnWriter,
    array: np.ndarray[tuple[int], np.dtype[np.uint32]],
    *,
    kind: bytes = COMPACT,
) -> bytes:
    return write_frame(kind, zlib.compress(bytes(columns.data), 6), [array])


def _unframe(record: bytes, *, kind: bytes = COMPACT) -> tuple[ColumnReader, tuple[int, ...]]:
    frame = read_frame(record, kind=kind)
    if (frame.body_stop - frame.body_start) % 4:
        raise CorruptRecordError("the array of a compact record is cut short")
    try:
        columns = zlib.decompress(frame.header)
    except zlib.error as error:
        raise CorruptRecordError(f"a compact record does not unpack: {error}") from error
    array = np.frombuffer(record[frame.body_start : frame.body_stop], "<u4")
    return ColumnReader(columns), tuple(array.tolist())
