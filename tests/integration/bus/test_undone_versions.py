"""How old the weights of steps are that a trainer has gone back from, in the run and its forks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from turnstream.records.snapshots import decode_snapshot
from turnstream.store.client import keys
from turnstream.types import VersionAnnounced
from turnstream_server.bus.admin.forks import fork_run
from turnstream_server.bus.sessions.sessions import announce_version

pytestmark = pytest.mark.redis

StartRun = Callable[..., Awaitable[Any]]


async def announce(run: Any, version: int, *, step: int, epoch: int = 1) -> None:
    """Every session but the first begins a lineage."""
    lineage = "main" if epoch == 1 else f"main-{epoch - 1}"
    announced = VersionAnnounced(version=version, step=step, lineage=lineage, weights_uri="")
    await announce_version(run.client, run.name, announced, session_epoch=epoch)


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [(1, 2, {1: 1, 2: 1, 3: 2, 4: 4}), (2, 1, {1: 1, 2: 1, 3: 1, 4: 4})],
)
async def test_undone_versions_are_as_old_in_a_fork_as_in_its_origin(
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    start_run: StartRun,
    first: int,
    then: int,
    expected: dict[int, int],
) -> None:
    # The trainer announces version 1 after step 3 and 2 after step 4, goes back to one step,
    # announces 3 after step 3, goes back to another one, and announces 4 after step 4.
    run = await start_run(async_client)
    await run.plan_steps(4)
    await run.commit(await run.start("s"), 1, 2, 3, 4)
    await announce(run, 1, step=3)
    await announce(run, 2, step=4)
    second = await run.start("second", run.token(first))
    for step in range(first + 1, 4):
        await run.step(second, step)
    await announce(run, 3, step=3, epoch=2)
    third = await run.start("third", run.token(then))
    for step in range(then + 1, 5):
        await run.commit_token(third, await run.step(third, step))
    await announce(run, 4, step=4, epoch=3)

    new_run = f"fork of {run.name}"
    fork_run(client, run.name, new_run, run.token(4))

    record: Any = client.hget(keys.run_keys(new_run).snapshot, "record")
    assert decode_snapshot(record).versions == expected
