"""The events of a run as records: the plan depends on them and on their order.

No plan can hold an event that exceeds the limits on its values.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast, get_args

from google.protobuf.message import DecodeError

from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records.framing import EVENT, MAJOR_VERSION, read_header, write_frame
from turnstream.records.values import read_value, to_message
from turnstream.types import (
    NO_PARENT,
    DeadlineFired,
    Event,
    GroupOpened,
    SealedTrajectory,
    Status,
    TrajectoryKey,
    TurnShape,
    VersionRun,
)
from turnstream.types.names import encode_name
from turnstream.wire.v1 import records_pb2 as wire

MAX_EVENT_BYTES: Final = 1 << 20
"""Longest record of an event."""

MAX_TURNS: Final = 10_000
"""Turns of one trajectory, at most."""

MAX_TURN_TOKENS: Final = 2**31 - 1
"""Tokens of one turn's whole prompt and response, at most: rows are indexed with int32."""

MAX_NUMBER: Final = 2**31 - 1
"""Largest number of a sample or an attempt."""

_STATUSES: Final = {status.value: status for status in Status}

_NAMES: Final[dict[type, str]] = {
    kind: re.sub(r"\B([A-Z])", r"_\1", kind.__name__).lower() for kind in get_args(Event)
} | {SealedTrajectory: "trajectory_sealed"}
_KINDS: Final[dict[str, type[Any]]] = {name: kind for kind, name in _NAMES.items()}

_SCALARS: Final = ("lease_epoch", "num_payload_bytes", "has_logprobs", "awaits_reward")
_OPTIONAL: Final = ("reward", "oldest_version", "newest_version")
_MAPS: Final = ("reward_components", "sampling", "tags", "metrics")


def encode_event(event: Event) -> bytes:
    """Return the record of an event; the same event always has the same bytes.

    The seal of a trajectory is this record of its SealedTrajectory, both as the last entry of its
    turns and as the event of the run.
    """
    part = _encode_seal(event) if isinstance(event, SealedTrajectory) else to_message(event)
    message = wire.Event(**cast("dict[str, Any]", {_NAMES[type(event)]: part}))
    # Maps have no order of their own, and a repeated seal must have the same bytes.
    return write_frame(EVENT, message.SerializeToString(deterministic=True))


def decode_event(record: bytes) -> Event:
    """Return the event of a record."""
    name, message = _parse(record)
    if name == "trajectory_sealed" and len(message.turns) > MAX_TURNS:
        raise CorruptRecordError(f"a seal has {len(message.turns)} turns, more than {MAX_TURNS}")
    event = _decode_message(name, message)
    _check_event(event)
    return event


def decode_accepted_event(record: bytes) -> Event:
    """Return an event that a fold has accepted, perhaps in a release that had no limits."""
    return _decode_message(*_parse(record))


def key_of_seal(record: bytes) -> TrajectoryKey | None:
    """Return the trajectory of a seal that contradicts itself; None for any other record."""
    try:
        message = wire.Event.FromString(read_header(record, kind=EVENT))
        if message.WhichOneof("event") != "trajectory_sealed":
            return None
        key = read_value(TrajectoryKey, message.trajectory_sealed.key)
        check_key(key)
    except (DecodeError, RecordError):
        return None
    return key


def _parse(record: bytes) -> tuple[str, Any]:
    """Return the name of an event's kind in the message, and its own message."""
    header = read_header(record, kind=EVENT)
    try:
        message = wire.Event.FromString(header)
    except DecodeError as error:
        raise CorruptRecordError(f"the header of an event is unreadable: {error}") from error
    name = message.WhichOneof("event")
    if name is None:
        raise UnknownFormatError("event", MAJOR_VERSION, MAJOR_VERSION, "an unknown kind")
    return name, getattr(message, name)


def _decode_message(name: str, message: Any) -> Event:
    try:
        kind = _KINDS[name]
        return _decode_seal(message) if kind is SealedTrajectory else read_value(kind, message)
    except (RecordError, MemoryError):
        raise
    except Exception as error:
        raise CorruptRecordError(f"the values of a {name} event: {error!r}") from error


def _encode_seal(event: SealedTrajectory) -> wire.TrajectorySealed:
    versions = event.turn_versions or ((),) * len(event.turns)
    anchors = event.anchors or (None,) * len(event.turns)
    turns = zip(
        *(event.turns, event.turn_rewards, event.payload_crcs, versions, anchors), strict=True
    )
    values: dict[str, Any] = {name: getattr(event, name) for name in _SCALARS + _OPTIONAL}
    for name in _MAPS:  # an empty map costs a microsecond, None nothing
        values[name] = getattr(event, name) or None
    return wire.TrajectorySealed(
        key=to_message(event.key),
        status=event.status.value,
        turns=[
            wire.TurnShape(
                **shape._asdict(),
                reward=reward,
                payload_crc=crc,
                trained_versions=[wire.VersionRun(version=v, count=n) for v, n in own],
                anchor=anchor,
            )
            for shape, reward, crc, own, anchor in turns
        ],
        **values,
    )


