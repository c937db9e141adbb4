"""Checks of the arguments of scripts, each in the form that the SDK sends.

A script trusts its arguments, and a planner trusts what scripts have stored. A name in another
form, such as `g/00/0`, would be a second trajectory of the same key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.errors import RecordError
from turnstream.generator.encode.group_checks import checked_key
from turnstream.generator.outbox.calls import MAX_ROUND_BYTES, MAX_ROUND_TURNS
from turnstream.records.configs import decode_config, encode_config
from turnstream.store.client.keys import decode_name, encode_name, parse_trajectory_id
from turnstream.store.run.groups import group_size
from turnstream.store.run.leases import MAX_HEARTBEATS, MAX_LAPSED
from turnstream.store.run.tasks import MAX_PROMPTS_PER_CALL, MOST_PASSED, Prompt
from turnstream.store.waits.read_waits import waits_command
from turnstream.types import RunClosed, RunReopened, TrajectoryAbandoned, TrajectoryKey
from turnstream.types.names import RunId, shown
from turnstream_server.gateway.rest.commands.records import (
    check_opening,
    check_reward,
    check_seal,
    check_turn,
    event_of,
)

Arguments = Sequence[bytes]

_LARGEST_NUMBER: Final = 2**53
"""Scripts count in floats of 64 bits."""

_MOST_NAMED: Final = 256
"""Trajectories of one call, which blocks the store."""

_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,15}")
_LEASE: Final = re.compile(rb"([0-9]{1,15})(?:[:/]([^:/]*))?")
_SEALED_LEASE: Final = re.compile(rb"([0-9]{1,15}):(awaits)?(?:/([0-9]{1,15}))?(?::([^:/]*))?")
_PROMPT: Final = re.compile(rb"([0-9]{1,9})/([0-9]{1,9}):([^:]*):(.*)", re.DOTALL)
_MOST_READ: Final = tuple(b"%d" % number for number in waits_command("r").args)


class Place(NamedTuple):
    """The place in the store that the keys of a call name.

    Attributes:
        run: id of the run.
        trajectory: the trajectory, of a call for the payload of one; else None.
    """

    run: RunId
    trajectory: TrajectoryKey | None = None


ArgumentCheck = Callable[[Place, Arguments], None]
"""Raises RecordError or BatchingError for arguments that the SDK does not send."""


def no_arguments(_: Place, args: Arguments) -> None:
    """Check a call without arguments."""
    _expect(args, 0)


def of_append(place: Place, args: Arguments) -> None:
    """Check append: a lease, the index of the first turn, whether a seal follows, the records."""
    _expect(args, 3, more=True)
    lease, first, seals, *records = args
    _lease(lease)
    index, is_sealed = number(first), _flag(seals)
    assert place.trajectory is not None
    if is_sealed:
        if not records:
            raise RecordError("a seal is announced, and no record follows")
        check_seal(records.pop(), key=place.trajectory)
    _check_call(records, most=MAX_ROUND_TURNS)
    for record in records:
        check_turn(record, index=index)
        index += 1


def of_open_group(_: Place, args: Arguments) -> None:
    """Check open_group: a group, its size, the writer, its record, and ids of its samples."""
    _expect(args, 4, more=True)
    name, size, writer, record, *ids = args
    group = check_opening(record)
    encoded_name(writer)
    rest = re.fullmatch(rb"[^+#]*(\+?)(?:#([1-9][0-9]{0,15}))?", size)
    prompt = int(rest[2]) if rest and rest[2] else 0
    expected = group_size(group, is_again=bool(rest and rest[1]), prompt_number=prompt)
    if encoded_name(name) != group.group_id or size != expected.encode():
        message = f"group {shown(name)} of the size {shown(size)}"
        raise RecordError(f"{message} has the record of {group.group_id!r}, {expected}")
    if len(ids) > LARGEST_GROUP:
        raise RecordError(f"a call opens {len(ids)} trajectories, at most {LARGEST_GROUP}")
    for trajectory_id in ids:
        key = trajectory(trajectory_id)
        checked_key(key, num_samples=group.num_samples)
        if key.group_id != group.group_id:
            raise RecordError(f"{key.readable_name} is none of group {group.group_id!r}")


def of_post_sealed(_: Place, args: Arguments) -> None:
    """Check post_sealed: per trajectory its id, its lease and size, and its seal."""
    _check_call(args[2::3], most=_MOST_NAMED)
    for name, lease, record in _grouped(args, 3, most=_MOST_NAMED):
        found = _SEALED_LEASE.fullmatch(lease)
        seal = check_seal(record, key=trajectory(name))
        if found is None or bool(found[2]) != seal.awaits_reward:
            raise RecordError(f"the lease {shown(lease)} does not fit the seal of {shown(name)}")
        if found[4] is not None:
            encoded_name(found[4])


def of_abandon(_: Place, args: Arguments) -> None:
    """Check abandon: a trajectory, its lease, the reason, and the record."""
    _expect(args, 4)
    name, lease, reason, record = args
    _lease(lease)
    expected = TrajectoryAbandoned(key=trajectory(name), reason=text(reason))
    if event_of(record, TrajectoryAbandoned) != expected:
        raise RecordError(f"the record of {shown(name)} has another key or reason")


def of_note_conflict(_: Place, args: Arguments) -> None:
    """Check note_conflict: a trajectory, and a reason."""
    _expect(args, 2)
    trajectory(args[0])
    text(args[1])


def of_reserve(_: Place, args: Arguments) -> None:
    """Check reserve: per trajectory its id, its lease, and bytes."""
    for name, lease, num_bytes in _grouped(args, 3, most=_MOST_NAMED):
        trajectory(name)
        _lease(lease)
        number(num_bytes)


def of_heartbeat(_: Place, args: Arguments) -> None:
    """Check heartbeat: per trajectory its id and its lease."""
    for name, lease in _grouped(args, 2, most=MAX_HEARTBEATS):
        trajectory(name)
        _lease(lease)


def of_adopt(_: Place, args: Arguments) -> None:
    """Check adopt: a trajectory, and the new writer."""
    _expect(args, 2)
    trajectory(args[0])
    encoded_name(args[1])


def of_list_lapsed(_: Place, args: Arguments) -> None:
    """Check list_lapsed: a time or nothing, and the most that are listed."""
    _expect(args, 2)
    if args[0]:
        number(args[0])
    number(args[1], most=MAX_LAPSED)


def of_read_group(_: Place, args: Arguments) -> None:
    """Check read_group: a group, and its number of samples."""
    _expect(args, 2)
    encoded_name(args[0])
    number(args[1], most=LARGEST_GROUP)


def of_next_task(_: Place, args: Arguments) -> None:
    """Check next_task: whether only refills are asked for, and the tasks to pass over."""
    _expect(args, 2)
    number(args[1], most=MOST_PASSED)
    if args[0] not in (b"", b"refill"):
        raise RecordError(f"{shown(args[0])} is neither 'refill' nor empty")


def of_post_reward(_: Place, args: Arguments) -> None:
    """Check post_reward: a trajectory, the CRC of the record, and the record."""
    _expect(args, 3)
    name, crc, record = args
    check_reward(record, key=trajectory(name))
    if crc != record[-4:].hex().encode():
        raise RecordError(f"{shown(crc)} is not the CRC of the record")


def of_read_waits(_: Place, args: Arguments) -> None:
    """Check read_waits: the limits of the SDK."""
    if tuple(args) != _MOST_READ:
        raise RecordError(f"the limits are {shown(args)}, expected {_MOST_READ}")


def of_create_run(place: Place, args: Arguments) -> None:
    """Check create_run: a configuration, and the number of the run."""
    _expect(args, 2)
    _check_config(args[0], place.run)
    if number(args[1]) != place.run.incarnation:
        raise RecordError(f"{shown(args[1])} is not the number of run {place.run!r}")


def of_revise_config(place: Place, args: Arguments) -> None:
    """Check revise_config: a configuration, its first step, and the revision before it."""
    _expect(args, 3)
    _check_config(args[0], place.run)
    number(args[1])
    number(args[2])


def of_set_closed(_: Place, args: Arguments) -> None:
    """Check set_closed: whether to close, the record, and the rule for groups left over."""
    _expect(args, 3)
    if not _flag(args[0]):
        event_of(args[1], RunReopened)
    elif event_of(args[1], RunClosed).leftover != (text(args[2]) or "short"):
        raise RecordError(f"the record has another leftover than {shown(args[2])}")


def of_set_paused(_: Place, args: Arguments) -> None:
    """Check set_paused: whether to pause, and the reason."""
    _expect(args, 2)
    _flag(args[0])
    text(args[1])


def of_add_prompts(_: Place, args: Arguments) -> None:
    """Check add_prompts: the first number, the largest number of samples, the prompts."""
    _expect(args, 2, more=True)
    first, most, *records = args
    number(first)
    number(most, most=LARGEST_GROUP)
    _check_call(records, most=MAX_PROMPTS_PER_CALL)
    for record in records:
        found = _PROMPT.fullmatch(record)
        if found is None:
            raise RecordError(f"{shown(record)} is no prompt")
        samples, needed, uid, payload = found.groups()
        prompt = Prompt(
            prompt_uid=encoded_name(uid),
            payload=payload,
            num_samples=int(samples),
            num_needed=int(needed),
        )
        if prompt.num_samples > int(most):
            raise RecordError(f"{prompt.num_samples} samples are more than {int(most)}")


def trajectory(name: bytes) -> TrajectoryKey:
    """Return the key of a trajectory's id in its one form; RecordError for another text."""
    try:
        key = parse_trajectory_id(name.decode("ascii"))
        if checked_key(key).trajectory_id.encode() == name:
            return key
    except (ValueError, TypeError):
        pass
    raise RecordError(f"{shown(name)} is no id of a trajectory")


