"""Arrays and a JSON header as one block of bytes: the format of training calls and results.

An operation is the content of a training call. Arrays are views when a block is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.rows.operations import Datum, Operation

_LENGTH_BYTES: Final = 4


class Packed(NamedTuple):
    """A header, and arrays in their order."""

    header: dict[str, Any]
    arrays: list[NDArray[Any]]


def pack(header: Mapping[str, Any], arrays: Iterable[NDArray[Any]]) -> bytes:
    """Return a header that JSON can hold (with NaN and infinity), and little-endian arrays.

    >>> unpack(pack({"a": 1}, [np.array([2], np.int32)]))
    Packed(header={'a': 1}, arrays=[array([2], dtype=int32)])
    """
    own = [np.ascontiguousarray(each, each.dtype.newbyteorder("<")) for each in arrays]
    shapes = [[each.dtype.str, list(each.shape)] for each in own]
    text = json.dumps([header, shapes], separators=(",", ":"), sort_keys=True).encode()
    parts = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
    return b"".join([*parts, *(each.data.cast("B") if each.size else b"" for each in own)])


def unpack(data: bytes | memoryview) -> Packed:
    """Return the parts of a block of `pack`."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header, shapes = json.loads(bytes(data[_LENGTH_BYTES:start]))
    arrays: list[NDArray[Any]] = []
    for dtype, shape in shapes:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, dtype, count, start) if count else np.empty(0, dtype)
        arrays.append(array.reshape(shape))
        start += array.nbytes
    return Packed(header, arrays)


_FORMAT: Final = 1
_COLUMNS: Final = (
    "model_input",
    "target_tokens",
    "weights",
    "logprobs",
    "advantages",
    "sequence_ratio_mask",
)


def encode_operation(operation: Operation) -> bytes:
    """Return an operation as bytes, without its request id; equal operations have equal bytes."""
    present = {
        name: [place for place, each in enumerate(operation.data) if _of(each, name) is not None]
        for name in _COLUMNS
    }
    columns = {
        name: _joined([_of(operation.data[place], name) for place in places])
        for name, places in present.items()
        if places
    }
    header = {
        "format": _FORMAT,
        "loss": operation.loss,
        "settings": dict(operation.settings),
        "lengths": [len(each.model_input) for each in operation.data],
        "columns": {name: present[name] for name in columns},
    }
    return pack(header, columns.values())


def decode_operation(data: bytes | memoryview, *, request_id: str) -> Operation:
    """Return the operation of `encode_operation`; its arrays are views."""
    header, arrays = unpack(data)
    lengths: Sequence[int] = header["lengths"]
    values: list[dict[str, NDArray[Any]]] = [{} for _ in lengths]
    columns: Mapping[str, Sequence[int]] = header["columns"]
    for (name, places), column in zip(_in_order(columns), arrays, strict=True):
        ends = np.cumsum([lengths[place] for place in places])
        for place, part in zip(places, np.split(column, ends[:-1]), strict=True):
            values[place][name] = part
    return Operation(
        request_id=request_id,
        loss=header["loss"],
        data=[Datum(**each) for each in values],  # pyright: ignore[reportArgumentType]
        settings=header["settings"],
    )


def _of(datum: Datum, name: str) -> Any:
    return getattr(datum, name)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _in_order(columns: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
    """Return the columns in the order of their arrays; JSON has sorted their names."""
    return [(name, columns[name]) for name in _COLUMNS if name in columns]
