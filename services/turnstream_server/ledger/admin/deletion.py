"""Deletion of runs. Any caller can continue an interrupted deletion.

1. `begin_delete` removes all keys of the run at once. The ledger becomes `doomed`.
2. `release_payload` deletes each trajectory in it; a tombstone refuses late writers.
3. The id of the run is removed from the list of runs.

Late writers use the id of the old run, so they never reach the next run of the name.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.client.scripts import Script, run_command, run_commands
from turnstream.types.names import RunId, is_run_id
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.scan import hash_fields
from turnstream_server.ledger.release.release import SHORTEST_TOMBSTONE_S, TOMBSTONE_LEASES

logger = logging.getLogger(__name__)

TOMBSTONE_OUTLASTS_PAYLOAD_MS: Final = 60_000
"""Extra time of `deleted`: a leader that was releasing may create tombstones later."""

_DELETED: Final = "deleted"
"""Text in the tombstones of the payload."""

SLICE: Final = 64
"""Trajectories of one round trip."""

_BEGIN_DELETE = Script("begin_delete", "turnstream_server.ledger.admin")
_RELEASE = Script("release_payload", "turnstream_server.ledger.release")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedRun:
    """Ids of the deleted runs, the oldest first, and the number of their trajectories."""

    runs: tuple[RunId, ...]
    num_trajectories: int


def delete_run(client: redis.Redis, run: str) -> DeletedRun:
    """Remove everything that the store holds of a run; the same call continues where it stopped.

    The run is not found any more, and its name is free. Calls of its processes raise
    RunNotFoundError or FencedError. Payload is deleted in slices. Tombstones for late writers
    remain for a while. Forks and files of the archive folder stay.

    If deletions of earlier runs of the name were interrupted, this call finishes them, and leaves
    the present run of the name.

    Raises:
        RunNotFoundError: no such run, and no deletion to finish.
        StoreUnavailableError: the store cannot be reached; repeat the call.
    """
    current = find_run(client, run)
    unfinished = [] if is_run_id(run) else _unfinished(client, current)
    runs = unfinished or [current]
    num_trajectories = sum(_delete(client, each) for each in runs)
    return DeletedRun(runs=tuple(runs), num_trajectories=num_trajectories)


def _unfinished(client: redis.Redis, current: RunId) -> list[RunId]:
    """Return the earlier runs of a name whose deletion was interrupted."""
    before = [RunId.of(current.name, number) for number in range(1, current.incarnation)]
    with translating():
        pipeline = client.pipeline(transaction=False)
        for each in before:
            pipeline.pttl(keys.run_keys(each).deleted)
        lives_ms: list[int] = pipeline.execute()
    return [each for each, left_ms in zip(before, lives_ms, strict=True) if left_ms == -1]


def _delete(client: redis.Redis, run: RunId) -> int:
    """Delete one run; return the number of its trajectories."""
    names = keys.run_keys(run)
    shortest_ms = round(SHORTEST_TOMBSTONE_S * 1_000)
    command = _BEGIN_DELETE(names.of_begin_delete, shortest_ms, TOMBSTONE_LEASES, run.incarnation)
    fence_ms = run_command(client, command)
    if not fence_ms:
        return 0
    failpoint("delete.after_begin")
    num_trajectories = 0
    with translating():
        while client.exists(names.deleting):
            ids = (trajectory_id for trajectory_id, _ in hash_fields(client, names.deleting))
            while some := [*itertools.islice(ids, SLICE)]:
                _remove_payload(client, run, some, fence_ms=fence_ms)
                num_trajectories += len(some)
                failpoint("delete.after_slice")
    failpoint("delete.after_payload")
    with translating():
        client.srem(keys.RUNS, keys.encode_run(run))
        client.pexpire(names.deleted, fence_ms + TOMBSTONE_OUTLASTS_PAYLOAD_MS)
    logger.info("deleted run %s", run, extra={"num_trajectories": num_trajectories})
    return num_trajectories


def deleting_since_ms(client: redis.Redis, run: str) -> int | None:
    """Return when the unfinished deletion of a run began, in ms of the server's clock, or None."""
    name = keys.run_keys(run).deleted
    with translating():
        since_ms: Any = client.hget(name, "since_ms")
        is_done = since_ms is not None and client.pttl(name) != -1
    return None if since_ms is None or is_done else int(since_ms)


def _remove_payload(
    client: redis.Redis, run: str, trajectory_ids: Sequence[str], *, fence_ms: int
) -> None:
    places = [keys.trajectory_keys(run, each) for each in trajectory_ids]
    for reply in run_commands(client, [_RELEASE(place, fence_ms, _DELETED) for place in places]):
        if isinstance(reply, Exception):
            raise reply
    with translating():
        client.hdel(keys.run_keys(run).deleting, *trajectory_ids)
