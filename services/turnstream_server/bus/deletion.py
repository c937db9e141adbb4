"""A run leaves the store: nobody finds it any more, then its payload goes, then its name is free.

In this order, so that a deletion which stops anywhere can be taken up by whoever asks again::

    condemn_run        one moment: all keys of the run go but the ledger, which becomes `doomed`
    release_payload    of every trajectory in it; a tombstone refuses late writers
    the name           leaves the list of runs, and is free when the last tombstone has expired

While the tombstones stand, a writer that comes late is refused; one that sleeps longer than they
stand was silent for many leases.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from turnstream.store import keys
from turnstream.store.replies import translating
from turnstream.store.scripts import Script, run_command, run_commands
from turnstream_server.bus.release import OVER, SHORTEST_TOMBSTONE_S, SLICE, TOMBSTONE_LEASES
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)

NAME_OUTLASTS_PAYLOAD_MS: Final = 60_000
"""The name is free so much later than the last tombstone of a payload was made to expire: a leader
that was just releasing may have made one after us."""

_CONDEMN = Script("condemn_run", "turnstream_server.bus")
_RELEASE = Script("release_payload", "turnstream_server.bus")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedRun:
    """What a deletion has done.

    Attributes:
        num_trajectories: whose payload this call removed, or found removed.
        free_after_s: seconds until the name may be used again.
    """

    run: str
    num_trajectories: int
    free_after_s: float


def delete_run(client: redis.Redis, run: str) -> DeletedRun:
    """Remove everything that the store holds of a run; the same again goes on where it stopped.

    From the first moment on nobody finds the run: generators, trainers, observers and batchers that
    still speak of it get RunNotFoundError, or FencedError where they hold a lease of it. Payload
    then goes in slices, so that the server never stands still. What is left expires: fences for
    late writers, and the name, which cannot be used for as long.

    Runs that were forked from it stay as they are, and so do files of the archive folder.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached; what was done stays done.
    """
    names = keys.run_keys(run)
    command = _CONDEMN(names.of_condemn_run, round(SHORTEST_TOMBSTONE_S * 1_000), TOMBSTONE_LEASES)
    fence_ms, free_ms = run_command(client, command)
    if free_ms >= 0:
        return DeletedRun(run=run, num_trajectories=0, free_after_s=free_ms / 1_000)
    reach("delete.after_condemned")
    num_trajectories = 0
    for some in _slices(client, names.doomed):
        _remove_payload(client, run, some, fence_ms=fence_ms)
        num_trajectories += len(some)
        reach("delete.after_slice")
    reach("delete.after_payload")
    free_ms = fence_ms + NAME_OUTLASTS_PAYLOAD_MS
    with translating():
        client.srem(keys.RUNS, keys.encode_name(run))
        client.pexpire(names.deleted, free_ms)
    logger.info("deleted run %s", run, extra={"num_trajectories": num_trajectories})
    return DeletedRun(run=run, num_trajectories=num_trajectories, free_after_s=free_ms / 1_000)


def deleting_since_ms(client: redis.Redis, run: str) -> int | None:
    """When the deletion of a run began that is not done, in ms of the server's clock; else None.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    name = keys.run_keys(run).deleted
    with translating():
        since_ms: Any = client.hget(name, "since_ms")
        is_done = since_ms is not None and client.pttl(name) != -1
    return None if since_ms is None or is_done else int(since_ms)


def _remove_payload(
    client: redis.Redis, run: str, trajectory_ids: Sequence[bytes], *, fence_ms: int
) -> None:
    """Remove the payload of a few trajectories, and only then forget where it was."""
    places = [keys.trajectory_keys(run, each.decode()) for each in trajectory_ids]
    for reply in run_commands(client, [_RELEASE(place, fence_ms, OVER) for place in places]):
        if isinstance(reply, Exception):
            raise reply
    with translating():
        client.hdel(keys.run_keys(run).doomed, *trajectory_ids)


def _slices(client: redis.Redis, doomed: str) -> Iterator[list[bytes]]:
    """The trajectories that are left, a few at a time, until there are none."""
    cursor, is_left = 0, True
    while is_left:
        with translating():
            page: Any = client.hscan(doomed, cursor, count=SLICE)
        cursor, found = page
        ids = list(found)
        for start in range(0, len(ids), SLICE):
            yield ids[start : start + SLICE]
        with translating():
            is_left = cursor != 0 or bool(client.exists(doomed))
