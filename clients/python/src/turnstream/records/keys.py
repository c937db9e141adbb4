"""The parts that events and manifests have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from turnstream.errors import CorruptRecordError
from turnstream.types import Status, TrajectoryKey
from turnstream.wire.v1 import records_pb2 as wire

_STATUSES: Final = {status.value: status for status in Status}


class _HasKey(Protocol):
    @property
    def key(self) -> wire.TrajectoryKey: ...


def encode_key(key: TrajectoryKey) -> wire.TrajectoryKey:
    """A trajectory's key as a message."""
    return wire.TrajectoryKey(group_id=key.group_id, sample=key.sample, attempt=key.attempt)


def decode_key(message: _HasKey) -> TrajectoryKey:
    """The key of a message that has one.

    Raises:
        CorruptRecordError: it names no group.
    """
    return decode_trajectory_key(message.key)


def decode_trajectory_key(message: wire.TrajectoryKey) -> TrajectoryKey:
    """The key that a message is.

    Raises:
        CorruptRecordError: it names no group.
    """
    if not message.group_id:
        raise CorruptRecordError("a trajectory without a group")
    return TrajectoryKey(message.group_id, message.sample, message.attempt)


def decode_status(text: str) -> Status:
    """The status of that name.

    Raises:
        CorruptRecordError: there is none.
    """
    status = _STATUSES.get(text)
    if status is None:
        raise CorruptRecordError(f"{text!r} is no status of a trajectory")
    return status


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same, in order of name: maps of a message have no order of their own."""
    return dict(sorted(values.items())) if values else {}
