import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import redis
import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.errors import (
    ConflictError,
    NotReadyError,
    RejectedError,
    ReleasedError,
    RunNotFoundError,
    StoreBehindError,
)
from turnstream.records.snapshots import decode_snapshot
from turnstream.store.client import keys
from turnstream.store.run.configs import read_config, read_revisions, revise_config
from turnstream.store.run.runs import list_runs, newest_version
from turnstream.types import (
    ConfigRevised,
    RecoveryToken,
    TrajectoryState,
    VersionAnnounced,
)
from turnstream_server.bus.admin.deletion import delete_run
from turnstream_server.bus.admin.forks import fork_run, token_of_step
from turnstream_server.bus.core.frontier import read_frontier, read_frontier_async
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.announcements import announce_revision
from turnstream_server.bus.queries.ledger import read_budget, read_ledger
from turnstream_server.bus.release.release import advance_watermark
from turnstream_server.bus.sessions.sessions import TrainerSession, announce_version, start_session
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.jobs.batches import read_batch
from turnstream_server.jobs.ledger import read_run_ledger

StartRun = Callable[..., Awaitable[Any]]


@pytest.fixture
async def origin(
    client: redis.Redis, async_client: redis.asyncio.Redis, start_run: StartRun
) -> Any:
    """A run of five planned steps; three are stepped, the second is the newest checkpoint."""
    driver = await start_run(async_client)
    await driver.plan_steps(5)
    session = await driver.start("s")
    await announce(async_client, driver.name, 0, step=0)
    await driver.commit(session, 1, 2)
    await announce(async_client, driver.name, 1, step=2)
    await driver.step(session, 3)
    await announce(async_client, driver.name, 2, step=3)
    await driver.open("open")
    return driver


async def announce(
    client: redis.asyncio.Redis, run: str, version: int, *, step: int, epoch: int = 1
) -> None:
    lineage = (await read_frontier_async(client, run)).lineage
    announced = VersionAnnounced(version=version, step=step, lineage=lineage, weights_uri="")
    await announce_version(client, run, announced, session_epoch=epoch)


async def begin(
    client: redis.asyncio.Redis, run: str, token: RecoveryToken | None, *, session: str = "x"
) -> TrainerSession:
    return await start_session(client, run, session=session, dp_world_size=1, token=token)


def newest(client: redis.Redis, run: str) -> int | None:
    announced = newest_version(client, run)
    return None if announced is None else announced.version


