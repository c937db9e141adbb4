"""Turns and trajectories as an Arrow IPC stream: one row per turn, tokens as views of its buffers.

The columns are listed in docs/http.md. Token columns never become Python objects.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from numpy.typing import NDArray

from turnstream.errors import InvalidTurnError, RecordError
from turnstream.types import TrajectoryKey
from turnstream.types.names import quoted
from turnstream_server.gateway.rest.bodies import MAX_TURNS, MAX_WRITES
from turnstream_server.gateway.rest.ingest.arrow_columns import (
    COLUMNS,
    EXTRA,
    GROUP_COLUMNS,
    OF_SEALS,
    REQUIRED,
    REQUIRED_OF_GROUPS,
    REQUIRED_OF_TURNS,
    TURN_COLUMNS,
    Kind,
    check_schema,
)
from turnstream_server.gateway.rest.ingest.writes import (
    Fields,
    Opening,
    Seal,
    Write,
    WrittenTurn,
    check_num_members,
    checked_items,
    group_of,
    key_of,
    named_fields,
    opening_of,
    seal_of,
    turn_of,
)

_END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_VALUES: Final = 1 << 23
"""Numbers in the lists of one request: narrow types are widened to 4 bytes."""

MAX_PARTS: Final = 1 << 17
"""Parts of version_runs, and entries of maps, of one request. Each becomes a Python object."""

_MAX_METADATA_BYTES: Final = 256 << 10
_MAPS: Final = ("reward_components", "sampling", "tags", "metrics")


class _Row(NamedTuple):
    """One row of a stream: its place, and a value per column that it has."""

    number: int
    values: dict[str, Any]


def parse_trajectories(body: bytes) -> list[Write]:
    """Return a write per trajectory, in the order of their first rows.

    A trajectory's turns are its rows, in order. The fields of its group and of its seal are those
    of its last row. RecordError for a damaged or compressed stream. InvalidTurnError names a wrong
    column, or a row and its value, as in `rows.3.logprobs`.
    """
    members: dict[TrajectoryKey, list[_Row]] = {}
    for row in _rows(body, COLUMNS, required=REQUIRED, most=MAX_TURNS):
        with named_fields("rows", row.number):
            members.setdefault(key_of(row.values), []).append(row)
    _check_count("trajectories", len(members), most=MAX_WRITES)
    return [_write(item, key, rows) for item, (key, rows) in enumerate(members.items())]


def parse_turns(body: bytes) -> list[Write]:
    """Return a write per row: one turn, and the end of its trajectory where `seal` is true."""
    rows = _rows(body, TURN_COLUMNS, required=REQUIRED_OF_TURNS)
    return checked_items(rows, _turn_write, place="rows")


def parse_groups(body: bytes) -> list[Opening]:
    """Return a group to open per row."""
    rows = [*_rows(body, GROUP_COLUMNS, required=REQUIRED_OF_GROUPS)]
    check_num_members(values for _, values in rows)
    return checked_items(rows, lambda _, values: opening_of(values), place="rows")


def _write(item: int, key: TrajectoryKey, rows: Sequence[_Row]) -> Write:
    turns = checked_items(rows, lambda _, values: _turn(values), place="rows")
    number, values = rows[-1]
    with named_fields("rows", number):
        group, seal = group_of(values), _seal(values)
    return Write(item=item, key=key, group=group, first=0, turns=turns, seal=seal)


def _turn_write(item: int, values: Fields) -> Write:
    key = key_of(values)
    if values["turn"] < 0:
        raise InvalidTurnError("turn", f"expected at least 0, got {values['turn']}")
    if not values.get("seal"):
        present = [name for name in OF_SEALS if values.get(name) is not None]
        if present:
            raise InvalidTurnError("seal", f"is not true, and the row has {', '.join(present)}")
    return Write(
        item=item,
        key=key,
        group=None if values.get("num_samples") is None else group_of(values),
        first=values["turn"],
        turns=[_turn(values)],
        seal=_seal(values) if values.get("seal") else None,
    )


def _seal(values: Fields) -> Seal:
    maps = {name: values[name] for name in _MAPS if values.get(name) is not None}
    pairs = {name: _mapping(each, field=name) for name, each in maps.items()}
    return seal_of({**values, **pairs})


def _turn(values: Fields) -> WrittenTurn:
    extras = {
        name.removeprefix(EXTRA): value
        for name, value in values.items()
        if name.startswith(EXTRA) and value is not None
    }
    return turn_of({**values, "reward": values.get("turn_reward")}, extras=extras or None)


def _mapping(pairs: Sequence[tuple[str, Any]], *, field: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidTurnError(field, f"has a name twice: {quoted([name for name, _ in pairs])}")
    return found


def _rows(
    body: bytes, columns: Mapping[str, Kind], *, required: Sequence[str], most: int = MAX_WRITES
) -> Iterator[_Row]:
    numbers = itertools.count()
    try:
        for batch in _batches(body, columns, required=required, most=most):
            names = batch.schema.names
            found = [_values(batch.column(name), name=name) for name in names]
            for values in zip(*found, strict=True):
                row = _Row(next(numbers), dict(zip(names, values, strict=True)))
                row.values["purpose"] = row.values.get("purpose") or None  # "" is no purpose
                for name in required:
                    if row.values[name] is None:
                        raise InvalidTurnError(f"rows.{row.number}.{name}", "is null")
                yield row
    except UnicodeDecodeError as error:
        raise RecordError(f"the body has a text that is not UTF-8: {error}") from error


def _batches(
    body: bytes, columns: Mapping[str, Kind], *, required: Sequence[str], most: int
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream, each with checked types and offsets."""
    if not body.endswith(_END_OF_STREAM):
        raise RecordError("the body is no Arrow IPC stream, or is cut off: it has no end marker")
    buffer = pa.py_buffer(body)
    try:
        _check_messages(buffer)
        with pa.ipc.open_stream(buffer) as reader:
            check_schema(reader.schema, columns, required=required)
            num_rows = num_values = num_parts = 0
            for batch in reader:
                num_rows += batch.num_rows
                _check_count("turns or groups", num_rows, most=most)
                batch.validate(full=True)
                num_values += sum(map(_num_values, batch.columns))
                num_parts += sum(map(_num_parts, batch.columns))
                _check_count("numbers in lists", num_values, most=MAX_VALUES)
                _check_count("version_runs and entries of maps", num_parts, most=MAX_PARTS)
                yield batch
    except (pa.ArrowException, OSError, EOFError, struct.error) as error:
        raise RecordError(f"the body is no Arrow IPC stream: {error}") from error


