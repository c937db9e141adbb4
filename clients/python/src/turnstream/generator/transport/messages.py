"""Requests of a generator as messages of the wire, and replies of scripts as its values.

The SDK and the gateway use this module in both directions. `proto/turnstream/wire/v1/calls.proto`
describes the messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError

from turnstream.errors import RecordError
from turnstream.generator.requests import (
    Abandon,
    Adopt,
    AppendTurns,
    AwaitWake,
    CloseRun,
    CountConflict,
    Lease,
    ListLapsed,
    NextTask,
    OpenGroup,
    PostedSeal,
    PostReward,
    PostSeals,
    ReadConfig,
    ReadGroup,
    ReadTurns,
    ReadWaits,
    RenewLeases,
    Request,
    Reservation,
    Reserve,
)
from turnstream.records.encoding import read_value, to_message
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client.keys import parse_trajectory_id, trajectory_id
from turnstream.store.client.replies import DENIED, FULL, error_text
from turnstream.types import GroupOpened, RewardPosted, TrajectoryKey
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream.wire.v1 import records_pb2 as records

MEDIA_TYPE: Final = "application/vnd.turnstream.calls"
"""Media type of a request and of its answer."""


# ------------------------------------------------------------------------------ requests


def call_of(request: Request) -> wire.Call:
    """Return the message of a request. Run and writer are those of all calls of a body."""
    write = _WRITERS.get(type(request))
    part = {} if write is None else write(request)
    return wire.Call(**cast("dict[str, Any]", {_NAMES[type(request).__name__]: part}))


def request_of(call: wire.Call, *, run: str, writer: str) -> Request:
    """Return the request of a message, for this id of a run and this encoded name of a writer."""
    name = call.WhichOneof("kind")
    if name is None:
        raise RecordError("the gateway does not know this kind of call: it has an older release")
    return _READERS[name](getattr(call, name), run, writer)


def _write_lease(name: str, epoch: int) -> wire.Lease:
    return wire.Lease(key=_write_key(name), epoch=epoch)


def _write_key(name: str) -> records.TrajectoryKey:
    return records.TrajectoryKey(**parse_trajectory_id(name)._asdict())


def _write_opening(request: OpenGroup) -> wire.OpenGroup:
    keys = [parse_trajectory_id(name) for name in request.trajectory_ids]
    attempts = [key.attempt for key in keys]
    return wire.OpenGroup(
        group=to_message(request.group),
        samples=[key.sample for key in keys],
        attempts=attempts if any(attempts) else (),
        prompt_number=request.prompt_number,
        is_again=request.is_again,
    )


def _write_turns(request: AppendTurns) -> wire.AppendTurns:
    turns, seal = request.records, b""
    if request.is_sealed:
        *turns, seal = request.records
    return wire.AppendTurns(
        lease=_write_lease(request.trajectory_id, request.epoch),
        is_placed=request.is_placed,
        first=request.first,
        records=turns,
        seal=seal,
        bytes_before=request.bytes_before,
    )


def _write_seals(request: PostSeals) -> wire.PostSeals:
    return wire.PostSeals(
        seals=[
            wire.PostedSeal(
                lease=_write_lease(each.trajectory_id, each.epoch),
                num_bytes=each.num_bytes,
                record=each.record,
                awaits_reward=each.awaits_reward,
            )
            for each in request.seals
        ]
    )


def _write_reserve(request: Reserve) -> wire.Reserve:
    return wire.Reserve(
        reservations=[
            wire.Reservation(lease=_write_lease(name, epoch), num_bytes=num_bytes)
            for name, epoch, num_bytes in request.reservations
        ]
    )


_WRITERS: Final[dict[type, Callable[[Any], Any]]] = {
    OpenGroup: _write_opening,
    AppendTurns: _write_turns,
    PostSeals: _write_seals,
    Abandon: lambda it: wire.Abandon(
        lease=_write_lease(it.trajectory_id, it.epoch), reason=it.reason
    ),
    CountConflict: lambda it: wire.CountConflict(
        key=_write_key(it.trajectory_id), reason=it.reason
    ),
    PostReward: lambda it: wire.PostReward(reward=to_message(decode_event(it.record))),
    CloseRun: lambda it: wire.CloseRun(reason=it.reason, leftover=it.leftover or ""),
    RenewLeases: lambda it: wire.RenewLeases(leases=[_write_lease(*each) for each in it.leases]),
    Reserve: _write_reserve,
    Adopt: lambda it: wire.Adopt(key=_write_key(it.trajectory_id)),
    ReadGroup: lambda it: wire.ReadGroup(group_id=it.group_id, num_samples=it.num_samples),
    NextTask: lambda it: wire.NextTask(refills_only=it.refills_only, num_passed=it.num_passed),
    ReadTurns: lambda it: wire.ReadTurns(key=_write_key(it.trajectory_id)),
    AwaitWake: lambda it: wire.AwaitWake(wake_id=it.wake_id, timeout_ms=it.timeout_ms),
}
"""Messages with fields; those of the other kinds are empty."""


def _read_key(key: records.TrajectoryKey) -> str:
    try:
        return trajectory_id(TrajectoryKey(key.group_id, key.sample, key.attempt))
    except ValueError as error:
        raise RecordError(f"a call has no valid trajectory: {error}") from error


def _read_lease(lease: wire.Lease) -> Lease:
    return Lease(_read_key(lease.key), lease.epoch)


def _read_opening(it: wire.OpenGroup, run: str, writer: str) -> OpenGroup:
    group = read_value(GroupOpened, it.group)
    attempts = [*it.attempts] or [0] * len(it.samples)
    if len(attempts) != len(it.samples):
        raise RecordError(f"a group has {len(it.samples)} samples and {len(attempts)} attempts")
    ids = [
        _read_key(records.TrajectoryKey(group_id=group.group_id, sample=sample, attempt=attempt))
        for sample, attempt in zip(it.samples, attempts, strict=True)
    ]
    return OpenGroup(
        run,
        writer,
        group,
        ids,
        prompt_number=it.prompt_number,
        is_again=it.is_again,
    )


def _read_turns(it: wire.AppendTurns, run: str, writer: str) -> AppendTurns:
    name, epoch = _read_lease(it.lease)
    return AppendTurns(
        run,
        writer,
        name,
        epoch,
        is_placed=it.is_placed,
        first=it.first,
        records=[*it.records, *([it.seal] if it.seal else ())],
        is_sealed=bool(it.seal),
        bytes_before=it.bytes_before,
    )


def _read_seals(it: wire.PostSeals, run: str, writer: str) -> PostSeals:
    seals = [
        PostedSeal(
            *_read_lease(each.lease),
            awaits_reward=each.awaits_reward,
            num_bytes=each.num_bytes if each.HasField("num_bytes") else None,
            record=each.record,
        )
        for each in it.seals
    ]
    return PostSeals(run, writer, seals)


def _read_reserve(it: wire.Reserve, run: str, writer: str) -> Reserve:
    wanted = [Reservation(*_read_lease(each.lease), each.num_bytes) for each in it.reservations]
    return Reserve(run, writer, wanted)


def _read_reward(it: wire.PostReward, run: str, _: str) -> PostReward:
    posted = read_value(RewardPosted, it.reward)
    return PostReward(run, _read_key(it.reward.key), encode_event(posted))


def _read_closing(it: wire.CloseRun, run: str, _: str) -> CloseRun:
    return CloseRun(run, it.reason, cast("Any", it.leftover or None))


_READERS: Final[dict[str, Callable[[Any, str, str], Request]]] = {
    "open_group": _read_opening,
    "append_turns": _read_turns,
    "post_seals": _read_seals,
    "abandon": lambda it, run, writer: Abandon(run, writer, *_read_lease(it.lease), it.reason),
    "count_conflict": lambda it, run, _: CountConflict(run, _read_key(it.key), it.reason),
    "post_reward": _read_reward,
    "close_run": _read_closing,
    "read_config": lambda _, run, __: ReadConfig(run),
    "renew_leases": lambda it, run, writer: RenewLeases(
        run, writer, [_read_lease(each) for each in it.leases]
    ),
    "reserve": _read_reserve,
    "adopt": lambda it, run, writer: Adopt(run, writer, _read_key(it.key)),
    "list_lapsed": lambda _, run, __: ListLapsed(run),
    "read_group": lambda it, run, _: ReadGroup(run, it.group_id, it.num_samples),
    "next_task": lambda it, run, _: NextTask(run, it.refills_only, it.num_passed),
    "read_waits": lambda _, run, __: ReadWaits(run),
    "read_turns": lambda it, run, _: ReadTurns(run, _read_key(it.key)),
    "await_wake": lambda it, run, _: AwaitWake(run, it.wake_id, it.timeout_ms),
}
_NAMES: Final[dict[str, str]] = {
    kind.name: field.name
    for field in wire.Call.DESCRIPTOR.fields
    if (kind := field.message_type) is not None
}
"""Fields of a call by the name of their message, which is that of the request."""


# ------------------------------------------------------------------------------ replies


def value_of(reply: Any) -> wire.Value:
    """Return the value of a reply of the store; a refused call's is its error reply."""
    match reply:
        case None:
            return wire.Value()
        case int():
            return wire.Value(number=reply)
        case bytes():
            return wire.Value(text=reply)
        case ResponseError():
            return wire.Value(refusal=error_text(reply))
        case _:
            return wire.Value(items=wire.Values(values=[value_of(each) for each in reply]))


def reply_of(value: wire.Value) -> Any:
    """Return the reply of a value: None, an int, bytes, a list, or a ResponseError.

    >>> reply_of(value_of([1, b"OK", None]))
    [1, b'OK', None]
    """
    match value.WhichOneof("kind"):
        case "number":
            return value.number
        case "text":
            return value.text
        case "items":
            return [reply_of(each) for each in value.items.values]
        case "refusal":
            return _refused(value.refusal)
        case _:
            return None


def _refused(text: str) -> ResponseError:
    code, _, message = text.partition(" ")
    kind = {DENIED: NoPermissionError, FULL: OutOfMemoryError}.get(code)
    return ResponseError(text) if kind is None else kind(message)
