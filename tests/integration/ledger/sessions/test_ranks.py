"""The batches of the ranks of a session, and the consequences of a difference."""

import asyncio
from typing import Any

import pytest

from turnstream.errors import ConflictError, FencedError, NotReadyError, StoreBehindError
from turnstream.store.client import keys
from turnstream.types import RecoveryToken
from turnstream_server.ledger.sessions.session_writes import TrainerRank, TrainerSession
from turnstream_server.ledger.sessions.sessions import record_rank

OTHER = "0" * 64


async def hear(run: Any, session: TrainerSession, dp_rank: int, step: int, **said: Any) -> None:
    if "manifest_hash" not in said:
        said["manifest_hash"] = run.manifests[step].hash
    caller = TrainerRank(session.session_epoch, "", dp_rank)
    await record_rank(run.client, run.name, caller, step=step, **{"has": True, **said})


async def step_all(run: Any, session: TrainerSession, step: int) -> RecoveryToken:
    """Acknowledge a step on two ranks."""
    with pytest.raises(NotReadyError, match=f"step {step}: dp_rank 1 has not stepped it"):
        await run.step(session, step)
    return await run.step(session, step, dp_rank=1)


async def test_step_and_commit_count_once_every_rank_has_called(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s", dp_world_size=2)

    token = await step_all(run, session, 1)
    assert await run.step(session, 1) == token  # repeated
    await run.commit_token(session, token)
    assert await run.frontier() == (1, 1, 0)
    await run.commit_token(session, token, dp_rank=1)

    assert await run.frontier() == (1, 1, 1)


async def test_ranks_that_call_at_once_are_all_counted(run: Any) -> None:
    await run.plan_steps(1)
    ranks = range(16)

    async def step(rank: int) -> RecoveryToken:
        while True:
            try:
                return await run.step(session, 1, dp_rank=rank)
            except NotReadyError:
                await asyncio.sleep(0)

    session, *others = await asyncio.gather(*(run.start("s", dp_world_size=16) for _ in ranks))
    token, *tokens = await asyncio.gather(*map(step, ranks))
    await asyncio.gather(*(run.commit_token(session, token, dp_rank=rank) for rank in ranks))

    assert {session.session_epoch, *(each.session_epoch for each in others)} == {1}
    assert {*tokens} == {token}
    assert await run.frontier() == (1, 1, 1)


async def test_acknowledgement_of_a_rank_outside_the_session_is_refused(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s", dp_world_size=2)

    with pytest.raises(ConflictError, match="dp_rank 2 is none of the 2 ranks"):
        await run.step(session, 1, dp_rank=2)
    with pytest.raises(ConflictError, match="dp_rank 2 is none of the 2 ranks"):
        await run.commit_token(session, await step_all(run, session, 1), dp_rank=2)


async def test_steps_of_the_last_sessions_ranks_do_not_count(run: Any) -> None:
    await run.plan_steps(1)
    with pytest.raises(NotReadyError):
        await run.step(await run.start("first", dp_world_size=2), 1)
    second = await run.start("second", dp_world_size=2)

    with pytest.raises(NotReadyError, match="dp_rank 0 has not stepped it"):
        await run.step(second, 1, dp_rank=1)


async def test_step_of_another_manifest_does_not_count(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s", dp_world_size=2)
    with pytest.raises(NotReadyError):
        await run.step(session, 1)
    await run.client.hset(keys.run_keys(run.name).batches, 1, f"2:{OTHER}")

    with pytest.raises(NotReadyError, match="dp_rank 0 has not stepped it"):
        await run.step(session, 1, dp_rank=1, manifest_hash=OTHER)


@pytest.mark.parametrize(
    ("step", "why"),
    [(2, f'from the manifest "{OTHER}", this store has "'), (3, "newest batch of this store is 2")],
    ids=["another", "none"],
)
async def test_a_rank_with_another_batch_ends_the_session_for_all(
    run: Any, step: int, why: str
) -> None:
    await run.plan_steps(2)
    session = await run.start("s", dp_world_size=2)
    await hear(run, session, 1, 2)
    token = await step_all(run, session, 1)
    before = await run.last_wake_up()

    with pytest.raises(StoreBehindError, match=f"step {step} was delivered to dp_rank 1 .*{why}"):
        await hear(run, session, 1, step, manifest_hash=OTHER)

    assert await run.last_wake_up() != before
    assert why in run.read_frontier().lost_session
    with pytest.raises(StoreBehindError, match=why):
        await hear(run, session, 0, 1)
    with pytest.raises(StoreBehindError, match=why):
        await run.step(session, 2)
    with pytest.raises(StoreBehindError, match=why):
        await run.start("s", dp_world_size=2)
    await run.commit_token(session, token)  # both have the same batch of this step


async def test_a_step_in_which_the_ranks_differ_is_not_committed(run: Any) -> None:
    # Two processes have one dp_rank, and one of them reports late.
    await run.plan_steps(2)
    session = await run.start("s", dp_world_size=2)
    await hear(run, session, 1, 2)
    await step_all(run, session, 1)
    token = await step_all(run, session, 2)

    with pytest.raises(StoreBehindError):
        await hear(run, session, 1, 2, manifest_hash=OTHER)

    with pytest.raises(StoreBehindError, match="step 2 was delivered to dp_rank 1"):
        await run.commit_token(session, token)
    assert await run.frontier() == (2, 2, 0)


async def test_new_session_continues_after_a_lost_one(run: Any) -> None:
    await run.plan_steps(1)
    lost = await run.start("lost", dp_world_size=2)
    with pytest.raises(StoreBehindError):
        await hear(run, lost, 1, 1, manifest_hash=OTHER)

    session = await run.start("s", dp_world_size=2)
    with pytest.raises(FencedError):
        await hear(run, lost, 1, 1, manifest_hash=OTHER)
    await hear(run, session, 1, 1)
    await step_all(run, session, 1)

    assert run.read_frontier().lost_session == ""


@pytest.mark.both_servers
async def test_damaged_hash_of_a_batch_leaves_the_frontier_readable(run: Any) -> None:
    # The reason for the loss quoted the hash, and nothing of the run could be read after it.
    await run.plan_steps(1)
    session = await run.start("s", dp_world_size=2)
    await run.client.hset(run.keys.batches, "1", b"2:ab\x96")

    with pytest.raises(StoreBehindError, match="was delivered to dp_rank 1"):
        await hear(run, session, 1, 1)

    assert 'this store has "ab\ufffd" as step 1' in (run.read_frontier().lost_session)


async def test_a_batch_that_was_lost_before_it_is_sent_costs_no_session(run: Any) -> None:
    await run.plan_steps(1)
    session = await run.start("s", dp_world_size=2)

    with pytest.raises(NotReadyError, match="step 2: its plan is not in the store any more"):
        await hear(run, session, 1, 2, manifest_hash=OTHER, has=False)

    assert run.read_frontier().lost_session == ""


async def test_late_report_of_an_earlier_step_changes_nothing(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s", dp_world_size=2)
    await hear(run, session, 1, 2)
    async with run.unchanged():
        await hear(run, session, 1, 1)
    await run.client.hset(keys.run_keys(run.name).frontier, "released", 2)
    async with run.unchanged():
        await hear(run, session, 1, 1, manifest_hash=OTHER)
