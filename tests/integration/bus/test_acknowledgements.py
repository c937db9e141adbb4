"""Acknowledgements of a trainer session: steps and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import ConflictError, FencedError, StoreBehindError
from turnstream.types import RecoveryToken, VersionAnnounced
from turnstream_server.bus.sessions.sessions import (
    acknowledge_committed,
    acknowledge_stepped,
    announce_version,
)

pytestmark = pytest.mark.redis

BEGINNING = RecoveryToken(lineage="main", step=0, chain_hash="")


def token_of(step: int, chain_hash: str) -> RecoveryToken:
    return RecoveryToken(lineage="main", step=step, chain_hash=chain_hash)


async def test_a_batch_is_stepped_and_then_committed(run: Any) -> None:
    await run.plan_steps(3)
    session = await run.start("s")

    assert await run.trained() == (6, 0, 0)
    first = await run.step(session, 1)
    await run.step(session, 2)
    assert await run.trained() == (2, 4, 0)
    await run.commit_token(session, first)
    assert await run.trained() == (2, 2, 2)

    assert first == RecoveryToken(lineage="main", step=1, chain_hash=run.manifests[1].hash)


async def test_acknowledging_again_changes_nothing_and_gives_the_same_token(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    first = await run.step(session, 1)
    second = await run.step(session, 2)
    await run.commit_token(session, second)
    before = await run.dump()

    assert await run.step(session, 1) == first
    assert await run.step(session, 2) == second
    await run.commit_token(session, second)
    await run.commit_token(session, first)
    await run.commit_token(session, BEGINNING)

    assert await run.dump() == before


async def test_stepped_batch_wakes_groups_that_wait_for_capacity(run: Any) -> None:
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

    assert await run.frontier() == (2, 0, 0)


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

    assert await run.frontier() == (1, 0, 0)


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
    before = await run.dump()

    with pytest.raises(FencedError):
        await run.step(old, 1)
    with pytest.raises(FencedError):
        await run.commit_token(old, token)

    assert await run.dump() == before


async def test_lost_session_is_fenced_although_another_has_its_epoch(run: Any) -> None:
    # A power cut took the start of "lost" away; "second" was given the same epoch since.
    await run.plan_steps(1)
    second = await run.start("second")
    one = {"session_epoch": second.session_epoch}
    token = token_of(1, run.manifests[1].hash)
    step = {"step": 1, "manifest_hash": run.manifests[1].hash}

    with pytest.raises(FencedError, match='"lost" has ended or was lost, "second" has its epoch'):
        await acknowledge_stepped(run.client, run.name, **one, **step, session="lost")
    await acknowledge_stepped(run.client, run.name, **one, **step, session="second")
    with pytest.raises(FencedError, match='"lost" has ended or was lost'):
        await acknowledge_committed(run.client, run.name, **one, token=token, session="lost")
    announced = VersionAnnounced(version=1, step=1, lineage="main", weights_uri="")
    with pytest.raises(FencedError, match='"lost" has ended or was lost'):
        await announce_version(run.client, run.name, announced, **one, session="lost")
    await acknowledge_committed(run.client, run.name, **one, token=token, session="second")

    assert await run.frontier() == (1, 1, 1)


async def test_trainer_of_a_lost_batch_gets_an_error_with_the_step(run: Any) -> None:
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
