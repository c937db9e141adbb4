import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

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
from turnstream.types import ConfigRevised, RecoveryToken, TrajectoryState, VersionAnnounced
from turnstream_server.console.batches import read_batch
from turnstream_server.console.ledger import read_run_ledger
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.admin.forks import fork_run, token_of_step
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.planning.announcements import announce_revision
from turnstream_server.ledger.sessions.session_writes import TrainerRank
from turnstream_server.ledger.sessions.sessions import announce_version

START = RecoveryToken(lineage="main", step=0, chain_hash="")


@pytest.fixture
async def origin(start_run: Callable[..., Awaitable[Any]]) -> Any:
    """A run of five planned steps; three are stepped, the second is the newest checkpoint."""
    run = await start_run()
    await run.plan_steps(5)
    session = await run.start("s")
    await announce(run, 0, step=0)
    await run.commit(session, 1, 2)
    await announce(run, 1, step=2)
    await run.step(session, 3)
    await announce(run, 2, step=3)
    await run.open("open")
    return run


async def announce(run: Any, version: int, *, step: int) -> None:
    lineage = run.read_frontier().lineage
    announced = VersionAnnounced(version=version, step=step, lineage=lineage, weights_uri="")
    await announce_version(run.client, run.name, TrainerRank(1), announced)


def fork_of(origin: Any, name: str, token: Any = None, **changes: Any) -> Any:
    """Fork a run at step 2 by default, with other fields of its config; return the new run."""
    config = replace(read_config(origin.store, origin.name)[1], **changes)
    fork_run(origin.store, origin.name, name, token or origin.token(2), config=config)
    return origin.run_named(name)


def newest(run: Any) -> int | None:
    announced = newest_version(run.store, run.name)
    return None if announced is None else announced.version


async def test_a_fork_has_the_history_up_to_the_token_and_nothing_open(origin: Any) -> None:
    async with origin.unchanged():
        fork = fork_of(origin, "fork a")

    frontier, ledger = fork.read_frontier(), fork.ledger()
    ledger.check()
    assert (frontier.planned, frontier.stepped, frontier.committed) == (2, 2, 2)
    assert frontier.lineage == f"{keys.encode_name(origin.name)}@2"
    assert frontier.origin is not None
    assert (frontier.origin.run, frontier.origin.step) == (origin.name, 2)
    assert {state: n for state, n in ledger.by_state.items() if n} == {TrajectoryState.COMMITTED: 4}
    assert read_config(fork.store, "fork a") == (1, read_config(fork.store, origin.name)[1])
    assert newest(fork) == 1
    assert "fork a" in list_runs(fork.store)
    snapshot = decode_snapshot(fork.store.hget(fork.keys.snapshot, "record"))
    assert (snapshot.step, snapshot.manifest_hash) == (2, origin.manifests[2].hash)
    assert snapshot.next_row_id == origin.manifests[2].manifest.end_row_id
    assert snapshot.versions == {0: 0, 1: 2}


async def test_its_trainer_starts_with_the_token_of_the_checkpoint_and_no_other(
    origin: Any,
) -> None:
    fork = fork_of(origin, "fork b")

    with pytest.raises(ConflictError, match="present the recovery token"):
        await fork.start("x")
    with pytest.raises(ReleasedError):
        await fork.start("x", origin.token(1))
    with pytest.raises(StoreBehindError):
        await fork.start("x", origin.token(3))
    session = await fork.start("x", origin.token(2))

    assert (session.next_step, session.lineage) == (3, f"{keys.encode_name(origin.name)}@2")


async def test_a_version_of_the_origin_is_never_announced_again(origin: Any) -> None:
    fork = fork_of(origin, "fork c")
    await fork.start("x", origin.token(2))

    with pytest.raises(ConflictError, match="version 2 is not above 2"):
        await announce(fork, 2, step=2)
    await announce(fork, 4, step=2)
    with pytest.raises(ConflictError, match="version 3 is not above 4"):
        await announce(fork, 3, step=2)

    assert fork.read_frontier().version_floor == 2
    assert newest(fork) == 4


STRANGER = RecoveryToken(lineage="main", step=2, chain_hash="ab")


async def test_invalid_start_of_a_fork_is_refused_with_its_reason(origin: Any) -> None:
    client, name = origin.store, origin.name

    with pytest.raises(ConflictError, match=r"step 3 of run .* is not committed; 2 steps are"):
        fork_run(client, name, "no", origin.token(3))
    with pytest.raises(StoreBehindError, match="'ab' as step 2"):
        fork_run(client, name, "no", STRANGER)
    with pytest.raises(StoreBehindError, match="5 steps"):
        fork_run(client, name, "no", replace(STRANGER, step=9))
    with pytest.raises(RunNotFoundError):
        fork_run(client, "nobody", "no", origin.token(2))
    with pytest.raises(ConflictError, match="into itself"):
        fork_run(client, name, name, origin.token(2))
    assert not [*client.scan_iter(match="ts:{no}*")]
    assert "no" not in list_runs(client)