def encoded_name(name: bytes) -> str:
    """Return the name of a group or writer from its one encoded form."""
    try:
        decoded = decode_name(name.decode("ascii"))
        if encode_name(decoded).encode() == name:
            return decoded
    except ValueError:
        pass
    raise RecordError(f"{shown(name)} is no encoded name")


def text(value: bytes) -> str:
    """Return a text; RecordError if it is no UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"{shown(value)} is no UTF-8") from error


def number(value: bytes, *, most: int = _LARGEST_NUMBER) -> int:
    """Return a whole number from 0 in its one form; RecordError for another text."""
    if _NUMBER.fullmatch(value) is None or int(value) > most:
        raise RecordError(f"{shown(value)} is not a whole number from 0 to {most}")
    return int(value)


def _flag(value: bytes) -> bool:
    if value not in (b"0", b"1"):
        raise RecordError(f"{shown(value)} is neither 0 nor 1")
    return value == b"1"


def _lease(value: bytes) -> None:
    found = _LEASE.fullmatch(value)
    if found is None:
        raise RecordError(f"{shown(value)} is no lease")
    if found[2] is not None:
        encoded_name(found[2])


def _check_config(value: bytes, run: str) -> None:
    if encode_config(decode_config(text(value), run=run)) != text(value):
        raise RecordError("the configuration is not in its one form")


def _expect(args: Arguments, count: int, *, more: bool = False) -> None:
    if len(args) < count or (len(args) > count and not more):
        raise RecordError(f"the script has {len(args)} arguments, expected {count}")


def _check_call(records: Arguments, *, most: int) -> None:
    """Check the records of one call, which stops the store: the SDK sends one alone if it is large.

    >>> _check_call([bytes(4 << 20)], most=2)
    >>> _check_call([bytes(1 << 20), b"x"], most=2)
    Traceback (most recent call last):
    turnstream.errors.RecordError: 2 records of one call have 1048577 bytes, at most 2 of 1048576
    """
    num_bytes = sum(map(len, records))
    if len(records) > most or (len(records) > 1 and num_bytes > MAX_ROUND_BYTES):
        raise RecordError(
            f"{len(records)} records of one call have {num_bytes} bytes, at most {most} of "
            f"{MAX_ROUND_BYTES}"
        )


def _grouped(args: Arguments, size: int, *, most: int) -> Sequence[Arguments]:
    """Return the arguments of each trajectory."""
    if len(args) % size or len(args) > most * size:
        raise RecordError(
            f"the script has {len(args)} arguments, expected {size} for each of 1 to {most}"
        )
    return [args[start : start + size] for start in range(0, len(args), size)]
