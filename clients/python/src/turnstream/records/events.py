"""The events of a run as records: the plan depends on them and on their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records.event_limits import check_event, check_key, check_num_turns
from turnstream.records.framing import EVENT, MAJOR_VERSION, read_header, write_frame
from turnstream.records.values import read_value, to_message
from turnstream.types import (
    NO_PARENT,
    BatchDue,
    ConfigRevised,
    DeadlineFired,
    Event,
    GroupOpened,
    PlansWithdrawn,
    RefillGranted,
    RewardPosted,
    RolledBack,
    RunClosed,
    RunFinished,
    RunReopened,
    SealedTrajectory,
    Status,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TurnShape,
    VersionAnnounced,
    VersionRun,
)
from turnstream.wire.v1 import records_pb2 as wire

_STATUSES: Final = {status.value: status for status in Status}

_NAMES: Final[dict[type, str]] = {
    GroupOpened: "group_opened",
    SealedTrajectory: "trajectory_sealed",
    TrajectoryAbandoned: "trajectory_abandoned",
    TrajectoryDied: "trajectory_died",
    VersionAnnounced: "version_announced",
    RunClosed: "run_closed",
    DeadlineFired: "deadline_fired",
    RefillGranted: "refill_granted",
    RewardPosted: "reward_posted",
    BatchDue: "batch_due",
    ConfigRevised: "config_revised",
    RunReopened: "run_reopened",
    RunFinished: "run_finished",
    RolledBack: "rolled_back",
    PlansWithdrawn: "plans_withdrawn",
}
_KINDS: Final[dict[str, type[Any]]] = {name: kind for kind, name in _NAMES.items()}


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
    if name == "trajectory_sealed":
        check_num_turns(len(message.turns))
    event = _decode_message(name, message)
    check_event(event)
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


def _decode_status(text: str) -> Status:
    status = _STATUSES.get(text)
    if status is None:
        raise CorruptRecordError(f"{text!r} is no status of a trajectory")
    return status


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
    return wire.TrajectorySealed(  # an empty map costs a microsecond, None nothing
        key=to_message(event.key),
        lease_epoch=event.lease_epoch,
        status=event.status.value,
        reward=event.reward,
        reward_components=event.reward_components or None,
        turns=[
            wire.TurnShape(
                parent_turn=shape.parent_turn,
                shared_tokens=shape.shared_tokens,
                num_new_prompt_tokens=shape.num_new_prompt_tokens,
                num_response_tokens=shape.num_response_tokens,
                num_trained_tokens=shape.num_trained_tokens,
                reward=reward,
                payload_crc=crc,
                trained_versions=[wire.VersionRun(version=v, count=n) for v, n in own],
                anchor=anchor,
            )
            for shape, reward, crc, own, anchor in turns
        ],
        oldest_version=event.oldest_version,
        newest_version=event.newest_version,
        num_payload_bytes=event.num_payload_bytes,
        has_logprobs=event.has_logprobs,
        sampling=event.sampling or None,
        tags=event.tags or None,
        metrics=event.metrics or None,
        awaits_reward=event.awaits_reward,
    )


def _decode_seal(message: wire.TrajectorySealed) -> SealedTrajectory:
    shapes: list[TurnShape] = []
    for turn in message.turns:
        shape = TurnShape(
            turn.parent_turn,
            turn.shared_tokens,
            turn.num_new_prompt_tokens,
            turn.num_response_tokens,
            turn.num_trained_tokens,
        )
        _check_shape(shape, earlier=shapes)
        shapes.append(shape)
    anchors = [turn.anchor if turn.HasField("anchor") else None for turn in message.turns]
    return SealedTrajectory(
        key=read_value(TrajectoryKey, message.key),
        lease_epoch=message.lease_epoch,
        status=_decode_status(message.status),
        reward=message.reward if message.HasField("reward") else None,
        reward_components=_by_name(message.reward_components),
        turns=tuple(shapes),
        turn_rewards=tuple([turn.reward for turn in message.turns]),
        payload_crcs=tuple([turn.payload_crc for turn in message.turns]),
        anchors=() if set(anchors) <= {None} else tuple(anchors),
        turn_versions=_decode_versions(message, shapes),
        oldest_version=message.oldest_version if message.HasField("oldest_version") else None,
        newest_version=message.newest_version if message.HasField("newest_version") else None,
        num_payload_bytes=message.num_payload_bytes,
        has_logprobs=message.has_logprobs,
        sampling=_by_name(message.sampling),
        tags=_by_name(message.tags),
        metrics=_by_name(message.metrics),
        awaits_reward=message.awaits_reward,
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


def _by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the map in order of name: maps of a message have no order of their own."""
    return dict(sorted(values.items())) if values else {}