async def test_released_step_is_refused_and_the_watermark_is_not(run: Any) -> None:
    await run.plan_steps(4)
    await run.commit(await run.start("s"), 1, 2, 3, 4)
    assert await run.advance_watermark() == 3

    with pytest.raises(ReleasedError, match=r"step 2 is no longer retained: .* step 3"):
        fork_run(run.store, run.name, "late", run.token(2))
    fork_run(run.store, run.name, "fork d", run.token(3))

    with pytest.raises(ReleasedError):
        token_of_step(run.store, run.name, 2)
    assert token_of_step(run.store, run.name, 3).chain_hash == run.manifests[3].hash


async def test_the_same_fork_again_changes_nothing_and_another_is_refused(origin: Any) -> None:
    client, name = origin.store, origin.name
    first = fork_run(client, name, "fork e", origin.token(2))
    fork = origin.run_named("fork e")
    await fork.start("x", origin.token(2))
    other = BatchingConfig(batch_groups=7, mini_batch_groups=7)

    async with fork.unchanged():
        again = fork_run(client, name, "fork e", origin.token(2))
        with pytest.raises(ConflictError, match="was not forked from there"):
            fork_run(client, name, "fork e", origin.token(1))
        with pytest.raises(ConflictError, match="with another config"):
            fork_run(client, name, "fork e", origin.token(2), config=other)
    fork_run(client, name, "fork e2", origin.token(2), config=other)

    assert again == first
    assert read_config(client, "fork e2")[1] == other


async def test_fork_names_its_origin_for_earlier_batches(
    server: EmbeddedServer, origin: Any
) -> None:
    fork_of(origin, "fork f")
    shown = read_run_ledger(server.url, "fork f")
    delete_run(origin.store, origin.name)

    again = fork_run(origin.store, origin.name, "fork f", origin.token(2))

    assert again.num_trajectories == 4
    found = (shown["accepted"], shown["origin"]["run"], shown["origin"]["step"])
    assert found == (4, origin.name, 2)
    with pytest.raises(ReleasedError, match=f"step 2 .* see the batch in '{origin.name}'"):
        read_batch(server.url, "fork f", 2)
    with pytest.raises(NotReadyError):
        read_batch(server.url, "fork f", 3)


async def test_a_fork_that_was_killed_is_finished_by_the_same_call(
    server: EmbeddedServer, origin: Any
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
    was_listed = "fork g" in list_runs(origin.store)
    session = await origin.start("s2", origin.token(2))  # and the origin has moved on
    await origin.commit(session, *range(3, 6))
    await origin.advance_watermark()
    fork_run(origin.store, origin.name, "fork g", origin.token(2))

    assert killed.returncode == -9, killed.stderr
    assert not was_listed
    assert "fork g" in list_runs(origin.store)


async def test_a_fork_from_the_beginning_has_no_history(origin: Any) -> None:
    fork = fork_of(origin, "fork h", START)

    session = await fork.start("x", START)

    assert session.next_step == 1
    fork.ledger().check()
    assert fork.ledger().accepted == 0


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_staleness": 0, "max_planned_ahead": 0}, "groups are live"),
        ({"max_bytes": 4096}, "max_bytes=4096"),
    ],
)
async def test_fork_has_the_capacity_of_a_run_that_trained_its_history(
    origin: Any, limit: dict[str, int], words: str
) -> None:
    fork = fork_of(origin, f"fork {words}", **limit)

    assert fork.held().held == 0
    await fork.open("g1")  # a name that the origin had
    with pytest.raises(RejectedError, match=words):
        await fork.open("g2")


async def test_name_of_a_run_deleted_just_now_makes_no_fork(origin: Any) -> None:
    client = origin.store
    fork_of(origin, "fork l", origin.token(1))
    delete_run(client, "fork l")

    again = fork_run(client, origin.name, "fork l", origin.token(2))

    assert (again.run, again.step) == (origin.name, 2)
    assert read_frontier(client, "fork l~2").origin == again
    with pytest.raises(RunNotFoundError, match="no run named 'fork l'"):
        read_frontier(client, "fork l")


async def test_a_rollback_in_a_fork_keeps_its_name_in_the_lineage(origin: Any) -> None:
    fork = fork_of(origin, "fork i")
    lineages = []
    for name in ("x", "y"):
        fork.store.hset(fork.keys.frontier, mapping={"stepped": 3, "planned": 3})
        lineages.append((await fork.start(name, origin.token(2))).lineage)

    base = f"{keys.encode_name(origin.name)}@2"
    assert lineages == [f"{base}-1", f"{base}-2"]


@pytest.mark.both_servers
async def test_fork_starts_with_the_config_in_force_and_no_pending_revision(origin: Any) -> None:
    client, name = origin.store, "fork of a revised run"
    first = read_config(client, origin.name)[1]
    second = replace(first, max_staleness=first.max_staleness + 1, batch_groups=2)
    planned = max(origin.manifests)
    revise_config(client, origin.name, second, from_step=planned + 1)
    await announce_revision(origin.term, ConfigRevised(revision=2, step=planned + 1))
    revise_config(client, origin.name, replace(second, max_staleness=9), from_step=planned + 9)

    fork_run(client, origin.name, name, origin.token(2))
    again = fork_run(client, origin.name, name, origin.token(2))
    number = revise_config(client, name, first, from_step=3)

    stored = read_revisions(client, name).stored
    frontier = read_frontier(client, name)
    assert [each.config for each in stored] == [second, first]
    assert (again.step, number, stored[0].number) == (2, 2, 1)
    assert frontier.next_revision == 3
    assert frontier.num_live_groups == 2 * second.batch_groups
