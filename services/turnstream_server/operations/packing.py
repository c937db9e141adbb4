"""A JSON header and arrays as one block of bytes; arrays are views when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
