"""Dead letters: what was set aside as poison, for whoever wants to see it, mend it or end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import redis

from turnstream.errors import RecordError, RejectedError
from turnstream.records.damage import TurnFindings, examine_turn
from turnstream.records.events import decode_event
from turnstream.store import keys
from turnstream.store.configs import read_config
from turnstream.store.replies import translating
from turnstream.store.scripts import Command, Script, run_command
from turnstream.store.trajectory_names import keys_named
from turnstream.types import SealedTrajectory
from turnstream_server.bus.moments import KeptDeadLetters
from turnstream_server.bus.pages import entry_ms, hash_fields, stream_entries
from turnstream_server.bus.release import give_back_command, release_command

OVER: Final = "over"
"""State of a group that has left a fingerprint and no more."""

_DISCARD_LETTER = Script("discard_letter", "turnstream_server.bus")
_DISCARD_EVENT = Script("discard_event", "turnstream_server.bus")


class LetterNotFoundError(RejectedError):
    """No dead letter of this name is kept: it never was one, or it was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A trajectory that was set aside, whose payload is kept.

    Attributes:
        reason: why.
        since_ms: when it was set aside, by the server's clock.
        num_bytes: of its payload.
        group_state: open, decided, planned, or why its group was dropped; OVER where that is past.
        replayed_as: id of the trajectory that it was replayed as, last; empty if it was not.
    """

    trajectory_id: str
    reason: str
    since_ms: int
    num_bytes: int
    group_state: str
    replayed_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedEvent:
    """An event of the run that nobody can read, nor tell whose it is.

    Attributes:
        event_id: its place among the events; begins with the server's milliseconds.
    """

    event_id: str
    reason: str
    record: bytes = field(repr=False)

    @property
    def since_ms(self) -> int:
        """When it was written, by the server's clock."""
        return entry_ms(self.event_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """All dead letters of a run, the oldest first.

    Attributes:
        num_discarded: trajectories that are dead, and of which nothing is kept.
        num_discarded_events: the same of events.
        num_bytes: what is kept.
        max_bytes: what may be kept.
    """

    run: str
    letters: tuple[DeadLetter, ...]
    events: tuple[DamagedEvent, ...]
    num_discarded: int
    num_discarded_events: int
    num_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterContent:
    """One dead letter, opened.

    Attributes:
        turns: what a close look at each of its records finds.
        seal: None where it cannot be read, or is of another trajectory.
        seal_problem: why; empty if it can.
        records: as they are stored, the seal last.
    """

    letter: DeadLetter
    turns: tuple[TurnFindings, ...]
    seal: SealedTrajectory | None
    seal_problem: str
    records: tuple[bytes, ...] = field(repr=False)

    @property
    def missing(self) -> range:
        """Numbers of turns that were sealed and are not stored."""
        return range(len(self.turns), len(self.seal.turns) if self.seal else 0)


def read_letters(client: redis.Redis, run: str) -> DeadLetters:
    """What was set aside in a run and is kept; its parts are read one after the other.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    names = keys.run_keys(run)
    _, config = read_config(client, run)
    kept = dict(hash_fields(client, names.letters))
    letters = [_read_letter(client, run, name, value) for name, value in kept.items()]
    with translating():
        fields = ("discarded", "discarded_events", "dead_bytes")
        counts: Any = client.hmget(names.counts, *fields)
    num_discarded, num_events, num_bytes = (int(count or 0) for count in counts)
    return DeadLetters(
        run=run,
        letters=tuple(sorted(filter(None, letters), key=lambda each: each.since_ms)),
        events=tuple(_damaged_events(client, run)),
        num_discarded=num_discarded,
        num_discarded_events=num_events,
        num_bytes=num_bytes,
        max_bytes=config.max_dead_bytes,
    )


def read_kept(client: redis.Redis, run: str) -> KeptDeadLetters | None:
    """Return how many dead letters a run keeps, and the newest; None where it keeps none.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    names = keys.run_keys(run)
    kept = dict(hash_fields(client, names.letters))
    with translating():
        num_events: Any = client.xlen(names.damaged)
        last: Any = client.xrevrange(names.damaged, count=1)
    newest = [(entry_ms(event_id.decode()), event_id.decode()) for event_id, _ in last]
    newest += [(int(value.partition(b":")[0]), name) for name, value in kept.items()]
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


def find_letter(client: redis.Redis, run: str, name: str) -> str:
    """The id of the trajectory that somebody names, as it is read or by its id.

    Raises:
        LetterNotFoundError: the name is none.
        StoreUnavailableError: the store cannot be reached.
    """
    try:
        meant = [key.trajectory_id for key in keys_named(name)]
    except ValueError as error:
        raise LetterNotFoundError(
            f"{name!r} is no trajectory: <group>/<sample>/<attempt>"
        ) from error
    with translating():
        entries: Any = client.hmget(keys.run_keys(run).ledger, meant)
    found = [one for one, entry in zip(meant, entries, strict=True) if entry is not None]
    return found[0] if found else meant[-1]


def open_letter(client: redis.Redis, run: str, trajectory_id: str) -> LetterContent:
    """All that can be read of one dead letter.

    Raises:
        LetterNotFoundError: none of that name is kept.
        StoreUnavailableError: the store cannot be reached.
    """
    names = keys.run_keys(run)
    with translating():
        value: Any = client.hget(names.letters, trajectory_id)
    letter = None if value is None else _read_letter(client, run, trajectory_id, value)
    if letter is None:
        name = keys.readable_name(trajectory_id)
        raise LetterNotFoundError(f"run {run!r} keeps no dead letter {name!r}")
    place = keys.trajectory_keys(run, trajectory_id)
    records = tuple(record for _, record in stream_entries(client, place.turns))
    seal, problem = _read_seal(records[-1] if records else b"", trajectory_id)
    num_turns = max(0, len(records) - 1)
    crcs: Sequence[int | None] = [None] * num_turns
    if seal is not None:
        crcs = [*seal.payload_crcs[:num_turns], *crcs[len(seal.payload_crcs) :]]
    turns = [
        examine_turn(record, index=index, sealed_crc=crc)
        for index, (record, crc) in enumerate(zip(records[:num_turns], crcs, strict=True))
    ]
    return LetterContent(
        letter=letter, turns=tuple(turns), seal=seal, seal_problem=problem, records=records
    )


def open_event(client: redis.Redis, run: str, event_id: str) -> DamagedEvent:
    """One event that nobody can read.

    Raises:
        LetterNotFoundError: none with that id is kept.
        StoreUnavailableError: the store cannot be reached.
    """
    for event in _damaged_events(client, run):
        if event.event_id == event_id:
            return event
    raise LetterNotFoundError(f"run {run!r} keeps no damaged event {event_id!r}")


def discard_letter(client: redis.Redis, run: str, trajectory_id: str) -> bool:
    """End a dead letter: its payload goes, its entry in the ledger and its reason stay.

    The bytes that it held are given back.

    Returns:
        False where it was discarded before.

    Raises:
        ConflictError: it is not dead.
        StoreUnavailableError: the store cannot be reached.
    """
    _, config = read_config(client, run)
    is_new = bool(run_command(client, discard_letter_command(run, trajectory_id)))
    # Also the second time: whoever did it first may have died before this.
    run_command(client, release_command(run, trajectory_id, lease_s=config.lease_s))
    run_command(client, give_back_command(run, [trajectory_id]))
    return is_new


def discard_event(client: redis.Redis, run: str, event_id: str) -> bool:
    """Forget an event that nobody can read; False where that was done before.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    return bool(run_command(client, discard_event_command(run, event_id)))


def discard_letter_command(run: str, trajectory_id: str, *, why: str = "") -> Command:
    """The call that ends a dead letter; nothing is sent."""
    names = keys.run_keys(run)
    where = (names.ledger, names.letters, names.counts)
    return _DISCARD_LETTER(where, trajectory_id, f" {why}" if why else "")


def discard_event_command(run: str, event_id: str) -> Command:
    """The call that forgets an event which nobody can read; nothing is sent."""
    names = keys.run_keys(run)
    return _DISCARD_EVENT((names.damaged, names.counts), event_id)


def _read_letter(
    client: redis.Redis, run: str, trajectory_id: str, value: bytes
) -> DeadLetter | None:
    """None where it was discarded since `value` was read."""
    names = keys.run_keys(run)
    group = trajectory_id.partition("/")[0]
    with translating():
        entry: Any = client.hget(names.ledger, trajectory_id)
        group_entry: Any = client.hget(names.groups, group)
    if entry is None or entry.startswith(b"dead:discarded"):
        return None
    since_ms, num_bytes, replayed_as = value.decode().split(":")
    return DeadLetter(
        trajectory_id=trajectory_id,
        reason=entry.decode().removeprefix("dead:"),
        since_ms=int(since_ms),
        num_bytes=int(num_bytes),
        group_state=OVER if group_entry is None else group_entry.decode().partition(":")[2],
        replayed_as=replayed_as,
    )


def _read_seal(record: bytes, trajectory_id: str) -> tuple[SealedTrajectory | None, str]:
    if not record:
        return None, "nothing is stored"
    try:
        event = decode_event(record)
    except RecordError as error:
        return None, str(error)
    if not isinstance(event, SealedTrajectory):
        return None, f"in its place is a {type(event).__name__}"
    if event.key != keys.parse_trajectory_id(trajectory_id):
        return None, f"it is of {event.key}"
    return event, ""


def _damaged_events(client: redis.Redis, run: str) -> list[DamagedEvent]:
    with translating():
        entries: Any = client.xrange(keys.run_keys(run).damaged)
    return [
        DamagedEvent(
            event_id=event_id.decode(), reason=fields[b"why"].decode(), record=fields[b"r"]
        )
        for event_id, fields in entries
    ]