async def test_a_fork_has_the_history_up_to_the_token_and_nothing_open(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    before = await origin.dump()

    fork_run(client, origin.name, "fork a", origin.token(2))

    frontier, ledger = read_frontier(client, "fork a"), read_ledger(client, "fork a")
    ledger.check()
    assert (frontier.planned, frontier.stepped, frontier.committed) == (2, 2, 2)
    assert frontier.lineage == f"{keys.encode_name(origin.name)}@2"
    assert frontier.origin is not None
    assert (frontier.origin.run, frontier.origin.step) == (origin.name, 2)
    assert {state: n for state, n in ledger.by_state.items() if n} == {TrajectoryState.COMMITTED: 4}
    assert read_config(client, "fork a") == (1, read_config(client, origin.name)[1])
    assert newest(client, "fork a") == 1
    assert "fork a" in list_runs(client)
    record: Any = client.hget(keys.run_keys("fork a").snapshot, "record")
    snapshot = decode_snapshot(record)
    assert (snapshot.step, snapshot.manifest_hash) == (2, origin.manifests[2].hash)
    assert snapshot.next_row_id == origin.manifests[2].manifest.end_row_id
    assert snapshot.versions == {0: 0, 1: 2}
    assert await origin.dump() == before


async def test_its_trainer_starts_with_the_token_of_the_checkpoint_and_no_other(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    fork_run(client, origin.name, "fork b", origin.token(2))

    with pytest.raises(ConflictError, match="present the recovery token"):
        await begin(async_client, "fork b", None)
    with pytest.raises(ReleasedError):
        await begin(async_client, "fork b", origin.token(1))
    with pytest.raises(StoreBehindError):
        await begin(async_client, "fork b", origin.token(3))
    session = await begin(async_client, "fork b", origin.token(2))

    assert (session.next_step, session.lineage) == (3, f"{keys.encode_name(origin.name)}@2")


async def test_a_version_of_the_origin_is_never_announced_again(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    fork_run(client, origin.name, "fork c", origin.token(2))
    await begin(async_client, "fork c", origin.token(2))

    with pytest.raises(ConflictError, match="version 2 is not above 2"):
        await announce(async_client, "fork c", 2, step=2)
    await announce(async_client, "fork c", 4, step=2)
    with pytest.raises(ConflictError, match="version 3 is not above 4"):
        await announce(async_client, "fork c", 3, step=2)

    assert read_frontier(client, "fork c").version_floor == 2
    assert newest(client, "fork c") == 4


async def test_invalid_start_of_a_fork_is_refused_with_its_reason(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    stranger = RecoveryToken(lineage="main", step=2, chain_hash="ab")

    with pytest.raises(ConflictError, match=r"step 3 of run .* is not committed; 2 steps are"):
        fork_run(client, origin.name, "no", origin.token(3))
    with pytest.raises(StoreBehindError, match="'ab' as step 2"):
        fork_run(client, origin.name, "no", stranger)
    with pytest.raises(StoreBehindError, match="5 steps"):
        fork_run(client, origin.name, "no", replace(stranger, step=9))
    with pytest.raises(RunNotFoundError):
        fork_run(client, "nobody", "no", origin.token(2))
    with pytest.raises(ConflictError, match="into itself"):
        fork_run(client, origin.name, origin.name, origin.token(2))
    assert not [*client.scan_iter(match="ts:{no}*")]
    assert "no" not in list_runs(client)


async def test_released_step_is_refused_and_the_watermark_is_not(
    client: redis.Redis, async_client: redis.asyncio.Redis, start_run: StartRun
) -> None:
    run = await start_run(async_client)
    await run.plan_steps(4)
    session = await run.start("s")
    await run.commit(session, 1, 2, 3, 4)
    floor = await advance_watermark(Term(async_client, run.name, run.leader_epoch))

    with pytest.raises(ReleasedError, match=r"step 2 is no longer retained: .* step 3"):
        fork_run(client, run.name, "late", run.token(2))
    fork_run(client, run.name, "fork d", run.token(3))

    assert floor == 3
    with pytest.raises(ReleasedError):
        token_of_step(client, run.name, 2)
    assert token_of_step(client, run.name, 3).chain_hash == run.manifests[3].hash


async def test_the_same_fork_again_changes_nothing_and_another_is_refused(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    first = fork_run(client, origin.name, "fork e", origin.token(2))
    await begin(async_client, "fork e", origin.token(2))
    before = read_frontier(client, "fork e")

    again = fork_run(client, origin.name, "fork e", origin.token(2))
    with pytest.raises(ConflictError, match="was not forked from there"):
        fork_run(client, origin.name, "fork e", origin.token(1))
    other = BatchingConfig(batch_groups=7, mini_batch_groups=7)
    with pytest.raises(ConflictError, match="with another config"):
        fork_run(client, origin.name, "fork e", origin.token(2), config=other)
    fork_run(client, origin.name, "fork e2", origin.token(2), config=other)

    assert again == first
    assert read_frontier(client, "fork e") == before
    assert read_config(client, "fork e2")[1] == other


async def test_fork_names_its_origin_for_earlier_batches(
    client: redis.Redis, server: EmbeddedServer, origin: Any
) -> None:
    fork_run(client, origin.name, "fork f", origin.token(2))
    shown = read_run_ledger(server.url, "fork f")
    delete_run(client, origin.name)

    again = fork_run(client, origin.name, "fork f", origin.token(2))

    assert again.num_trajectories == 4
    assert (shown["accepted"], shown["origin"]["run"], shown["origin"]["step"]) == (
        *(4, origin.name, 2),
    )
    with pytest.raises(ReleasedError, match=f"step 2 .* see the batch in '{origin.name}'"):
        read_batch(server.url, "fork f", 2)
    with pytest.raises(NotReadyError):
        read_batch(server.url, "fork f", 3)


async def test_a_fork_that_was_killed_is_finished_by_the_same_call(
    client: redis.Redis, async_client: redis.asyncio.Redis, server: EmbeddedServer, origin: Any
) -> None:
    words = ("run", "fork", origin.name, "fork g", "--step", "2")
    command = [sys.executable, "-m", "turnstream_server.cli", *words]
    environment = {
        "TURNSTREAM_FAILPOINT": "fork.after_made",
        "TURNSTREAM_REDIS_URL": server.url,
    }

    killed = await asyncio.to_thread(
        lambda: subprocess.run(command, env=environment, capture_output=True, check=False)
    )
    was_listed = "fork g" in list_runs(client)
    session = await origin.start("s2", origin.token(2))  # and the origin has moved on
    await origin.commit(session, *range(3, 6))
    await advance_watermark(Term(async_client, origin.name, origin.leader_epoch))
    fork_run(client, origin.name, "fork g", origin.token(2))

    assert killed.returncode == -9, killed.stderr
    assert not was_listed
    assert "fork g" in list_runs(client)


async def test_a_fork_from_the_beginning_has_no_history(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    start = RecoveryToken(lineage="main", step=0, chain_hash="")

    fork_run(client, origin.name, "fork h", start)
    session = await begin(async_client, "fork h", start)

    assert session.next_step == 1
    read_ledger(client, "fork h").check()
    assert read_ledger(client, "fork h").accepted == 0


async def test_fork_has_the_capacity_of_a_run_that_trained_its_history(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    config = replace(read_config(client, origin.name)[1], max_staleness=0, max_planned_ahead=0)
    fork_run(client, origin.name, "fork j", origin.token(2), config=config)
    fork = type(origin)(async_client, "fork j", 0, store=client)

    await fork.open("g1")  # a name that the origin had
    with pytest.raises(RejectedError, match="groups are live"):
        await fork.open("g2")


async def test_a_fork_holds_no_bytes_and_its_trainer_waits_for_no_room(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    config = replace(read_config(client, origin.name)[1], max_bytes=4096)
    fork_run(client, origin.name, "fork bytes", origin.token(2), config=config)
    fork = type(origin)(async_client, "fork bytes", 0, store=client)

    assert read_budget(client, "fork bytes").held == 0
    await fork.open("g1")
    with pytest.raises(RejectedError, match="max_bytes=4096"):
        await fork.open("g2")


async def test_name_of_a_run_deleted_just_now_makes_no_fork(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    fork_run(client, origin.name, "fork l", origin.token(1))
    delete_run(client, "fork l")

    again = fork_run(client, origin.name, "fork l", origin.token(2))

    assert (again.run, again.step) == (origin.name, 2)
    assert read_frontier(client, "fork l~2").origin == again
    with pytest.raises(RunNotFoundError, match="no run named 'fork l'"):
        read_frontier(client, "fork l")


async def test_a_rollback_in_a_fork_keeps_its_name_in_the_lineage(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    fork_run(client, origin.name, "fork i", origin.token(2))
    client.hset(keys.run_keys("fork i").frontier, mapping={"stepped": 3, "planned": 3})

    sessions = []
    for name in ("x", "y"):
        sessions.append(await begin(async_client, "fork i", origin.token(2), session=name))
        client.hset(keys.run_keys("fork i").frontier, "stepped", 3)

    base = f"{keys.encode_name(origin.name)}@2"
    assert [session.lineage for session in sessions] == [f"{base}-1", f"{base}-2"]


async def test_fork_starts_with_the_config_in_force_and_no_pending_revision(
    client: redis.Redis, async_client: redis.asyncio.Redis, origin: Any
) -> None:
    first = read_config(client, origin.name)[1]
    second = replace(first, max_staleness=first.max_staleness + 1, batch_groups=2)
    planned = max(origin.manifests)
    revise_config(client, origin.name, second, from_step=planned + 1)
    await announce_revision(
        Term(async_client, origin.name, origin.leader_epoch),
        ConfigRevised(revision=2, step=planned + 1),
    )
    revise_config(client, origin.name, replace(second, max_staleness=9), from_step=planned + 9)

    fork_run(client, origin.name, "fork of a revised run", origin.token(2))
    again = fork_run(client, origin.name, "fork of a revised run", origin.token(2))
    number = revise_config(client, "fork of a revised run", first, from_step=3)

    stored = read_revisions(client, "fork of a revised run").stored
    frontier = read_frontier(client, "fork of a revised run")
    assert [each.config for each in stored] == [second, first]
    assert (again.step, number, stored[0].number) == (2, 2, 1)
    assert frontier.next_revision == 3
    assert frontier.num_live_groups == 2 * second.batch_groups
