from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio

from turnstream.errors import (
    ConflictError,
    FencedError,
    InvalidConfigError,
    RunNotFoundError,
    StoreBehindError,
)
from turnstream.types import RecoveryToken, TrajectoryState, VersionAnnounced
from turnstream_server.bus.frontier import read_frontier_async
from turnstream_server.bus.ledger import read_ledger_async
from turnstream_server.bus.sessions import (
    acknowledge_committed,
    acknowledge_stepped,
    start_session,
)
from turnstream_server.bus.versions import announce_version

pytestmark = pytest.mark.redis

BEGINNING = RecoveryToken(lineage="main", step=0, chain_hash="")


def token_of(step: int, chain_hash: str) -> RecoveryToken:
    return RecoveryToken(lineage="main", step=step, chain_hash=chain_hash)


async def commit(run: Any, session: Any, token: RecoveryToken) -> None:
    await acknowledge_committed(
        run.client, run.name, session_epoch=session.session_epoch, token=token
    )


async def frontier(run: Any) -> tuple[int, int, int]:
    found = await read_frontier_async(run.client, run.name)
    return found.planned, found.stepped, found.committed


async def trained(run: Any) -> tuple[int, int, int]:
    counts = await read_ledger_async(run.client, run.name)
    counts.check()
    return (
        counts.by_state[TrajectoryState.PLANNED],
        counts.by_state[TrajectoryState.STEPPED],
        counts.by_state[TrajectoryState.COMMITTED],
    )


# --------------------------------------------------------------------------------------
# acknowledgements


