"""Dead letters: damaged trajectories, and rejected events that belong to no trajectory.

A release discards the oldest trajectories above the `max_dead_bytes` of their run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis
import redis.asyncio

from turnstream.errors import RecordError, RejectedError
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command, run_command, run_commands_async
from turnstream.store.client.trajectory_names import keys_named
from turnstream.store.run.configs import read_config
from turnstream.store.waits.wait_snapshot import KeptDeadLetters
from turnstream.types import Event, StoredTurn
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.scan import (
    PAGE,
    RunScript,
    entry_ms,
    hash_fields,
    hash_pages,
    stream_entries,
)
from turnstream_server.ledger.release.release import release_command

OVER_LIMIT: Final = " above max_dead_bytes"
"""Added to the reason of a dead letter that a release discarded."""

_SLICE: Final = 64

_DISCARD: Final = RunScript("discard_dead_letter", "admin", "ledger dead_letters counts wake")


class DeadLetterNotFoundError(RejectedError):
    """The run keeps no dead letter of this name; it may have been discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A dead trajectory with payload, or a rejected event; `name` is the id of either."""

    name: str
    reason: str
    since_ms: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """All dead letters of a run, the oldest first.

    `num_discarded` counts dead trajectories without payload. `num_bytes` and its limit are of the
    trajectories alone.
    """

    run: str
    trajectories: tuple[DeadLetter, ...]
    events: tuple[DeadLetter, ...]
    num_discarded: int
    num_bytes: int
    max_bytes: int


class DeadRecord(NamedTuple):
    """A stored record with its decoded content; None, and the reason, if it has none."""

    record: bytes
    content: StoredTurn | Event | None
    problem: str


class DeadContent(NamedTuple):
    """A dead letter with its records: the turns of a trajectory and then its seal, or one event."""

    letter: DeadLetter
    records: tuple[DeadRecord, ...]


def read_dead_letters(client: redis.Redis, run: str) -> DeadLetters:
    """Return the dead letters of a run; they are read one after the other."""
    names = keys.run_keys(run)
    _, config = read_config(client, run)
    found = _read_trajectories(client, names, dict(hash_fields(client, names.dead_letters)))
    with translating():
        counts: Any = client.hmget(names.counts, "discarded", "dead_bytes")
        events: Any = client.xrange(names.damaged)
    num_discarded, num_bytes = (int(count or 0) for count in counts)
    return DeadLetters(
        run=run,
        trajectories=tuple(sorted(found, key=lambda each: each.since_ms)),
        events=tuple(_event(*entry) for entry in events),
        num_discarded=num_discarded,
        num_bytes=num_bytes,
        max_bytes=config.max_dead_bytes,
    )


def read_kept(client: redis.Redis, run: str) -> KeptDeadLetters | None:
    """Return the number of dead letters of a run, and the newest; None if it keeps none."""
    kept = read_dead_letters(client, run)
    named = [(keys.readable_name(each.name), each) for each in kept.trajectories]
    named += [(f"event {each.name}", each) for each in kept.events]
    if not named:
        return None
    shown, newest = max(named, key=lambda each: each[1].since_ms)
    return KeptDeadLetters(
        trajectories=len(kept.trajectories),
        events=len(kept.events),
        newest=shown,
        reason=newest.reason,
    )


def find_trajectory(client: redis.Redis, run: str, name: str) -> str:
    """Return the id of a trajectory, from its readable name or its id."""
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
    """Return a dead trajectory with its stored records."""
    names = keys.run_keys(run)
    with translating():
        value: Any = client.hget(names.dead_letters, trajectory_id)
    found = [] if value is None else _read_trajectories(client, names, {trajectory_id: value})
    if not found:
        name = keys.readable_name(trajectory_id)
        raise DeadLetterNotFoundError(f"run {run!r} keeps no dead letter {name!r}")
    stream = keys.trajectory_keys(run, trajectory_id).turns
    *turns, seal = [record for _, record in stream_entries(client, stream, page=1)] or [b""]
    records = [_read(each, decode_turn) for each in turns]
    return DeadContent(found[0], (*records, _read(seal, decode_event)))


def open_event(client: redis.Redis, run: str, event_id: str) -> DeadContent:
    """Return a rejected event with its record."""
    with translating():
        entries: Any = client.xrange(keys.run_keys(run).damaged)
    for entry_id, fields in entries:
        if entry_id.decode() == event_id:
            letter = _event(entry_id, fields)
            return DeadContent(letter, (DeadRecord(fields[b"r"], None, letter.reason),))
    raise DeadLetterNotFoundError(f"run {run!r} keeps no rejected event {event_id!r}")


def discard_trajectory(client: redis.Redis, run: str, trajectory_id: str) -> bool:
    """Delete the payload of a dead trajectory; its ledger entry keeps the reason.

    The leader of the run then returns the bytes to the budget.

    Returns:
        False if it was discarded before.

    Raises:
        ConflictError: it is not dead.
    """
    _, config = read_config(client, run)
    is_new = bool(_DISCARD.call(client, run, trajectory_id, ""))
    # Repeated each time: an earlier call may have been interrupted here.
    failpoint("discard.after_entry")
    run_command(client, release_command(run, trajectory_id, lease_s=config.lease_s))
    return is_new


def discard_event(client: redis.Redis, run: str, event_id: str) -> bool:
    """Delete the copy of a rejected event; False if it was deleted before."""
    with translating():
        return bool(client.xdel(keys.run_keys(run).damaged, event_id))


async def discard_oldest(client: redis.asyncio.Redis, run: str, *, max_bytes: int) -> int:
    """Discard the oldest dead trajectories above `max_bytes`; return their number."""
    kept: dict[bytes, tuple[int, int]] = {}
    async for page in hash_pages(client, keys.run_keys(run).dead_letters):
        kept |= {name: _since_and_bytes(value) for name, value in page.items()}
    num_bytes = sum(size for _, size in kept.values())
    commands: list[Command] = []
    for name in sorted(kept, key=lambda name: kept[name]):
        if num_bytes <= max_bytes:
            break
        num_bytes -= kept[name][1]
        commands.append(_DISCARD(run, name.decode(), OVER_LIMIT))
    num_discarded = 0
    for start in range(0, len(commands), _SLICE):
        replies = await run_commands_async(client, commands[start : start + _SLICE])
        num_discarded += sum(reply == 1 for reply in replies)
    return num_discarded


def _since_and_bytes(value: bytes) -> tuple[int, int]:
    since_ms, num_bytes = value.split(b":")
    return int(since_ms), int(num_bytes)


def _event(entry_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        name=entry_id.decode(),
        reason=fields[b"why"].decode(),
        since_ms=entry_ms(entry_id.decode()),
        num_bytes=len(fields[b"r"]),
    )


def _read_trajectories(
    client: redis.Redis, names: keys.RunKeys, letters: Mapping[str, bytes]
) -> list[DeadLetter]:
    """Return dead trajectories, without those that were discarded after `letters` was read."""
    ids, entries = list(letters), list[Any]()
    for start in range(0, len(ids), PAGE):
        with translating():
            page: Any = client.hmget(names.ledger, ids[start : start + PAGE])
        entries += page
    found: list[DeadLetter] = []
    for (name, value), entry in zip(letters.items(), entries, strict=True):
        if entry is not None and not entry.startswith(b"dead:discarded"):
            since_ms, num_bytes = _since_and_bytes(value)
            reason = entry.decode().removeprefix("dead:")
            letter = DeadLetter(name=name, reason=reason, since_ms=since_ms, num_bytes=num_bytes)
            found.append(letter)
    return found


def _read(record: bytes, decode: Callable[[bytes], StoredTurn | Event]) -> DeadRecord:
    try:
        return DeadRecord(record, decode(record), "")
    except RecordError as error:
        return DeadRecord(record, None, str(error))
