"""The events of a run as records: the plan depends on them and on their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Final, cast, get_args

from google.protobuf.message import DecodeError

from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records.event_limits import check_event, check_key, check_num_turns
from turnstream.records.framing import EVENT, MAJOR_VERSION, read_header, write_frame
from turnstream.types import (
    NO_PARENT,
    BatchDue,
    ConfigRevised,
    DeadlineFired,
    Event,
    GroupOpened,
    Leftover,
    PlansWithdrawn,
    Purpose,
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


def encode_event(event: Event) -> bytes:
    """Return the record of an event; the same event always has the same bytes.

    The seal of a trajectory is this record of its SealedTrajectory, both as the last entry of its
    turns and as the event of the run.
    """
    encode = _ENCODERS.get(type(event), _encode_plain)
    # Maps have no order of their own, and a repeated seal must have the same bytes.
    return write_frame(EVENT, encode(event).SerializeToString(deterministic=True))


def decode_event(record: bytes) -> Event:
    """Return the event of a record.

    Raises:
        CorruptRecordError: the bytes are damaged, contradict themselves or exceed a limit of
            `event_limits`.
        UnknownFormatError: another release wrote the record.
    """
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
        key = decode_key(message.trajectory_sealed.key)
        check_key(key)
    except (DecodeError, RecordError):
        return None
    return key


def encode_key(key: TrajectoryKey) -> wire.TrajectoryKey:
    """Return a trajectory's key as a message."""
    return wire.TrajectoryKey(group_id=key.group_id, sample=key.sample, attempt=key.attempt)


def decode_key(message: wire.TrajectoryKey) -> TrajectoryKey:
    """Return the key of a message; one without a group is a CorruptRecordError."""
    if not message.group_id:
        raise CorruptRecordError("a trajectory without a group")
    return TrajectoryKey(message.group_id, message.sample, message.attempt)


def decode_status(text: str) -> Status:
    """Return the status of that name; an unknown one is a CorruptRecordError."""
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
        if name in _PLAIN:
            return _decode_plain(_PLAIN[name], message)
        return _DECODERS[name](message)
    except (RecordError, MemoryError):
        raise
    except Exception as error:
        raise CorruptRecordError(f"the values of a {name} event: {error!r}") from error


_PLAIN: Final[dict[str, type[Any]]] = {
    "trajectory_abandoned": TrajectoryAbandoned,
    "trajectory_died": TrajectoryDied,
    "version_announced": VersionAnnounced,
    "refill_granted": RefillGranted,
    "batch_due": BatchDue,
    "config_revised": ConfigRevised,
    "run_reopened": RunReopened,
    "run_finished": RunFinished,
    "rolled_back": RolledBack,
}
"""Events whose messages have the same class name and the same fields."""

_PLAIN_NAMES: Final = {kind: name for name, kind in _PLAIN.items()}


def _encode_plain(event: Event) -> wire.Event:
    kind = type(event)
    values = {each.name: getattr(event, each.name) for each in fields(kind)}
    if "key" in values:
        values["key"] = encode_key(values["key"])
    return wire.Event(**{_PLAIN_NAMES[kind]: getattr(wire, kind.__name__)(**values)})


def _decode_plain(kind: type[Any], message: Any) -> Event:
    values = {each.name: getattr(message, each.name) for each in fields(kind)}
    if "key" in values:
        values["key"] = decode_key(values["key"])
    return kind(**values)


def _encode_group_opened(event: GroupOpened) -> wire.Event:
    message = wire.GroupOpened(
        group_id=event.group_id,
        prompt_uid=event.prompt_uid,
        num_samples=event.num_samples,
        # A group that needs all its samples has the record of older releases.
        num_needed=event.num_needed if event.num_needed != event.num_samples else 0,
    )
    if event.purpose is Purpose.EVAL:
        # A separate event: a planner without evaluations must not train on them.
        return wire.Event(eval_opened=message)
    return wire.Event(group_opened=message)