async def test_a_batch_is_stepped_and_then_committed(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("s")

    assert await trained(run) == (6, 0, 0)
    first = await run.step(session, 1)
    await run.step(session, 2)
    assert await trained(run) == (2, 4, 0)
    await commit(run, session, first)
    assert await trained(run) == (2, 2, 2)

    assert first == RecoveryToken(lineage="main", step=1, chain_hash=run.manifests[1].hash)


async def test_acknowledging_again_changes_nothing_and_gives_the_same_token(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    first = await run.step(session, 1)
    second = await run.step(session, 2)
    await commit(run, session, second)
    before = await run.dump()

    assert await run.step(session, 1) == first
    assert await run.step(session, 2) == second
    await commit(run, session, second)
    await commit(run, session, first)
    await commit(run, session, BEGINNING)

    assert await run.dump() == before


async def test_a_step_wakes_up_whoever_waits_for_capacity(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s")
    before = await run.last_wake_up()

    await run.step(session, 1)

    assert await run.last_wake_up() != before


async def test_a_step_cannot_be_left_out(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")

    with pytest.raises(ConflictError, match="step 2 does not follow step 0"):
        await run.step(session, 2)

    assert await frontier(run) == (2, 0, 0)


async def test_a_step_that_was_trained_from_another_manifest_is_refused(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s")

    with pytest.raises(ConflictError, match="step 1 has the manifest"):
        await acknowledge_stepped(
            run.client,
            run.name,
            session_epoch=session.session_epoch,
            step=1,
            manifest_hash="0" * 64,
        )

    assert await frontier(run) == (1, 0, 0)


async def test_what_was_not_stepped_cannot_be_committed(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    await run.step(session, 1)

    with pytest.raises(ConflictError, match="step 2 is not stepped"):
        await commit(run, session, token_of(2, run.manifests[2].hash))
    with pytest.raises(ConflictError, match="step 1 has the manifest"):
        await commit(run, session, token_of(1, run.manifests[2].hash))

    assert await frontier(run) == (2, 1, 0)


async def test_a_session_that_was_replaced_can_acknowledge_nothing(run: Any) -> None:
    await run.plan_steps(2)
    old = await run.start("old")
    token = await run.step(old, 1)
    await run.start("new")
    before = await run.dump()

    with pytest.raises(FencedError):
        await run.step(old, 1)
    with pytest.raises(FencedError):
        await commit(run, old, token)

    assert await run.dump() == before


async def test_a_run_that_does_not_exist_has_no_session(async_client: redis.asyncio.Redis) -> None:
    with pytest.raises(RunNotFoundError):
        await start_session(async_client, "none", session="s", dp_world_size=1, token=None)
    with pytest.raises(RunNotFoundError):
        await acknowledge_stepped(async_client, "none", session_epoch=1, step=1, manifest_hash="")
    with pytest.raises(RunNotFoundError):
        await acknowledge_committed(async_client, "none", session_epoch=1, token=BEGINNING)
    with pytest.raises(RunNotFoundError):
        await read_frontier_async(async_client, "none")

    assert await async_client.exists("ts:{none}:frontier") == 0


# --------------------------------------------------------------------------------------
# starts


async def test_all_ranks_that_start_the_same_session_get_the_same_epoch(run: Any) -> None:
    await run.plan_steps(1)
    first = await run.start("s")
    before = await run.dump()

    again = await run.start("s")

    assert again == first
    assert (first.session_epoch, first.next_step, first.lineage) == (1, 1, "main")
    assert await run.dump() == before


@pytest.mark.parametrize(
    ("dp_world_size", "token"), [(2, None), (1, BEGINNING)], ids=["world size", "token"]
)
async def test_ranks_of_a_session_that_disagree_are_told_so(
    run: Any, dp_world_size: int, token: RecoveryToken | None
) -> None:
    # Were they two sessions, each would fence the other for ever.
    await run.start("s")

    with pytest.raises(ConflictError, match="session s began with"):
        await start_session(
            run.client, run.name, session="s", dp_world_size=dp_world_size, token=token
        )


async def test_a_session_name_cannot_be_used_for_a_second_start(run: Any) -> None:
    # A trainer that restarts under a fixed name has lost its weights: to go on after the steps of
    # the first start would leave them out of the new weights without a word.
    await run.plan_steps(1)
    session = await run.start("trainer")
    await run.step(session, 1)

    with pytest.raises(ConflictError, match="a session name of its own"):
        await run.start("trainer")

    assert await frontier(run) == (1, 1, 0)


async def test_a_session_that_was_replaced_cannot_begin_again(run: Any) -> None:
    # A rank of the old trainer that asked late fenced the new trainer, which had begun meanwhile.
    await run.plan_steps(1)
    await run.start("old")
    new = await run.start("new")

    with pytest.raises(FencedError, match="session 1 is over, 2 has begun"):
        await run.start("old")

    await run.step(new, 1)


async def test_what_was_stepped_and_not_committed_comes_back_after_a_restart(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    token = await run.step(session, 1)
    await commit(run, session, token)
    await run.step(session, 2)

    again = await run.start("second", token)

    assert (again.next_step, again.session_epoch, again.lineage) == (2, 2, "main-1")
    assert list(again.returning_steps) == [2]
    assert not again.is_rollback
    assert await frontier(run) == (3, 1, 1)
    assert await trained(run) == (4, 0, 2)


async def test_a_restart_without_a_token_begins_again_while_nothing_is_committed(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("first")
    await run.step(session, 1)

    again = await run.start("second")

    assert (again.next_step, again.lineage) == (1, "main-1")
    assert await trained(run) == (4, 0, 0)


async def test_a_restart_without_a_token_is_refused_when_batches_are_committed(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("first")
    await commit(run, session, await run.step(session, 1))

    with pytest.raises(ConflictError, match="present the recovery token"):
        await run.start("second")

    assert await run.step(session, 1)


async def test_the_token_of_step_0_goes_back_to_the_start(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("first")
    await run.step(session, 1)
    await commit(run, session, await run.step(session, 2))

    again = await run.start("second", BEGINNING)

    assert again.is_rollback
    assert list(again.returning_steps) == [1, 2]
    assert await frontier(run) == (2, 0, 0)
    assert await trained(run) == (4, 0, 0)


async def test_an_older_token_is_a_rollback_and_the_same_plan_comes_back(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    tokens = [await run.step(session, step) for step in (1, 2, 3)]
    await commit(run, session, tokens[2])

    again = await run.start("second", tokens[0])
    token = await run.step(again, 2)

    assert again.is_rollback
    assert (again.previous_stepped, again.previous_committed) == (3, 3)
    assert token == RecoveryToken(lineage="main-1", step=2, chain_hash=tokens[1].chain_hash)
    assert await frontier(run) == (3, 2, 1)


async def test_every_rollback_names_a_new_lineage(run: Any) -> None:
    await run.plan_steps(2)
    lineages = []
    for number in range(3):
        session = await run.start(f"session {number}")
        lineages.append(session.lineage)
        await run.step(session, 1)

    assert lineages == ["main", "main-1", "main-2"]


async def test_a_start_at_the_same_place_keeps_the_lineage(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("first")
    token = await run.step(session, 1)

    again = await run.start("second", token)

    assert (again.next_step, again.lineage) == (2, "main")
    assert list(again.returning_steps) == []


async def test_a_token_is_proof_of_a_checkpoint_that_nobody_could_report(run: Any) -> None:
    # The trainer died between the checkpoint on disk and its acknowledgement.
    await run.plan_steps(2)
    session = await run.start("first")
    token = await run.step(session, 1)

    await run.start("second", token)

    assert await frontier(run) == (2, 1, 1)


async def test_the_checkpoint_of_an_abandoned_lineage_can_be_continued(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    tokens = [await run.step(session, step) for step in (1, 2, 3)]
    await run.start("second", tokens[0])

    again = await run.start("third", tokens[2])

    assert (again.next_step, again.lineage) == (4, "main-2")
    assert await trained(run) == (0, 0, 6)


async def test_a_store_that_lacks_the_batch_of_the_token_is_behind(run: Any) -> None:
    await run.plan_steps(2)
    before = await run.dump()

    with pytest.raises(StoreBehindError, match="step 7, but the newest batch of this store is 2"):
        await run.start("s", token_of(7, "0" * 64))

    assert await run.dump() == before


@pytest.mark.parametrize("step", [0, 2])
async def test_a_store_whose_chain_differs_from_the_token_is_behind(run: Any, step: int) -> None:
    await run.plan_steps(2)

    with pytest.raises(StoreBehindError, match="this store has"):
        await run.start("s", token_of(step, "0" * 64))

    assert await frontier(run) == (2, 0, 0)


async def test_a_start_wakes_up_the_calls_of_the_session_before(run: Any) -> None:
    await run.start("first")
    before = await run.last_wake_up()

    await run.start("second")

    assert await run.last_wake_up() != before


@pytest.mark.parametrize(
    ("field", "values"), [("session", {"session": ""}), ("dp_world_size", {"dp_world_size": 0})]
)
async def test_a_start_with_a_senseless_argument_names_it(
    run: Any, field: str, values: dict[str, Any]
) -> None:
    arguments: dict[str, Any] = {"session": "s", "dp_world_size": 1, "token": None} | values

    with pytest.raises(InvalidConfigError, match=f"^{field}: "):
        await start_session(run.client, run.name, **arguments)


async def test_a_session_that_the_store_lost_is_fenced_though_another_has_its_epoch(
    run: Any,
) -> None:
    # A power cut took the start of "lost" away; "second" was given the same epoch since.
    await run.plan_steps(1)
    second = await run.start("second")
    one = {"session_epoch": second.session_epoch}
    token = token_of(1, run.manifests[1].hash)
    step = {"step": 1, "manifest_hash": run.manifests[1].hash}

    with pytest.raises(FencedError, match='"lost" is over or was lost, "second" has its epoch'):
        await acknowledge_stepped(run.client, run.name, **one, **step, session="lost")
    await acknowledge_stepped(run.client, run.name, **one, **step, session="second")
    with pytest.raises(FencedError, match='"lost" is over or was lost'):
        await acknowledge_committed(run.client, run.name, **one, token=token, session="lost")
    announced = VersionAnnounced(version=1, step=1, lineage="main", weights_uri="")
    with pytest.raises(FencedError, match='"lost" is over or was lost'):
        await announce_version(run.client, run.name, announced, **one, session="lost")
    await acknowledge_committed(run.client, run.name, **one, token=token, session="second")

    assert await frontier(run) == (1, 1, 1)


async def test_a_step_whose_batch_the_store_lost_is_told_to_whoever_trained_it(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s")

    with pytest.raises(StoreBehindError, match=r"step 2 was trained .* store is 1"):
        await acknowledge_stepped(
            run.client,
            run.name,
            session_epoch=session.session_epoch,
            step=2,
            manifest_hash="0" * 64,
        )