def _values(column: Any, *, name: str) -> Sequence[Any]:
    """Return a value per row: arrays of a list of numbers, else Python objects."""
    if not _has_numbers(column.type):
        return column.to_pylist()
    if column.values.null_count:
        raise InvalidTurnError(f"column {name}", "has a null inside a list, expected numbers")
    return _views(column)


def _views(column: Any) -> list[NDArray[Any] | None]:
    """Return the lists of a column as views of its values; None for a null."""
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    views: list[NDArray[Any] | None] = [
        values[start:stop] for start, stop in itertools.pairwise(offsets.tolist())
    ]
    if column.null_count:
        is_valid = column.is_valid().to_numpy(zero_copy_only=False)
        views = [view if valid else None for view, valid in zip(views, is_valid, strict=True)]
    return views


def _check_count(what: str, count: int, *, most: int) -> None:
    if count > most:
        raise InvalidTurnError("rows", f"{count} {what}, more than {most}: send less at once")


def _num_values(column: Any) -> int:
    """Return the numbers in the lists of a column; 0 for a column without such lists."""
    return len(column.values) if _has_numbers(column.type) else 0


def _num_parts(column: Any) -> int:
    """Return the structs and entries in a column, which become Python objects."""
    is_nested = pa.types.is_nested(column.type) and not _has_numbers(column.type)
    return len(column.values) if is_nested else 0


def _has_numbers(kind: pa.DataType) -> bool:
    """Return whether a type is a list of numbers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and not pa.types.is_struct(kind.value_type)


def _check_messages(buffer: pa.Buffer) -> None:
    """Refuse a stream with too many messages or a large schema, before anything is built.

    Compressed buffers are refused: they may claim any size, and pyarrow has no limit.
    Content-Encoding compresses a body within a limit.
    """
    for number, message in enumerate(pa.ipc.MessageReader.open_stream(buffer)):
        if number > MAX_TURNS or len(message.metadata) > _MAX_METADATA_BYTES:
            raise RecordError(
                f"the Arrow stream has more than {MAX_TURNS} batches, or one whose description has "
                f"more than {_MAX_METADATA_BYTES} bytes"
            )
        if message.type == "record batch" and _is_compressed(message.metadata.to_pybytes()):
            raise RecordError(
                "the Arrow stream has compressed buffers: write it without compression, and "
                "compress the whole body with Content-Encoding"
            )


def _is_compressed(metadata: bytes) -> bool:
    """Return whether the flatbuffer `Message` of a record batch names a codec for its buffers."""
    message = struct.unpack_from("<I", metadata)[0]
    header = _field(metadata, message, 2)
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _field(metadata, batch, 3) != 0


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer table; 0 where it is not set."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    place = 4 + 2 * number
    if place >= struct.unpack_from("<H", metadata, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", metadata, vtable + place)[0]
    return table + offset if offset else 0
