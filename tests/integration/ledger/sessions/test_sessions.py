"""Trainer sessions: their start, and the checkpoint they continue from."""

from dataclasses import replace
from typing import Any

import pytest

from turnstream.errors import ConflictError, FencedError, InvalidConfigError, StoreBehindError
from turnstream.records.events import decode_event
from turnstream.types import Event, RecoveryToken, RolledBack, VersionAnnounced
from turnstream_server.ledger.sessions import sessions
from turnstream_server.ledger.sessions.session_writes import Facts, TrainerRank

BEGINNING = RecoveryToken(lineage="main", step=0, chain_hash="")


def token_of(step: int, chain_hash: str) -> RecoveryToken:
    return RecoveryToken(lineage="main", step=step, chain_hash=chain_hash)


async def test_all_ranks_that_start_the_same_session_get_the_same_epoch(run: Any) -> None:
    await run.plan_steps(1)
    first = await run.start("s")
    before = run.dump()

    again = await run.start("s")

    assert again == first
    assert (first.session_epoch, first.next_step, first.lineage) == (1, 1, "main")
    assert run.dump() == before


@pytest.mark.parametrize(
    ("dp_world_size", "token"), [(2, None), (1, BEGINNING)], ids=["world size", "token"]
)
async def test_ranks_of_a_session_that_disagree_get_an_error(
    run: Any, dp_world_size: int, token: RecoveryToken | None
) -> None:
    # As two sessions, each would fence the other again and again.
    await run.start("s")

    with pytest.raises(ConflictError, match="session s began with"):
        await run.start("s", token, dp_world_size=dp_world_size)


async def test_a_session_name_cannot_be_used_for_a_second_start(run: Any) -> None:
    # A trainer that restarts under a fixed name has lost its weights. The steps of the first start
    # would be missing from the new weights.
    await run.plan_steps(1)
    session = await run.start("trainer")
    await run.step(session, 1)

    with pytest.raises(ConflictError, match="a session name of its own"):
        await run.start("trainer")

    assert await run.frontier() == (1, 1, 0)


async def test_replaced_session_cannot_start_again(run: Any) -> None:
    # A late call of an old rank fenced the new trainer.
    await run.plan_steps(1)
    await run.start("old")
    new = await run.start("new")

    with pytest.raises(FencedError, match="session 1 has ended, 2 has begun"):
        await run.start("old")

    await run.step(new, 1)


async def test_session_knows_a_version_announced_while_it_starts(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its trainer would announce the same number with other weights, and be refused.
    old = TrainerRank((await run.start("old")).session_epoch)
    read = sessions._read

    async def read_before_announcement(*args: Any) -> Facts:
        facts = await read(*args)
        monkeypatch.undo()
        announced = VersionAnnounced(version=3, step=0, lineage="", weights_uri="")
        await sessions.announce_version(run.client, run.name, old, announced)
        return facts

    monkeypatch.setattr(sessions, "_read", read_before_announcement)

    assert (await run.start("new")).newest_version == 3


@pytest.mark.parametrize(
    ("stepped", "committed", "token_step", "returning", "is_rollback", "trained"),
    [
        pytest.param(2, 1, 1, [2], False, (4, 0, 2), id="after the checkpoint"),
        pytest.param(1, 0, None, [1], False, (6, 0, 0), id="no checkpoint and no token"),
        pytest.param(1, 0, 1, [], False, (4, 0, 2), id="checkpoint that was never reported"),
        pytest.param(2, 2, 0, [1, 2], True, (6, 0, 0), id="start of the run"),
        pytest.param(3, 2, 1, [2, 3], True, (4, 0, 2), id="older checkpoint"),
    ],
)
async def test_session_continues_after_the_step_of_its_token(
    run: Any,
    stepped: int,
    committed: int,
    token_step: int | None,
    returning: list[int],
    is_rollback: bool,
    trained: tuple[int, int, int],
) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    tokens = [BEGINNING, *[await run.step(session, step) for step in range(1, stepped + 1)]]
    if committed:
        await run.commit_token(session, tokens[committed])
    before = await run.last_wake_up()

    again = await run.start("second", None if token_step is None else tokens[token_step])

    step = token_step or 0
    assert (again.next_step, again.session_epoch) == (step + 1, 2)
    assert again.lineage == ("main-1" if returning else "main")
    assert (again.previous_stepped, again.previous_committed) == (stepped, committed)
    assert (list(again.returning_steps), again.is_rollback) == (returning, is_rollback)
    assert await run.frontier() == (3, step, step)
    assert await run.trained() == trained
    assert await run.last_wake_up() != before


async def test_a_restart_without_a_token_is_refused_when_batches_are_committed(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("first")
    await run.commit_token(session, await run.step(session, 1))

    with pytest.raises(ConflictError, match="present the recovery token"):
        await run.start("second")

    assert await run.step(session, 1)


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


async def test_run_keeps_its_newest_16_rollbacks(run: Any) -> None:
    await run.plan_steps(1)
    for number in range(18):
        session = await run.start(f"s{number}", BEGINNING)
        await run.step(session, 1)

    kept = [each.lineage for each in run.read_frontier().rollbacks]

    assert kept == [f"main-{number}" for number in range(17, 1, -1)]


async def test_the_checkpoint_of_an_abandoned_lineage_can_be_continued(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("first")
    tokens = [await run.step(session, step) for step in (1, 2, 3)]
    second = await run.start("second", tokens[0])
    token = await run.step(second, 2)

    again = await run.start("third", tokens[2])

    assert token == replace(tokens[1], lineage="main-1")
    assert (again.next_step, again.lineage) == (4, "main-2")
    assert await run.trained() == (0, 0, 6)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (7, "step 7, but the newest batch of this store is 2"),
        (0, "this store has"),
        (2, "this store has"),
    ],
)
async def test_store_without_the_batch_of_the_token_is_behind(
    run: Any, step: int, words: str
) -> None:
    await run.plan_steps(2)
    async with run.refuses(StoreBehindError, words):
        await run.start("s", token_of(step, "0" * 64))


@pytest.mark.parametrize(
    ("field", "values"), [("session", {"session": ""}), ("dp_world_size", {"dp_world_size": 0})]
)
async def test_a_start_with_a_senseless_argument_names_it(
    run: Any, field: str, values: dict[str, Any]
) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field}: "):
        await run.start(**{"session": "s", **values})
