"""The events of a run as records: what the plan depends on, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, cast, get_args

from google.protobuf.message import DecodeError

from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records.event_limits import check_event, check_key, check_num_turns
from turnstream.records.framing import EVENT, MAJOR_VERSION, read_header, write_frame
from turnstream.records.keys import by_name, decode_key, decode_trajectory_key, encode_key
from turnstream.records.seals import decode_seal, encode_seal
from turnstream.types import (
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
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    VersionAnnounced,
)
from turnstream.wire.v1 import records_pb2 as wire


def encode_event(event: Event) -> bytes:
    """The record of an event; the same event always gives the same bytes.

    The seal of a trajectory is this record of its SealedTrajectory, both as the last entry of its
    turns and as the event of the run.
    """
    message = _ENCODERS[type(event)](event)
    # Maps have no order of their own, and a writer that sends its seal again must send the same.
    return write_frame(EVENT, message.SerializeToString(deterministic=True))


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
    """Return an event that a fold has accepted, perhaps in a release that had no limits.

    Raises:
        CorruptRecordError: the bytes are damaged or contradict themselves.
        UnknownFormatError: another release wrote the record.
    """
    return _decode_message(*_parse(record))


def _parse(record: bytes) -> tuple[str, Any]:
    """Return the kind of an event, as the message names it, and its own message."""
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
        return _DECODERS[name](message)
    except (RecordError, MemoryError):
        raise
    except Exception as error:
        raise CorruptRecordError(f"the values of a {name} event: {error!r}") from error


def key_of_seal(record: bytes) -> TrajectoryKey | None:
    """Return the trajectory of a seal that contradicts itself; None of any other record."""
    try:
        message = wire.Event.FromString(read_header(record, kind=EVENT))
        if message.WhichOneof("event") != "trajectory_sealed":
            return None
        key = decode_key(message.trajectory_sealed)
        check_key(key)
    except (DecodeError, RecordError):
        return None
    return key


def _encode_group_opened(event: GroupOpened) -> wire.Event:
    message = wire.GroupOpened(
        group_id=event.group_id,
        prompt_uid=event.prompt_uid,
        num_samples=event.num_samples,
        # The record of a group that needs them all is that of older releases.
        num_needed=event.num_needed if event.num_needed != event.num_samples else 0,
    )
    if event.purpose is Purpose.EVAL:
        # An event of its own: a planner that does not know evaluations must not train on them.
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


def _encode_sealed(event: SealedTrajectory) -> wire.Event:
    return wire.Event(trajectory_sealed=encode_seal(event))


def _encode_abandoned(event: TrajectoryAbandoned) -> wire.Event:
    return wire.Event(
        trajectory_abandoned=wire.TrajectoryAbandoned(
            key=encode_key(event.key), reason=event.reason
        )
    )


def _decode_abandoned(message: wire.TrajectoryAbandoned) -> TrajectoryAbandoned:
    return TrajectoryAbandoned(key=decode_key(message), reason=message.reason)


def _encode_died(event: TrajectoryDied) -> wire.Event:
    return wire.Event(
        trajectory_died=wire.TrajectoryDied(key=encode_key(event.key), reason=event.reason)
    )


def _decode_died(message: wire.TrajectoryDied) -> TrajectoryDied:
    return TrajectoryDied(key=decode_key(message), reason=message.reason)


def _encode_announced(event: VersionAnnounced) -> wire.Event:
    return wire.Event(
        version_announced=wire.VersionAnnounced(
            version=event.version,
            step=event.step,
            lineage=event.lineage,
            weights_uri=event.weights_uri,
        )
    )


def _decode_announced(message: wire.VersionAnnounced) -> VersionAnnounced:
    return VersionAnnounced(
        version=message.version,
        step=message.step,
        lineage=message.lineage,
        weights_uri=message.weights_uri,
    )


def _encode_closed(event: RunClosed) -> wire.Event:
    # The record of a run that ends with a short batch is that of older releases.
    leftover = "" if event.leftover == "short" else event.leftover
    return wire.Event(run_closed=wire.RunClosed(reason=event.reason, leftover=leftover))


def _decode_closed(message: wire.RunClosed) -> RunClosed:
    leftover = message.leftover or "short"
    if leftover not in get_args(Leftover):
        what = f"leftover={leftover!r}"
        raise UnknownFormatError("run_closed event", MAJOR_VERSION, MAJOR_VERSION, what)
    return RunClosed(reason=message.reason, leftover=cast("Leftover", leftover))


def _encode_reopened(_: RunReopened) -> wire.Event:
    return wire.Event(run_reopened=wire.RunReopened())


def _decode_reopened(_: wire.RunReopened) -> RunReopened:
    return RunReopened()


def _encode_rollback(event: RolledBack) -> wire.Event:
    return wire.Event(rolled_back=wire.RolledBack(step=event.step))


def _decode_rollback(message: wire.RolledBack) -> RolledBack:
    return RolledBack(step=message.step)


def _encode_finished(event: RunFinished) -> wire.Event:
    return wire.Event(run_finished=wire.RunFinished(step=event.step))


def _decode_finished(message: wire.RunFinished) -> RunFinished:
    return RunFinished(step=message.step)


def _encode_deadline(event: DeadlineFired) -> wire.Event:
    return wire.Event(
        deadline_fired=wire.DeadlineFired(
            group_id=event.group_id,
            awaited=encode_key(event.awaited) if event.awaited else None,
            num_refills=event.num_refills,
        )
    )


def _decode_deadline(message: wire.DeadlineFired) -> DeadlineFired:
    awaited = decode_trajectory_key(message.awaited) if message.HasField("awaited") else None
    return DeadlineFired(
        group_id=message.group_id, awaited=awaited, num_refills=message.num_refills
    )


def _encode_refill(event: RefillGranted) -> wire.Event:
    return wire.Event(
        refill_granted=wire.RefillGranted(key=encode_key(event.key), number=event.number)
    )


def _decode_refill(message: wire.RefillGranted) -> RefillGranted:
    return RefillGranted(key=decode_key(message), number=message.number)


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
        key=decode_key(message),
        reward=message.reward if message.HasField("reward") else None,
        reward_components=by_name(message.reward_components),
    )


def _encode_due(event: BatchDue) -> wire.Event:
    return wire.Event(batch_due=wire.BatchDue(step=event.step))


def _decode_due(message: wire.BatchDue) -> BatchDue:
    return BatchDue(step=message.step)


def _encode_revised(event: ConfigRevised) -> wire.Event:
    return wire.Event(config_revised=wire.ConfigRevised(revision=event.revision, step=event.step))


def _decode_revised(message: wire.ConfigRevised) -> ConfigRevised:
    return ConfigRevised(revision=message.revision, step=message.step)


def _encode_withdrawn(event: PlansWithdrawn) -> wire.Event:
    dead = [encode_key(key) for key in event.dead]
    return wire.Event(plans_withdrawn=wire.PlansWithdrawn(step=event.step, dead=dead))


def _decode_withdrawn(message: wire.PlansWithdrawn) -> PlansWithdrawn:
    dead = tuple(decode_trajectory_key(key) for key in message.dead)
    return PlansWithdrawn(step=message.step, dead=dead)


_ENCODERS: Final[dict[type, Callable[[Any], wire.Event]]] = {
    GroupOpened: _encode_group_opened,
    SealedTrajectory: _encode_sealed,
    TrajectoryAbandoned: _encode_abandoned,
    TrajectoryDied: _encode_died,
    VersionAnnounced: _encode_announced,
    RunClosed: _encode_closed,
    DeadlineFired: _encode_deadline,
    RefillGranted: _encode_refill,
    RewardPosted: _encode_reward,
    BatchDue: _encode_due,
    ConfigRevised: _encode_revised,
    RunReopened: _encode_reopened,
    RunFinished: _encode_finished,
    RolledBack: _encode_rollback,
    PlansWithdrawn: _encode_withdrawn,
}
_DECODERS: Final[dict[str, Callable[[Any], Event]]] = {
    "group_opened": _decode_group_opened,
    "trajectory_sealed": decode_seal,
    "trajectory_abandoned": _decode_abandoned,
    "trajectory_died": _decode_died,
    "version_announced": _decode_announced,
    "run_closed": _decode_closed,
    "deadline_fired": _decode_deadline,
    "refill_granted": _decode_refill,
    "reward_posted": _decode_reward,
    "batch_due": _decode_due,
    "eval_opened": _decode_eval_opened,
    "config_revised": _decode_revised,
    "run_reopened": _decode_reopened,
    "run_finished": _decode_finished,
    "rolled_back": _decode_rollback,
    "plans_withdrawn": _decode_withdrawn,
}
