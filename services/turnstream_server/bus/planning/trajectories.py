"""Single trajectories that change a plan: damaged ones, and stored seals that were not posted."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command_async
from turnstream.store.run.budget import lease_of_seal
from turnstream.types import TrajectoryDied, TrajectoryKey
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

_MARK_DEAD = LeaderScript("mark_dead", "planning", "ledger counts events letters deadlines")
_REJECT_EVENTS = LeaderScript(
    "reject_events", "planning", "ledger counts events letters deadlines damaged rejected"
)
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
_PAGE = 1000

MAX_KEPT_BYTES: Final = 4_096
"""Bytes of a rejected event's record that are kept, at most."""

MAX_KEPT_EVENTS: Final = 1_000
"""Rejected events of a run that are kept, at most; the oldest are removed."""

_REJECT_SLICE: Final = 25
"""Rejections of one call, for which the server copies each event whole."""


class Rejection(NamedTuple):
    """An event that counts for nothing, and why.

    Attributes:
        key: key of the trajectory that the event ends, if that is sealed; None if it names no
            trajectory.
    """

    event_id: str
    reason: str
    key: TrajectoryKey | None


async def mark_dead(term: Term, died: TrajectoryDied) -> bool:
    """Mark a sealed trajectory as dead, keep its payload, and notify the planner, once.

    Returns:
        False where it was dead before.

    Raises:
        ConflictError: it is not sealed, or already in a batch.
    """
    name = keys.trajectory_id(died.key)
    with translating():
        meta = keys.trajectory_keys(term.run, name).meta
        num_bytes: Any = await term.client.execute_command("HGET", meta, "bytes")
    words = (name, died.reason, encode_event(died), int(num_bytes or 0))
    return bool(await _MARK_DEAD.run(term, *words))


async def reject_events(term: Term, rejections: Sequence[Rejection]) -> int:
    """Reject events, each once, and keep them or their trajectories as dead letters.

    Returns:
        How many were rejected now.
    """
    num_new = 0
    for start in range(0, len(rejections), _REJECT_SLICE):
        words: list[Any] = []
        some = rejections[start : start + _REJECT_SLICE]
        for each, num_bytes in zip(
            some, await _payload_bytes(term.client, term.run, some), strict=True
        ):
            words += (each.event_id, each.reason, *_death(each), num_bytes)
        num_new += await _REJECT_EVENTS.run(term, MAX_KEPT_BYTES, MAX_KEPT_EVENTS, *words)
    return num_new


async def read_rejected(client: redis.asyncio.Redis, run: str) -> set[str]:
    """Return the ids of all rejected events of a run that a leader may still read."""
    name, rejected = keys.run_keys(run).rejected, set[str]()
    for start in itertools.count(0, _PAGE):
        with translating():
            page: Any = await client.execute_command("ZRANGE", name, start, start + _PAGE - 1)
        rejected.update(event_id.decode() for event_id in page)
        if len(page) < _PAGE:
            break
    return rejected


async def _payload_bytes(
    client: redis.asyncio.Redis, run: str, rejections: Sequence[Rejection]
) -> list[int]:
    ids = [keys.trajectory_id(each.key) for each in rejections if each.key is not None]
    if not ids:
        return [0] * len(rejections)
    pipeline = client.pipeline(transaction=False)
    for trajectory_id in ids:
        pipeline.execute_command("HGET", keys.trajectory_keys(run, trajectory_id).meta, "bytes")
    with translating():
        found = iter(await pipeline.execute())
    return [0 if each.key is None else int(next(found) or 0) for each in rejections]


def _death(rejection: Rejection) -> tuple[str, bytes]:
    """Return the id of a rejection's trajectory and the record that it died; else two blanks."""
    if rejection.key is None:
        return "", b""
    died = TrajectoryDied(key=rejection.key, reason=rejection.reason)
    return keys.trajectory_id(rejection.key), encode_event(died)


async def post_forgotten_seals(client: redis.asyncio.Redis, run: str) -> int:
    """Post the seals of trajectories whose writer died between the seal and its event.

    An event counts once, also if the writer posts it at the same time.

    Returns:
        Number of posted seals.
    """
    num_posted = 0
    with translating():
        async for ids in _open_trajectories(client, run):
            num_posted += await post_seals_of(client, run, ids)
    return num_posted


async def post_seals_of(client: redis.asyncio.Redis, run: str, ids: Sequence[str]) -> int:
    """Post the stored seals of these open trajectories, a page of them at most."""
    names = keys.run_keys(run)
    arguments: list[Any] = []
    with translating():
        for trajectory_id, (epoch, writer), seal in await _read_seals(client, run, ids):
            lease = lease_of_seal(int(epoch), writer.decode(), seal)
            arguments += (trajectory_id, lease, seal)
    if not arguments:
        return 0
    replies = await run_command_async(client, _POST_SEALED(names.of_post_sealed, *arguments))
    return sum(reply in {b"OK", b"SURPLUS"} for reply in replies)


async def _open_trajectories(client: redis.asyncio.Redis, run: str) -> AsyncIterator[list[str]]:
    """Pages of the ids that the ledger calls open."""
    names = keys.run_keys(run)
    if int(await client.execute_command("HGET", names.counts, "open") or 0) == 0:
        return
    cursor = 0
    while True:
        page: Any = await client.execute_command("HSCAN", names.ledger, cursor, "COUNT", _PAGE)
        cursor, entries = page
        ids = [name.decode() for name, value in entries.items() if value.startswith(b"open:")]
        if ids:
            yield ids
        if cursor == 0:
            return


async def _read_seals(
    client: redis.asyncio.Redis, run: str, ids: Sequence[str]
) -> list[tuple[str, tuple[bytes, bytes], bytes]]:
    """(id, (epoch, writer), seal record) of those whose payload is sealed."""
    places = {trajectory_id: keys.trajectory_keys(run, trajectory_id) for trajectory_id in ids}
    pipeline = client.pipeline(transaction=False)
    for place in places.values():
        pipeline.execute_command("HMGET", place.meta, "sealed", "epoch", "writer")
    sealed: dict[str, tuple[bytes, bytes]] = {
        trajectory_id: (epoch, writer)
        for trajectory_id, (is_sealed, epoch, writer) in zip(
            ids, await pipeline.execute(), strict=True
        )
        if is_sealed == b"1"
    }
    pipeline = client.pipeline(transaction=False)
    for trajectory_id in sealed:
        pipeline.execute_command("XREVRANGE", places[trajectory_id].turns, "+", "-", "COUNT", 1)
    return [
        (trajectory_id, holder, entries[0][1][b"r"])
        for (trajectory_id, holder), entries in zip(
            sealed.items(), await pipeline.execute(), strict=True
        )
        if entries  # none, where a disk lost them: its lease ends
    ]
