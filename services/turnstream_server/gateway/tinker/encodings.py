"""Content types of the SDK, and answers in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from turnstream.errors import BatchingError

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"


class Encoded(NamedTuple):
    """The body of an answer, and its Content-Type."""

    body: bytes
    content_type: str


def accepts_protobuf(accept: str) -> bool:
    """Return whether an Accept header names protobuf; the SDK sends it since 0.18.

    >>> accepts_protobuf("application/x-protobuf, application/json"), accepts_protobuf("*/*")
    (True, False)
    """
    return PROTOBUF in accept.lower()


def as_proto(message: Message) -> Encoded:
    """Return an answer in protobuf."""
    return Encoded(message.SerializeToString(deterministic=True), PROTOBUF)


def as_json(content: Mapping[str, Any]) -> Encoded:
    """Return an answer in JSON.

    Raises:
        BatchingError: a number is not finite.
    """
    try:
        return Encoded(json.dumps(content, allow_nan=False).encode(), JSON)
    except ValueError as error:
        message = "a number of the result is not finite, which JSON cannot carry"
        raise BatchingError(message) from error