def _decode_seal(message: wire.TrajectorySealed) -> SealedTrajectory:
    shapes: list[TurnShape] = []
    for turn in message.turns:
        shape = TurnShape(*[getattr(turn, name) for name in TurnShape._fields])
        _check_shape(shape, earlier=shapes)
        shapes.append(shape)
    anchors = [turn.anchor if turn.HasField("anchor") else None for turn in message.turns]
    status = _STATUSES.get(message.status)
    if status is None:
        raise CorruptRecordError(f"{message.status!r} is no status of a trajectory")
    values: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS}
    for name in _OPTIONAL:
        values[name] = getattr(message, name) if message.HasField(name) else None
    for name in _MAPS:  # maps of a message have no order of their own
        values[name] = dict(sorted(getattr(message, name).items()))
    return SealedTrajectory(
        key=read_value(TrajectoryKey, message.key),
        status=status,
        turns=tuple(shapes),
        turn_rewards=tuple([turn.reward for turn in message.turns]),
        payload_crcs=tuple([turn.payload_crc for turn in message.turns]),
        anchors=() if set(anchors) <= {None} else tuple(anchors),
        turn_versions=_decode_versions(message, shapes),
        **values,
    )


def _decode_versions(
    message: wire.TrajectorySealed, shapes: list[TurnShape]
) -> tuple[tuple[VersionRun, ...], ...]:
    versions: list[tuple[VersionRun, ...]] = []
    for turn in message.turns:
        runs = turn.trained_versions
        versions.append(
            tuple([VersionRun(r.version if r.HasField("version") else None, r.count) for r in runs])
        )
    if not any(versions):
        return ()
    for index, (own, shape) in enumerate(zip(versions, shapes, strict=True)):
        num_tokens = sum([run.num_tokens for run in own])
        if num_tokens != shape.num_trained_tokens:
            raise CorruptRecordError(
                f"turn {index} of a seal trains {shape.num_trained_tokens} tokens, "
                f"and its versions sampled {num_tokens}"
            )
    return tuple(versions)


def _check_shape(shape: TurnShape, *, earlier: list[TurnShape]) -> None:
    parent = shape.parent_turn
    if not NO_PARENT <= parent < len(earlier):
        raise CorruptRecordError(f"turn {len(earlier)} of a seal has the parent {parent}")
    num_shareable = 0 if parent == NO_PARENT else earlier[parent].num_tokens
    if shape.shared_tokens > num_shareable:
        raise CorruptRecordError(
            f"turn {len(earlier)} of a seal shares {shape.shared_tokens} tokens "
            f"of {num_shareable} in turn {parent}"
        )
    if shape.num_trained_tokens > shape.num_response_tokens:
        raise CorruptRecordError(
            f"turn {len(earlier)} of a seal trains {shape.num_trained_tokens} "
            f"of {shape.num_response_tokens} response tokens"
        )


def _check_event(event: Event) -> None:
    """Check that a plan and the ledger can hold the values."""
    named: list[TrajectoryKey | None] = [getattr(event, name, None) for name in ("key", "awaited")]
    for key in (*named, *getattr(event, "dead", ())):
        if key is not None:
            check_key(key)
    if isinstance(event, GroupOpened | DeadlineFired):
        _check_name(event.group_id)
    if isinstance(event, GroupOpened) and not 1 <= event.num_needed <= event.num_samples:
        raise CorruptRecordError(
            f"a group of {event.num_samples} samples needs {event.num_needed} of them"
        )
    if isinstance(event, SealedTrajectory):
        for index, turn in enumerate(event.turns):
            if turn.num_tokens > MAX_TURN_TOKENS:
                raise CorruptRecordError(
                    f"turn {index} of a seal has {turn.num_tokens} tokens, "
                    f"more than {MAX_TURN_TOKENS}"
                )


def check_key(key: TrajectoryKey) -> None:
    """Check the name of a trajectory's group, and the numbers of its sample and attempt."""
    _check_name(key.group_id)
    for field, number in (("sample", key.sample), ("attempt", key.attempt)):
        if not 0 <= number <= MAX_NUMBER:
            raise CorruptRecordError(f"{field} {number} of a trajectory is not in 0..{MAX_NUMBER}")


def _check_name(group_id: str) -> None:
    try:
        encode_name(group_id)
    except ValueError as error:
        raise CorruptRecordError(f"no group has this name: {error}") from error
