"""Acknowledgements of a trainer session: steps, checkpoints and versions."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from turnstream.errors import (
    ConflictError,
    FencedError,
    InvalidConfigError,
    RejectedError,
    StoreBehindError,
)
from turnstream.records.snapshots import decode_snapshot
from turnstream.store.client import keys
from turnstream.store.run.runs import newest_version
from turnstream.types import RecoveryToken, VersionAnnounced
from turnstream_server.ledger.admin.forks import fork_run
from turnstream_server.ledger.sessions.session_writes import TrainerRank
from turnstream_server.ledger.sessions.sessions import (
    acknowledge_committed,
    acknowledge_stepped,
    announce_version,
)

BEGINNING = RecoveryToken(lineage="main", step=0, chain_hash="")


def token_of(step: int, chain_hash: str) -> RecoveryToken:
    return RecoveryToken(lineage="main", step=step, chain_hash=chain_hash)


async def test_acknowledging_again_changes_nothing_and_gives_the_same_token(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    first = await run.step(session, 1)
    second = await run.step(session, 2)
    await run.commit_token(session, second)
    async with run.unchanged():
        assert await run.step(session, 1) == first
        assert await run.step(session, 2) == second
        await run.commit_token(session, second)
        await run.commit_token(session, first)
        await run.commit_token(session, BEGINNING)


async def test_stepped_batch_wakes_groups_that_wait_for_capacity(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s")
    before = await run.last_wake_up()

    await run.step(session, 1)

    assert await run.last_wake_up() != before


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (1, ConflictError, "step 1 has the manifest"),
        (2, ConflictError, "step 2 does not follow step 0"),
        (3, StoreBehindError, "step 3 was trained .* store is 2"),
    ],
)
async def test_step_that_is_not_next_or_of_another_manifest_is_refused(
    run: Any, step: int, error: type[Exception], words: str
) -> None:
    await run.plan_steps(2)
    session = await run.start("s")

    with pytest.raises(error, match=words):
        await run.step(session, step, manifest_hash="0" * 64)

    assert await run.frontier() == (2, 0, 0)


async def test_unstepped_batch_cannot_be_committed(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    await run.step(session, 1)

    with pytest.raises(ConflictError, match="step 2 is not stepped"):
        await run.commit_token(session, token_of(2, run.manifests[2].hash))
    with pytest.raises(ConflictError, match="step 1 has the manifest"):
        await run.commit_token(session, token_of(1, run.manifests[2].hash))

    assert await run.frontier() == (2, 1, 0)


async def test_a_session_that_was_replaced_can_acknowledge_nothing(run: Any) -> None:
    await run.plan_steps(2)
    old = await run.start("old")
    token = await run.step(old, 1)
    await run.start("new")
    async with run.unchanged():
        with pytest.raises(FencedError):
            await run.step(old, 1)
        with pytest.raises(FencedError):
            await run.commit_token(old, token)
        with pytest.raises(FencedError):
            await announce(run, version(0))


async def test_lost_session_is_fenced_although_another_has_its_epoch(run: Any) -> None:
    # A power cut took the start of "lost" away; "second" was given the same epoch since.
    await run.plan_steps(1)
    second = await run.start("second")
    lost, found = (TrainerRank(second.session_epoch, each) for each in ("lost", "second"))
    token = token_of(1, run.manifests[1].hash)
    step: Any = {"step": 1, "manifest_hash": run.manifests[1].hash}

    with pytest.raises(FencedError, match='"lost" has ended or was lost, "second" has its epoch'):
        await acknowledge_stepped(run.client, run.name, lost, **step)
    await acknowledge_stepped(run.client, run.name, found, **step)
    with pytest.raises(FencedError, match='"lost" has ended or was lost'):
        await acknowledge_committed(run.client, run.name, lost, token)
    with pytest.raises(FencedError, match='"lost" has ended or was lost'):
        await announce_version(run.client, run.name, lost, version(1, step=1))
    await acknowledge_committed(run.client, run.name, found, token)

    assert await run.frontier() == (1, 1, 1)


def version(
    number: int, *, step: int = 0, lineage: str = "main", uri: str = ""
) -> VersionAnnounced:
    return VersionAnnounced(version=number, step=step, lineage=lineage, weights_uri=uri)


async def announce(run: Any, announced: VersionAnnounced, *, session_epoch: int = 1) -> None:
    await announce_version(run.client, run.name, TrainerRank(session_epoch), announced)


async def test_admission_waits_for_announcements_of_a_session_that_announces(
    start_run: Any,
) -> None:
    run = await start_run(max_staleness=0, max_planned_ahead=0, batch_groups=1)
    num_groups = 0

    async def is_admitted() -> bool:
        nonlocal num_groups
        try:
            await run.open(f"g{num_groups}", num_sealed=2)
        except RejectedError:
            return False
        num_groups += 1
        return True

    async def train(session: Any, step: int) -> Any:
        await run.plan(f"g{num_groups - 1}")
        return await run.step(session, step)

    session = await run.start("never announces")
    assert [await is_admitted(), await is_admitted()] == [True, False]
    await train(session, 1)
    assert await is_admitted()
    await announce(run, version(1, step=1))
    token = await train(session, 2)
    assert not await is_admitted()
    before = await run.last_wake_up()
    await announce(run, version(2, step=2))
    assert await run.last_wake_up() != before
    assert await is_admitted()
    await announce(run, version(3, step=3))  # before its step is done
    await train(session, 3)
    assert await is_admitted()
    token = await train(session, 4)
    assert not await is_admitted()
    await run.start("after it died before its announcement", token=token)
    assert await is_admitted()


async def test_an_announced_version_is_the_newest_and_an_event_of_the_plan(run: Any) -> None:
    await run.start("s")

    await announce(run, version(0))
    await announce(run, version(4, step=2, uri="file:///weights/4"))

    assert newest_version(run.store, run.name) == version(4, step=2, uri="file:///weights/4")
    assert await run.events() == [
        version(0),
        version(4, step=2, uri="file:///weights/4"),
    ]


async def test_step_gets_the_newest_version_of_an_earlier_step(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    await run.step(session, 1)
    await announce(run, version(7, step=1))
    await announce(run, version(8, step=2))
    caller = TrainerRank(session.session_epoch)
    own: Any = {"step": 2, "manifest_hash": run.manifests[2].hash}

    first, again = [await acknowledge_stepped(run.client, run.name, caller, **own) for _ in "12"]

    assert first == again
    assert first.version_before == 7


async def test_announcing_the_same_again_changes_nothing(run: Any) -> None:
    await run.start("s")
    await announce(run, version(0))
    await announce(run, version(1))
    async with run.unchanged():
        await announce(run, version(0))
        await announce(run, version(1))


@pytest.mark.both_servers
async def test_a_version_is_never_used_for_other_weights(run: Any) -> None:
    await run.start("s")
    await announce(run, version(5))
    async with run.unchanged():
        with pytest.raises(ConflictError, match="version 5 was announced with another content"):
            await announce(run, version(5, step=1))
        with pytest.raises(ConflictError, match="version 4 is not above 5"):
            await announce(run, version(4))


async def test_weights_of_an_abandoned_lineage_are_not_announced(run: Any) -> None:
    # A replica that had not heard of the trainer's going back announced into the dead lineage.
    await run.plan_steps(2)
    await run.commit(await run.start("first"), 1, 2)
    await run.start("back", run.token(1))
    async with run.refuses(FencedError, 'goes on in lineage "main-1", not in "main"'):
        await announce(run, version(0, step=1), session_epoch=2)


async def test_a_version_below_0_is_refused(run: Any) -> None:
    with pytest.raises(InvalidConfigError, match="version: -1"):
        await announce(run, version(-1))


StartRun = Callable[..., Awaitable[Any]]


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [(1, 2, {1: 1, 2: 1, 3: 2, 4: 4}), (2, 1, {1: 1, 2: 1, 3: 1, 4: 4})],
)
async def test_undone_versions_are_as_old_in_a_fork_as_in_its_origin(
    client: redis.Redis, start_run: StartRun, first: int, then: int, expected: dict[int, int]
) -> None:
    # The trainer announces version 1 after step 3 and 2 after step 4, goes back to one step,
    # announces 3 after step 3, goes back to another one, and announces 4 after step 4.
    run = await start_run()
    await run.plan_steps(4)
    await run.commit(await run.start("s"), 1, 2, 3, 4)
    await announce(run, version(1, step=3))
    await announce(run, version(2, step=4))
    second = await run.start("second", run.token(first))
    for step in range(first + 1, 4):
        await run.step(second, step)
    await announce(run, version(3, step=3, lineage="main-1"), session_epoch=2)
    third = await run.start("third", run.token(then))
    for step in range(then + 1, 5):
        await run.commit_token(third, await run.step(third, step))
    await announce(run, version(4, step=4, lineage="main-2"), session_epoch=3)

    new_run = f"fork of {run.name}"
    fork_run(client, run.name, new_run, run.token(4))

    record: Any = client.hget(keys.run_keys(new_run).snapshot, "record")
    assert decode_snapshot(record).versions == expected
