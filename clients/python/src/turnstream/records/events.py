"""The events of a run as records: the plan depends on them and on their order.

No plan can hold an event that exceeds the limits on its values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar, cast, get_args

from turnstream.batching.merge.left_out import continued_turns
from turnstream.errors import CorruptRecordError, UnknownFormatError
from turnstream.records.encoding import (
    EVENT,
    LEFT_OUT_VERSION,
    MAJOR_VERSION,
    parse_message,
    read_bodiless,
    read_value,
    reading,
    to_message,
    write_frame,
)
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

_Value = TypeVar("_Value")

MAX_EVENT_BYTES: Final = 1 << 20
"""Longest record of an event."""

MAX_TURNS: Final = 10_000
"""Turns of one trajectory, at most."""

MAX_TURN_TOKENS: Final = 2**31 - 1
"""Tokens of one turn's whole prompt and response, at most: rows are indexed with int32."""

MAX_NUMBER: Final = 2**31 - 1
"""Largest number of a sample or an attempt."""

_shape_values: Final = attrgetter(*TurnShape._fields)
_SEAL_FIELDS: Final = (
    *("status", "reward", "reward_components", "oldest_version", "newest_version"),
    *("num_payload_bytes", "has_logprobs", "sampling", "tags", "metrics", "awaits_reward"),
)
_STATUSES: Final = {status.value: status for status in Status}

_NAMES: Final[dict[type, str]] = {
    kind: re.sub(r"\B([A-Z])", r"_\1", kind.__name__).lower() for kind in get_args(Event)
} | {SealedTrajectory: "trajectory_sealed"}
_KINDS: Final[dict[str, type[Any]]] = {name: kind for kind, name in _NAMES.items()}


def event_name(event: Event) -> str:
    """Return the name of the kind of an event, such as "group_opened"."""
    return _NAMES[type(event)]


EVENT_NAMES: Final = tuple(_KINDS)
"""Names of all kinds of events."""


def encode_event(event: Event) -> bytes:
    """Return the record of an event; the same event always has the same bytes.

    The seal of a trajectory is this record, in its turns and in the events of the run.
    """
    if isinstance(event, SealedTrajectory):
        return _seal_writer_of(event)(event.lease_epoch)
    return _record_of(wire.Event(**{_NAMES[type(event)]: to_message(event)}))


def _record_of(message: wire.Event, version: int = MAJOR_VERSION) -> bytes:
    # Maps have no order of their own, and a repeated seal must have the same bytes.
    return write_frame(EVENT, message.SerializeToString(deterministic=True), version=version)


def decode_event(record: bytes) -> Event:
    """Return the event of a record."""
    frame = read_bodiless(record, kind=EVENT)
    message = parse_message(wire.Event, frame.header)
    name = message.WhichOneof("event")
    if name is None:
        raise UnknownFormatError("event", MAJOR_VERSION, MAJOR_VERSION, "an unknown kind")
    kind = _KINDS[name]
    if kind is SealedTrajectory:
        return _decode_seal(message.trajectory_sealed, frame.version)
    if frame.version != MAJOR_VERSION:
        raise CorruptRecordError(f"a {name} event of version {frame.version}")
    with reading(f"the values of a {name} event"):
        event = read_value(kind, getattr(message, name))
    _check_event(event)
    return event


class SealedTurn(NamedTuple):
    """The description of one turn in a seal; see SealedTrajectory."""

    shape: TurnShape
    reward: float
    payload_crc: int
    versions: Sequence[VersionRun]
    anchor: int | None


def seal_writer(
    key: TrajectoryKey, turns: Iterable[SealedTurn], *, has_versions: bool, **fields: Any
) -> Callable[[int], bytes]:
    """Return the function that makes the record of a seal for a lease epoch.

    `fields` are the other fields of SealedTrajectory.
    """
    turns = [*turns]
    version = LEFT_OUT_VERSION if any(turn[0].is_left_out for turn in turns) else MAJOR_VERSION
    sealed: dict[str, Any] = {
        **fields,  # an empty map costs a microsecond, None nothing
        "key": {"group_id": key.group_id, "sample": key.sample, "attempt": key.attempt},
        "turns": [
            {
                "parent_turn": shape.parent_turn,
                "shared_tokens": shape.shared_tokens,
                "num_new_prompt_tokens": shape.num_new_prompt_tokens,
                "num_response_tokens": shape.num_response_tokens,
                "num_trained_tokens": shape.num_trained_tokens,
                "reward": reward,
                "payload_crc": crc,
                "trained_versions": [{"version": v, "count": n} for v, n in versions]
                if has_versions
                else None,
                "anchor": anchor,
                "is_left_out": shape.is_left_out or None,
            }
            for shape, reward, crc, versions, anchor in turns
        ],
    }
    message = wire.Event(trajectory_sealed=cast("Any", sealed))

    def write(epoch: int) -> bytes:
        message.trajectory_sealed.lease_epoch = epoch
        return _record_of(message, version)

    return write