def _decode_group_opened(message: wire.GroupOpened) -> GroupOpened:
    return GroupOpened(
        group_id=message.group_id,
        prompt_uid=message.prompt_uid,
        num_samples=message.num_samples,
        num_needed=message.num_needed,
    )


def _decode_eval_opened(message: wire.GroupOpened) -> GroupOpened:
    return replace(_decode_group_opened(message), purpose=Purpose.EVAL)


def _encode_closed(event: RunClosed) -> wire.Event:
    # A run that ends with a short batch has the record of older releases.
    leftover = "" if event.leftover == "short" else event.leftover
    return wire.Event(run_closed=wire.RunClosed(reason=event.reason, leftover=leftover))


def _decode_closed(message: wire.RunClosed) -> RunClosed:
    leftover = message.leftover or "short"
    if leftover not in get_args(Leftover):
        what = f"leftover={leftover!r}"
        raise UnknownFormatError("run_closed event", MAJOR_VERSION, MAJOR_VERSION, what)
    return RunClosed(reason=message.reason, leftover=cast("Leftover", leftover))


def _encode_deadline(event: DeadlineFired) -> wire.Event:
    return wire.Event(
        deadline_fired=wire.DeadlineFired(
            group_id=event.group_id,
            awaited=encode_key(event.awaited) if event.awaited else None,
            num_refills=event.num_refills,
        )
    )


def _decode_deadline(message: wire.DeadlineFired) -> DeadlineFired:
    awaited = decode_key(message.awaited) if message.HasField("awaited") else None
    return DeadlineFired(
        group_id=message.group_id, awaited=awaited, num_refills=message.num_refills
    )


def _encode_reward(event: RewardPosted) -> wire.Event:
    return wire.Event(
        reward_posted=wire.RewardPosted(
            key=encode_key(event.key),
            reward=event.reward,
            reward_components=event.reward_components or None,
        )
    )


def _decode_reward(message: wire.RewardPosted) -> RewardPosted:
    return RewardPosted(
        key=decode_key(message.key),
        reward=message.reward if message.HasField("reward") else None,
        reward_components=_by_name(message.reward_components),
    )


def _encode_withdrawn(event: PlansWithdrawn) -> wire.Event:
    dead = [encode_key(key) for key in event.dead]
    return wire.Event(plans_withdrawn=wire.PlansWithdrawn(step=event.step, dead=dead))


def _decode_withdrawn(message: wire.PlansWithdrawn) -> PlansWithdrawn:
    return PlansWithdrawn(step=message.step, dead=tuple(map(decode_key, message.dead)))


def _encode_seal(event: SealedTrajectory) -> wire.Event:
    versions = event.turn_versions or ((),) * len(event.turns)
    anchors = event.anchors or (None,) * len(event.turns)
    turns = zip(
        *(event.turns, event.turn_rewards, event.payload_crcs, versions, anchors), strict=True
    )
    seal = wire.TrajectorySealed(  # an empty map costs a microsecond, None nothing
        key=encode_key(event.key),
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
    return wire.Event(trajectory_sealed=seal)


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
        key=decode_key(message.key),
        lease_epoch=message.lease_epoch,
        status=decode_status(message.status),
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


_ENCODERS: Final[dict[type, Callable[[Any], wire.Event]]] = {
    GroupOpened: _encode_group_opened,
    SealedTrajectory: _encode_seal,
    RunClosed: _encode_closed,
    DeadlineFired: _encode_deadline,
    RewardPosted: _encode_reward,
    PlansWithdrawn: _encode_withdrawn,
}
_DECODERS: Final[dict[str, Callable[[Any], Event]]] = {
    "group_opened": _decode_group_opened,
    "eval_opened": _decode_eval_opened,
    "trajectory_sealed": _decode_seal,
    "run_closed": _decode_closed,
    "deadline_fired": _decode_deadline,
    "reward_posted": _decode_reward,
    "plans_withdrawn": _decode_withdrawn,
}
