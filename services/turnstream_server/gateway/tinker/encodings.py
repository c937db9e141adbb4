"""Content types of the SDK, and answers in each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from turnstream.errors import BatchingError

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

_SLICE: Final = 1_024
"""Values that are encoded at once, in about 0.5 ms. The encoder keeps the interpreter lock."""


class Encoded(NamedTuple):
    """The body of an answer, and its Content-Type."""

    body: bytes
    content_type: str


def media_type_of(content_type: str) -> str:
    """Return the media type in a Content-Type header, without parameters such as a charset."""
    return content_type.partition(";")[0].strip().lower()


def accepts_protobuf(accept: str) -> bool:
    """Return whether an Accept header names protobuf; the SDK sends it since 0.18."""
    return PROTOBUF in accept.lower()


def as_proto(message: Message) -> Encoded:
    """Return an answer in protobuf."""
    return Encoded(message.SerializeToString(deterministic=True), PROTOBUF)


def as_json(content: Mapping[str, Any]) -> Encoded:
    """Return an answer in JSON; BatchingError for a number that is not finite.

    In a thread it lets other threads run between its slices. Flat arrays, lists of small values,
    and iterators of further parts may be long.

    >>> as_json({"a": np.array([1, 2]), "b": iter([None, [0.5]])}).body
    b'{"a": [1, 2], "b": [null, [0.5]]}'
    """
    try:
        return Encoded("".join(_parts(content)).encode(), JSON)
    except ValueError as error:
        message = "a number of the result is not finite, which JSON cannot carry"
        raise BatchingError(message) from error


def _parts(content: object) -> Iterator[str]:
    """Yield the text of `json.dumps`, in parts."""
    if isinstance(content, Mapping):
        start = "{"
        for name, value in cast("Mapping[str, object]", content).items():
            yield f"{start}{json.dumps(name)}: "
            yield from _parts(value)
            start = ", "
        yield "}" if start == ", " else "{}"
    elif isinstance(content, Iterator):
        start = "["
        for value in cast("Iterator[object]", content):
            yield start
            yield from _parts(value)
            start = ", "
        yield "]" if start == ", " else "[]"
    elif isinstance(content, list | np.ndarray):
        values = cast("list[object] | NDArray[Any]", content)
        yield "["
        for first in range(0, len(values), _SLICE):
            part = values[first : first + _SLICE]
            listed = part if isinstance(part, list) else part.tolist()
            yield (", " if first else "") + json.dumps(listed, allow_nan=False)[1:-1]
        yield "]"
    else:
        yield json.dumps(content, allow_nan=False)