def _seal_writer_of(event: SealedTrajectory) -> Callable[[int], bytes]:
    versions = event.turn_versions or ((),) * len(event.turns)
    anchors = event.anchors or (None,) * len(event.turns)
    turns = zip(
        *(event.turns, event.turn_rewards, event.payload_crcs, versions, anchors), strict=True
    )
    return seal_writer(
        event.key,
        itertools.starmap(SealedTurn, turns),
        has_versions=bool(event.turn_versions),
        **{name: getattr(event, name) for name in _SEAL_FIELDS},
    )


def _decode_seal(message: wire.TrajectorySealed, version: int) -> SealedTrajectory:
    if len(message.turns) > MAX_TURNS:
        raise CorruptRecordError(f"a seal has {len(message.turns)} turns, more than {MAX_TURNS}")
    turns = [*message.turns]
    shapes = [TurnShape(*_shape_values(turn)) for turn in turns]
    _check_shapes(shapes)
    _check_left_out(shapes, turns, version)
    versions = [_decode_versions(runs) if (runs := turn.trained_versions) else () for turn in turns]
    anchors = [turn.anchor if turn.HasField("anchor") else None for turn in turns]
    status = _STATUSES.get(message.status)
    if status is None:
        raise CorruptRecordError(f"{message.status!r} is no status of a trajectory")
    key = _decode_key(message.key)
    check_key(key)
    return SealedTrajectory(
        key=key,
        lease_epoch=message.lease_epoch,
        status=status,
        reward=message.reward if message.HasField("reward") else None,
        reward_components=_sorted(message.reward_components),
        turns=tuple(shapes),
        turn_rewards=tuple([turn.reward for turn in turns]),
        payload_crcs=tuple([turn.payload_crc for turn in turns]),
        anchors=() if set(anchors) <= {None} else tuple(anchors),
        turn_versions=_check_versions(versions, shapes),
        oldest_version=message.oldest_version if message.HasField("oldest_version") else None,
        newest_version=message.newest_version if message.HasField("newest_version") else None,
        num_payload_bytes=message.num_payload_bytes,
        has_logprobs=message.has_logprobs,
        sampling=_sorted(message.sampling),
        tags=_sorted(message.tags),
        metrics=_sorted(message.metrics),
        awaits_reward=message.awaits_reward,
    )


def _decode_key(key: wire.TrajectoryKey) -> TrajectoryKey:
    return TrajectoryKey(key.group_id, key.sample, key.attempt)


def _sorted(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the values by name: maps of a message have no order of their own."""
    return dict(sorted(values.items())) if values else {}


def _decode_versions(runs: Iterable[wire.VersionRun]) -> tuple[VersionRun, ...]:
    return tuple([VersionRun(r.version if r.HasField("version") else None, r.count) for r in runs])


def _check_versions(
    versions: list[tuple[VersionRun, ...]], shapes: list[TurnShape]
) -> tuple[tuple[VersionRun, ...], ...]:
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


def _check_shapes(shapes: list[TurnShape]) -> None:
    totals: list[int] = []
    for index, shape in enumerate(shapes):
        parent, shared, num_new, num_response, num_trained, _ = shape
        if not NO_PARENT <= parent < index:
            raise CorruptRecordError(f"turn {index} of a seal has the parent {parent}")
        num_shareable = 0 if parent == NO_PARENT else totals[parent]
        if shared > num_shareable:
            raise CorruptRecordError(
                f"turn {index} of a seal shares {shared} tokens of {num_shareable} in turn {parent}"
            )
        if num_trained > num_response:
            raise CorruptRecordError(
                f"turn {index} of a seal trains {num_trained} of {num_response} response tokens"
            )
        num_tokens = shared + num_new + num_response
        if num_tokens > MAX_TURN_TOKENS:
            raise CorruptRecordError(
                f"turn {index} of a seal has {num_tokens} tokens, more than {MAX_TURN_TOKENS}"
            )
        totals.append(num_tokens)


def _check_left_out(shapes: list[TurnShape], turns: list[wire.TurnShape], version: int) -> None:
    """Check that turns that are left out train nothing, and that no other turn continues them."""
    unused = [index for index, shape in enumerate(shapes) if shape.is_left_out]
    if (len(unused) > 0) != (version == LEFT_OUT_VERSION) or 0 < len(shapes) == len(unused):
        raise CorruptRecordError(
            f"a seal of version {version} leaves out {len(unused)} of its {len(shapes)} turns"
        )
    for index in unused:
        if shapes[index].num_trained_tokens or turns[index].reward:
            raise CorruptRecordError(
                f"turn {index} of a seal is left out, and has {shapes[index].num_trained_tokens} "
                f"trained tokens and the reward {turns[index].reward}"
            )
    continuing = continued_turns(shapes) if unused else {}
    if wrong := continuing.keys() & {*unused}:
        index = min(wrong)
        raise CorruptRecordError(
            f"turn {continuing[index]} of a seal continues turn {index}, which is left out"
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
