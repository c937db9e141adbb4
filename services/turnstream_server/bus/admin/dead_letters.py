"""Dead letters: trajectories and events that were set aside as damaged or inconsistent.

This module lists, reads and discards them. A release discards the oldest ones above the limit of
their run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import redis
import redis.asyncio
from redis.exceptions import RedisError

from turnstream.errors import RecordError, RejectedError
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.replies import translate, translating
from turnstream.store.client.scripts import Command, Script, run_command, run_commands_async
from turnstream.store.client.trajectory_names import keys_named
from turnstream.store.run.configs import read_config
from turnstream.store.waits.wait_snapshot import KeptDeadLetters
from turnstream.types import SealedTrajectory, StoredTurn
from turnstream_server.bus.core.scan import entry_ms, hash_fields, stream_entries
from turnstream_server.bus.release.release import give_back_command, release_command
from turnstream_server.failpoints import reach

FINISHED: Final = "over"
"""State of a group of which only a fingerprint is left."""

FOR_ROOM: Final = "for room"
"""Part of the reason of a dead letter that was discarded because of `max_dead_bytes`."""

_PAGE: Final = 1_000
_EVENTS_PAGE: Final = 32
"""Rejected events of one reply; each has up to MAX_KEPT_BYTES."""

_SLICE: Final = 64
_CRC_BYTES: Final = 4

_DISCARD_TRAJECTORY: Final = Script("discard_dead_letter", "turnstream_server.bus.admin")
_DISCARD_EVENT: Final = Script("discard_event", "turnstream_server.bus.admin")

_Content = TypeVar("_Content")


class DeadLetterNotFoundError(RejectedError):
    """The run keeps no dead letter of this name; it may have been discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadTrajectory:
    """A dead trajectory with payload.

    Attributes:
        reason: reason of its death.
        since_ms: time of its death, by the server's clock.
        num_bytes: size of its payload.
        group_state: open, decided, planned, or the reason for which its group was dropped; FINISHED
            if only a fingerprint of the group is left.
    """

    trajectory_id: str
    reason: str
    since_ms: int
    num_bytes: int
    group_state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedEvent:
    """A rejected event that belongs to no sealed trajectory.

    Attributes:
        event_id: id in the event stream; begins with the server's milliseconds.
    """

    event_id: str
    reason: str
    record: bytes = field(repr=False)

    @property
    def since_ms(self) -> int:
        """Time at which it was written, by the server's clock."""
        return entry_ms(self.event_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """All dead letters of a run, the oldest first.

    Attributes:
        num_discarded: dead trajectories without payload.
        num_discarded_events: rejected events without a copy.
        num_bytes: size of all dead letters.
        max_bytes: limit of this size.
    """

    run: str
    trajectories: tuple[DeadTrajectory, ...]
    events: tuple[RejectedEvent, ...]
    num_discarded: int
    num_discarded_events: int
    num_bytes: int
    max_bytes: int


class DeadTurn(NamedTuple):
    """A stored turn of a dead trajectory.

    Attributes:
        record: bytes as stored.
        turn: decoded turn; None if the record cannot be decoded. With a problem, any value of it
            may be wrong.
        problem: defect of the record; empty if it is as it was sealed.
    """

    record: bytes
    turn: StoredTurn | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadContent:
    """A dead trajectory with everything that is stored of it.

    Attributes:
        turns: its turns, in order.
        seal_record: bytes of its seal, as stored; empty if nothing is stored.
        seal: decoded seal; None if the record is no seal. With a problem, any value of it may be
            wrong.
        seal_problem: defect of the seal; empty if it has none.
    """

    trajectory: DeadTrajectory
    turns: tuple[DeadTurn, ...]
    seal_record: bytes = field(repr=False)
    seal: SealedTrajectory | None
    seal_problem: str

    @property
    def missing(self) -> range:
        """Numbers of the turns that were sealed and are not stored."""
        num_sealed = len(self.seal.turns) if self.seal and not self.seal_problem else 0
        return range(len(self.turns), num_sealed)


def read_dead_letters(client: redis.Redis, run: str) -> DeadLetters:
    """Return the dead letters of a run; they are read one after the other."""
    names = keys.run_keys(run)
    _, config = read_config(client, run)
    kept = dict(hash_fields(client, names.letters))
    found = [_read_trajectory(client, run, name, value) for name, value in kept.items()]
    with translating():
        fields = ("discarded", "discarded_events", "dead_bytes")
        counts: Any = client.hmget(names.counts, *fields)
    num_discarded, num_events, num_bytes = (int(count or 0) for count in counts)
    return DeadLetters(
        run=run,
        trajectories=tuple(sorted(filter(None, found), key=lambda each: each.since_ms)),
        events=tuple(_read_events(client, run)),
        num_discarded=num_discarded,
        num_discarded_events=num_events,
        num_bytes=num_bytes,
        max_bytes=config.max_dead_bytes,
    )


def read_kept(client: redis.Redis, run: str) -> KeptDeadLetters | None:
    """Return the number of dead letters of a run, and the newest; None if it keeps none."""
    names = keys.run_keys(run)
    kept = dict(hash_fields(client, names.letters))
    with translating():
        num_events: Any = client.xlen(names.damaged)
        last: Any = client.xrevrange(names.damaged, count=1)
    newest = [(entry_ms(event_id.decode()), event_id.decode()) for event_id, _ in last]
    newest += [(_since_and_bytes(value)[0], name) for name, value in kept.items()]
    if not newest:
        return None
    _, name = max(newest)
    reason: Any = last[0][1][b"why"] if name not in kept else None
    if reason is None:
        with translating():
            reason = client.hget(names.ledger, name) or b""
    return KeptDeadLetters(
        num_trajectories=len(kept),
        num_events=num_events,
        newest=keys.readable_name(name) if name in kept else f"event {name}",
        reason=reason.decode().removeprefix("dead:"),
    )


def find_trajectory(client: redis.Redis, run: str, name: str) -> str:
    """Return the id of a trajectory, from its readable name or its id.

    Raises:
        DeadLetterNotFoundError: the name is not one of a trajectory.
    """
    try:
        meant = [key.trajectory_id for key in keys_named(name)]
    except ValueError as error:
        raise DeadLetterNotFoundError(
            f"{name!r} is no trajectory: <group>/<sample>/<attempt>"
        ) from error
    with translating():
        entries: Any = client.hmget(keys.run_keys(run).ledger, meant)
    found = [one for one, entry in zip(meant, entries, strict=True) if entry is not None]
    return found[0] if found else meant[-1]


def open_trajectory(client: redis.Redis, run: str, trajectory_id: str) -> DeadContent:
    """Return everything that is stored of a dead trajectory.

    Raises:
        DeadLetterNotFoundError: the run keeps no dead trajectory of this id.
    """
    with translating():
        value: Any = client.hget(keys.run_keys(run).letters, trajectory_id)
    found = None if value is None else _read_trajectory(client, run, trajectory_id, value)
    if found is None:
        name = keys.readable_name(trajectory_id)
        raise DeadLetterNotFoundError(f"run {run!r} keeps no dead letter {name!r}")
    place = keys.trajectory_keys(run, trajectory_id)
    *turns, seal_record = [record for _, record in stream_entries(client, place.turns)] or [b""]
    seal, problem = _read_seal(seal_record, trajectory_id)
    crcs = () if seal is None or problem else seal.payload_crcs
    return DeadContent(
        trajectory=found,
        turns=tuple(
            read_turn(record, sealed_crc=crcs[i] if i < len(crcs) else None)
            for i, record in enumerate(turns)
        ),
        seal_record=seal_record,
        seal=seal,
        seal_problem=problem,
    )


def open_event(client: redis.Redis, run: str, event_id: str) -> RejectedEvent:
    """Return a rejected event.

    Raises:
        DeadLetterNotFoundError: the run keeps no rejected event of this id.
    """
    for event in _read_events(client, run):
        if event.event_id == event_id:
            return event
    raise DeadLetterNotFoundError(f"run {run!r} keeps no rejected event {event_id!r}")


def read_turn(record: bytes, *, sealed_crc: int | None = None) -> DeadTurn:
    """Return a record with its decoded turn and its defect.

    Args:
        record: bytes as stored.
        sealed_crc: checksum of the turn in the seal; None if it is unknown.
    """
    turn, problem = _decode_without_checksum(decode_turn, record)
    if turn is not None and not problem and sealed_crc not in (None, turn.payload_crc):
        problem = f"the checksum is {turn.payload_crc:08x}, the seal has {sealed_crc:08x}"
    return DeadTurn(record, turn, problem)


def discard_trajectory(client: redis.Redis, run: str, trajectory_id: str) -> bool:
    """Delete the payload of a dead trajectory; its ledger entry keeps the reason.

    Its bytes return to the budget of the run.

    Returns:
        False if it was discarded before.

    Raises:
        ConflictError: it is not dead.
    """
    _, config = read_config(client, run)
    is_new = bool(run_command(client, discard_trajectory_command(run, trajectory_id)))
    # Repeated each time: an earlier call may have been interrupted here.
    reach("discard.after_entry")
    run_command(client, release_command(run, trajectory_id, lease_s=config.lease_s))
    reach("discard.after_payload")
    run_command(client, give_back_command(run, [trajectory_id]))
    return is_new


def discard_event(client: redis.Redis, run: str, event_id: str) -> bool:
    """Delete the copy of a rejected event; False if it was deleted before."""
    return bool(run_command(client, discard_event_command(run, event_id)))


async def discard_oldest(client: redis.asyncio.Redis, run: str, *, max_bytes: int) -> int:
    """Discard the oldest dead letters until the others have at most `max_bytes`.

    Returns:
        Number of dead letters that this call discarded.
    """
    try:
        kept = [*await _kept_trajectories(client, run), *await _kept_events(client, run)]
    except (RedisError, OSError) as error:
        raise translate(error) from error
    kept.sort(key=lambda each: each.since_ms)
    num_bytes = sum(each.num_bytes for each in kept)
    commands: list[Command] = []
    for each in kept:
        if num_bytes <= max_bytes:
            break
        num_bytes -= each.num_bytes
        commands.append(each.discard)
    num_discarded = 0
    for start in range(0, len(commands), _SLICE):
        replies = await run_commands_async(client, commands[start : start + _SLICE])
        num_discarded += sum(reply == 1 for reply in replies)
    return num_discarded


def discard_trajectory_command(run: str, trajectory_id: str, *, why: str = "") -> Command:
    """Return the call that discards a dead trajectory; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.ledger, names.letters, names.counts)
    return _DISCARD_TRAJECTORY(where, trajectory_id, f" {why}" if why else "")


def discard_event_command(run: str, event_id: str) -> Command:
    """Return the call that discards a rejected event; nothing is sent."""
    names = keys.run_keys(run)
    return _DISCARD_EVENT((names.damaged, names.counts), event_id)


class _Kept(NamedTuple):
    since_ms: int
    num_bytes: int
    discard: Command


async def _kept_trajectories(client: redis.asyncio.Redis, run: str) -> list[_Kept]:
    kept: dict[bytes, _Kept] = {}  # HSCAN may return a field twice while the hash grows
    name, cursor = keys.run_keys(run).letters, 0
    while True:
        page: Any = await client.execute_command("HSCAN", name, cursor, "COUNT", _PAGE)
        cursor, values = page
        for trajectory_id, value in values.items():
            discard = discard_trajectory_command(run, trajectory_id.decode(), why=FOR_ROOM)
            kept[trajectory_id] = _Kept(*_since_and_bytes(value), discard)
        if cursor == 0:
            return [*kept.values()]


async def _kept_events(client: redis.asyncio.Redis, run: str) -> list[_Kept]:
    kept: list[_Kept] = []
    name, start = keys.run_keys(run).damaged, "-"
    while True:
        words = ("XRANGE", name, start, "+", "COUNT", _EVENTS_PAGE)
        entries: Any = await client.execute_command(*words)
        for event_id, fields in entries:
            discard = discard_event_command(run, event_id.decode())
            kept.append(_Kept(entry_ms(event_id.decode()), len(fields[b"r"]), discard))
        if len(entries) < _EVENTS_PAGE:
            return kept
        start = f"({entries[-1][0].decode()}"


def _since_and_bytes(value: bytes) -> tuple[int, int]:
    since_ms, num_bytes = value.split(b":")
    return int(since_ms), int(num_bytes)


def _read_trajectory(
    client: redis.Redis, run: str, trajectory_id: str, value: bytes
) -> DeadTrajectory | None:
    """Return a dead trajectory; None if it was discarded after `value` was read."""
    names = keys.run_keys(run)
    group = trajectory_id.partition("/")[0]
    with translating():
        entry: Any = client.hget(names.ledger, trajectory_id)
        group_entry: Any = client.hget(names.groups, group)
    if entry is None or entry.startswith(b"dead:discarded"):
        return None
    since_ms, num_bytes = _since_and_bytes(value)
    return DeadTrajectory(
        trajectory_id=trajectory_id,
        reason=entry.decode().removeprefix("dead:"),
        since_ms=since_ms,
        num_bytes=num_bytes,
        group_state=FINISHED if group_entry is None else group_entry.decode().partition(":")[2],
    )


def _read_seal(record: bytes, trajectory_id: str) -> tuple[SealedTrajectory | None, str]:
    if not record:
        return None, "nothing is stored"
    event, problem = _decode_without_checksum(decode_event, record)
    if event is None:
        return None, problem
    if not isinstance(event, SealedTrajectory):
        return None, problem or f"in its place is a {type(event).__name__}"
    if not problem and event.key != keys.parse_trajectory_id(trajectory_id):
        problem = f"it is of {event.key}"
    return event, problem


def _decode_without_checksum(
    decode: Callable[[bytes], _Content], record: bytes
) -> tuple[_Content | None, str]:
    """Return a decoded record and its defect; a defect of the checksum does not end the decoding.

    The content is None if the record cannot be decoded.
    """
    try:
        return decode(record), ""
    except RecordError as error:
        problem = str(error)
    body = record[:-_CRC_BYTES]
    with suppress(RecordError):
        return decode(body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")), problem
    return None, problem


def _read_events(client: redis.Redis, run: str) -> Iterator[RejectedEvent]:
    with translating():
        entries: Any = client.xrange(keys.run_keys(run).damaged)
    for event_id, fields in entries:
        yield RejectedEvent(
            event_id=event_id.decode(), reason=fields[b"why"].decode(), record=fields[b"r"]
        )
