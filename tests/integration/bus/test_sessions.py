"""Trainer sessions: their start, and the checkpoint they continue from."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import ConflictError, FencedError, InvalidConfigError, StoreBehindError
from turnstream.records.events import decode_event
from turnstream.types import Event, RecoveryToken, RolledBack
from turnstream_server.bus.sessions.sessions import TrainerSession, start_session

pytestmark = pytest.mark.redis

BEGINNING = RecoveryToken(lineage="main", step=0, chain_hash="")


def token_of(step: int, chain_hash: str) -> RecoveryToken:
    return RecoveryToken(lineage="main", step=step, chain_hash=chain_hash)


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
async def test_ranks_of_a_session_that_disagree_get_an_error(
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

    assert await run.frontier() == (1, 1, 0)


async def test_replaced_session_cannot_start_again(run: Any) -> None:
    # A rank of the old trainer that asked late fenced the new trainer, which had begun meanwhile.
    await run.plan_steps(1)
    await run.start("old")
    new = await run.start("new")

    with pytest.raises(FencedError, match="session 1 has ended, 2 has begun"):
        await run.start("old")

    await run.step(new, 1)


async def test_stepped_uncommitted_batch_returns_after_a_restart(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    token = await run.step(session, 1)
    await run.commit_token(session, token)
    await run.step(session, 2)

    again = await run.start("second", token)

    assert (again.next_step, again.session_epoch, again.lineage) == (2, 2, "main-1")
    assert list(again.returning_steps) == [2]
    assert not again.is_rollback
    assert await run.frontier() == (3, 1, 1)
    assert await run.trained() == (4, 0, 2)


async def test_a_restart_without_a_token_begins_again_while_nothing_is_committed(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("first")
    await run.step(session, 1)

    again = await run.start("second")

    assert (again.next_step, again.lineage) == (1, "main-1")
    assert await run.trained() == (4, 0, 0)


async def test_a_restart_without_a_token_is_refused_when_batches_are_committed(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("first")
    await run.commit_token(session, await run.step(session, 1))

    with pytest.raises(ConflictError, match="present the recovery token"):
        await run.start("second")

    assert await run.step(session, 1)


async def test_the_token_of_step_0_goes_back_to_the_start(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("first")
    await run.step(session, 1)
    await run.commit_token(session, await run.step(session, 2))

    again = await run.start("second", BEGINNING)

    assert again.is_rollback
    assert list(again.returning_steps) == [1, 2]
    assert await run.frontier() == (2, 0, 0)
    assert await run.trained() == (4, 0, 0)


async def test_an_older_token_is_a_rollback_and_the_same_plan_comes_back(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    tokens = [await run.step(session, step) for step in (1, 2, 3)]
    await run.commit_token(session, tokens[2])

    again = await run.start("second", tokens[0])
    token = await run.step(again, 2)

    assert again.is_rollback
    assert (again.previous_stepped, again.previous_committed) == (3, 3)
    assert token == RecoveryToken(lineage="main-1", step=2, chain_hash=tokens[1].chain_hash)
    assert await run.frontier() == (3, 2, 1)


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


async def test_token_proves_a_checkpoint_that_was_never_reported(run: Any) -> None:
    # The trainer died between the checkpoint on disk and its acknowledgement.
    await run.plan_steps(2)
    session = await run.start("first")
    token = await run.step(session, 1)

    await run.start("second", token)

    assert await run.frontier() == (2, 1, 1)


async def test_a_trainer_that_goes_back_tells_the_plan_so_once(run: Any) -> None:
    async def rollbacks() -> list[Event]:
        entries = await run.client.xrange(run.keys.events)
        events = [decode_event(fields[b"r"]) for _, fields in entries]
        return [event for event in events if isinstance(event, RolledBack)]

    await run.plan_steps(3)
    session = await run.start("first")
    tokens = [await run.step(session, step) for step in (1, 2, 3)]

    await run.start("on", tokens[2])
    going_on = await rollbacks()
    await run.start("back", tokens[0])
    await run.start("back", tokens[0])

    assert going_on == []
    assert await rollbacks() == [RolledBack(step=1)]


async def test_the_checkpoint_of_an_abandoned_lineage_can_be_continued(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    tokens = [await run.step(session, step) for step in (1, 2, 3)]
    await run.start("second", tokens[0])

    again = await run.start("third", tokens[2])

    assert (again.next_step, again.lineage) == (4, "main-2")
    assert await run.trained() == (0, 0, 6)


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

    assert await run.frontier() == (2, 0, 0)


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


@pytest.mark.parametrize(("next_step", "is_rollback"), [(3, True), (4, False)])
def test_a_session_that_begins_with_a_committed_batch_is_a_rollback(
    next_step: int, is_rollback: bool
) -> None:
    session = TrainerSession(
        session_epoch=1,
        next_step=next_step,
        lineage="main",
        previous_stepped=5,
        previous_committed=3,
    )

    assert session.is_rollback == is_rollback
