"""Checks of the requests of a generator, before they reach the store.

A script trusts its arguments, and a planner trusts what scripts have stored. So each record is
decoded, and the role of the key is checked for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.errors import InvalidTurnError, RecordError
from turnstream.generator.encode.group_checks import checked_key, checked_name
from turnstream.generator.outbox.writes import MAX_ROUND_BYTES, MAX_ROUND_TURNS
from turnstream.generator.requests import (
    Abandon,
    Adopt,
    AppendTurns,
    AwaitWake,
    CloseRun,
    CountConflict,
    NextTask,
    OpenGroup,
    PostReward,
    PostSeals,
    ReadConfig,
    ReadGroup,
    ReadTurns,
    ReadWaits,
    RenewLeases,
    Request,
    Reserve,
)
from turnstream.store.client.keys import parse_trajectory_id
from turnstream.store.run.leases import MAX_HEARTBEATS
from turnstream.store.run.tasks import MOST_PASSED
from turnstream.types import Leftover, TrajectoryKey
from turnstream.types.names import checked_text, quoted
from turnstream.types.scalars import whole_number
from turnstream_server.gateway.rest.generators.records import (
    check_opening,
    check_reward,
    check_seal,
    check_turn,
)
from turnstream_server.gateway.stream_waits import EntryId
from turnstream_server.keys.records import ROLES, ApiKey, Role

_NUMBER_LIMIT: Final = 2**53
"""Scripts count in floats of 64 bits."""

_MOST_NAMED: Final = 256
"""Trajectories of one call, which blocks the store."""

_PRODUCE: Final[tuple[Role, ...]] = ("produce",)
_ANY: Final[tuple[Role, ...]] = ("read", "produce", "train")
_ROLES: Final[Mapping[type, tuple[Role, ...]]] = {
    CloseRun: ("admin",),
    ReadConfig: _ANY,
    ReadWaits: _ANY,
    AwaitWake: _ANY,
}
"""Roles of which a request needs one; others need `produce`."""


def check_run(key: ApiKey, run: str) -> None:
    """Raise AccessDeniedError if a key may not use a run."""
    own: list[Role] = [role for role in ROLES if role in key.roles]
    key.require(own[0] if own else "read", run=run)


def check_request(request: Request, key: ApiKey) -> None:
    """Check that a key may make a request, and that a script can take it.

    Raises:
        AccessDeniedError: the key has not the role, or may not use the run.
        RecordError, BatchingError: an argument or a record has a wrong value.
    """
    roles = _ROLES.get(type(request), _PRODUCE)
    own: list[Role] = [role for role in roles if role in key.roles]
    key.require(own[0] if own else roles[0], run=request.run)
    if getattr(request, "writer", None) == "":
        raise RecordError("the body has no writer, which a call needs")
    check = _CHECKS.get(type(request))
    if check is not None:
        check(request)


def _check_opening(request: OpenGroup) -> None:
    group = check_opening(request.record)
    _number(request.prompt_number, field="prompt_number")
    if len(request.trajectory_ids) > LARGEST_GROUP:
        num = len(request.trajectory_ids)
        raise RecordError(f"a call opens {num} trajectories, at most {LARGEST_GROUP}")
    for name in request.trajectory_ids:
        checked_key(parse_trajectory_id(name), num_samples=group.num_samples)


def _check_turns(request: AppendTurns) -> None:
    key = _trajectory(request.trajectory_id)
    _number(request.epoch, field="epoch")
    turns = [*request.records]
    if request.is_sealed:
        check_seal(turns.pop(), key=key)
    _check_size(turns, most=MAX_ROUND_TURNS)
    for index, record in enumerate(turns, start=request.first):
        check_turn(record, index=index)


def _check_seals(request: PostSeals) -> None:
    _check_named(request.seals, most=_MOST_NAMED)
    _check_size([each.record for each in request.seals], most=_MOST_NAMED)
    for each in request.seals:
        seal = check_seal(each.record, key=_trajectory(each.trajectory_id))
        _number(each.epoch, field="epoch")
        _number(each.num_bytes or 0, field="num_bytes")
        if each.awaits_reward != seal.awaits_reward:
            raise RecordError(f"awaits_reward of {each.trajectory_id} differs from its seal")


def _check_ending(request: Abandon | CountConflict) -> None:
    _trajectory(request.trajectory_id)
    checked_text(request.reason, field="reason")
    if isinstance(request, Abandon):
        _number(request.epoch, field="epoch")


def _check_reward(request: PostReward) -> None:
    check_reward(request.record, key=_trajectory(request.trajectory_id))


def _check_closing(request: CloseRun) -> None:
    checked_text(request.reason, field="reason")
    if request.leftover not in (None, *get_args(Leftover)):
        raise InvalidTurnError("leftover", f"{quoted(request.leftover)} is unknown")


def _check_leases(request: RenewLeases) -> None:
    _check_named(request.leases, most=MAX_HEARTBEATS)
    for name, epoch in request.leases:
        _trajectory(name)
        _number(epoch, field="epoch")


def _check_reservations(request: Reserve) -> None:
    _check_named(request.reservations, most=_MOST_NAMED)
    for name, epoch, num_bytes in request.reservations:
        _trajectory(name)
        _number(epoch, field="epoch")
        _number(num_bytes, field="num_bytes")


def _check_name(request: Adopt | ReadTurns) -> None:
    _trajectory(request.trajectory_id)


def _check_group(request: ReadGroup) -> None:
    checked_name(request.group_id, field="group_id")
    whole_number(request.num_samples, field="num_samples", limit=LARGEST_GROUP + 1)


def _check_task(request: NextTask) -> None:
    whole_number(request.num_passed, field="num_passed", limit=MOST_PASSED + 1)


def _check_wake(request: AwaitWake) -> None:
    try:
        EntryId.parse(request.wake_id)
    except ValueError as error:
        raise InvalidTurnError("wake_id", f"{quoted(request.wake_id)} is no position") from error


_CHECKS: Final[dict[type, Callable[[Any], None]]] = {
    OpenGroup: _check_opening,
    AppendTurns: _check_turns,
    PostSeals: _check_seals,
    Abandon: _check_ending,
    CountConflict: _check_ending,
    PostReward: _check_reward,
    CloseRun: _check_closing,
    RenewLeases: _check_leases,
    Reserve: _check_reservations,
    Adopt: _check_name,
    ReadTurns: _check_name,
    ReadGroup: _check_group,
    NextTask: _check_task,
    AwaitWake: _check_wake,
}
"""Checks of requests with arguments; ListLapsed, ReadConfig and ReadWaits have none."""


def _trajectory(name: str) -> TrajectoryKey:
    return checked_key(parse_trajectory_id(name))


def _number(value: int, *, field: str) -> None:
    whole_number(value, field=field, limit=_NUMBER_LIMIT)


def _check_size(records: Sequence[bytes], *, most: int) -> None:
    """Check the records of one call, which stops the store: the SDK sends one alone if it is large.

    >>> _check_size([bytes(4 << 20)], most=2)
    >>> _check_size([bytes(1 << 20), b"x"], most=2)
    Traceback (most recent call last):
    turnstream.errors.RecordError: 2 records of one call have 1048577 bytes, at most 2 of 1048576
    """
    num_bytes = sum(map(len, records))
    if len(records) > most or (len(records) > 1 and num_bytes > MAX_ROUND_BYTES):
        raise RecordError(
            f"{len(records)} records of one call have {num_bytes} bytes, at most {most} of "
            f"{MAX_ROUND_BYTES}"
        )


def _check_named(named: Sequence[object], *, most: int) -> None:
    if len(named) > most:
        raise RecordError(f"a call names {len(named)} trajectories, at most {most}")
