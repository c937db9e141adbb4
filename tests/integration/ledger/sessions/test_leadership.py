"""The leader of a run: its lease, its fence, parked runs and restarted stores."""

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import wait_until, wait_until_async
from turnstream.batching.config import BatchingConfig
from turnstream.errors import FencedError
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.runs import create_run
from turnstream.types import BatchDue
from turnstream_server.batcher.planner.planner import PinnedClient
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.leadership.leader_fields import (
    RunClock,
    note_trouble,
    park_leadership,
    release_leadership,
)
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Leadership,
    Position,
    Term,
    acquire_leadership,
    renew_command,
    write,
)
from turnstream_server.ledger.planning.announcements import announce_due
from turnstream_server.ledger.sessions.observers import declare_observer


async def acquire(run: Any, owner: str, *, lease_s: float = 60, **options: Any) -> Leadership:
    return await acquire_leadership(run.client, run.name, owner=owner, lease_s=lease_s, **options)


async def test_one_of_two_planners_leads_until_its_lease_ends(run: Any) -> None:
    asked_ms = await run.server_ms()
    first, second = await acquire(run, "p"), await acquire(run, "q")
    told_ms = await run.server_ms()
    expires_ms = int(await run.client.hget(run.keys.leader, "expires_ms"))
    renewed, other = await acquire(run, "p", lease_s=90), await acquire(run, "q")
    await acquire(run, "p", lease_s=0.05)

    async def taken() -> Any:
        found = await acquire(run, "q")
        return found if found.is_ours else None

    assert (first.is_ours, first.epoch, first.owner) == (True, 1, "p")
    assert (second.is_ours, second.epoch, second.owner) == (False, 1, "p")
    left_ms = round(second.lease_left_s * 1000)
    assert expires_ms - told_ms <= left_ms <= expires_ms - asked_ms
    assert renewed.epoch == 1
    assert other.lease_left_s > 60
    assert (await wait_until_async(taken)).epoch == 2
    assert not (await acquire(run, "p")).is_ours


async def test_released_leadership_is_free_and_a_late_release_changes_nothing(run: Any) -> None:
    released = [await release_leadership(run.term_of(1), owner="p") for _ in range(2)]
    taken = await acquire(run, "p")

    async with run.unchanged():
        released.append(await release_leadership(run.term_of(1), owner="p"))

    assert released == [True, False, False]
    assert (taken.is_ours, taken.epoch) == (True, 2)


async def test_clock_set_back_does_not_extend_a_dead_leaders_lease(run: Any) -> None:
    # The server's clock went back by an hour: to it, the lease ends in an hour and a minute.
    seconds, _ = await run.client.time()
    await run.client.hset(run.keys.leader, "expires_ms", (seconds + 3660) * 1000)

    seen = await acquire(run, "q")
    later = await acquire(run, "q")

    assert not seen.is_ours
    assert seen.lease_left_s == 60
    assert later.lease_left_s <= 60


@pytest.mark.both_servers
async def test_trouble_is_recorded_by_the_leader_and_cleared_with_its_term(run: Any) -> None:
    what = (run.term_of(run.leader_epoch), "planning_trouble")
    by_leader = await note_trouble(*what, "the disk is full", owner="p")
    by_other = await note_trouble(*what, "another trouble", owner="q")
    kept = await run.client.hget(run.keys.leader, "planning_trouble")
    await release_leadership(run.term_of(1), owner="p")
    await acquire(run, "q")

    assert (by_leader, by_other, kept) == (True, False, b"the disk is full")
    assert await run.client.hget(run.keys.leader, "planning_trouble") is None


START = Position("0-0", "0-0")


@pytest.fixture
def epoch(run: Any) -> int:
    """The epoch of the planner "p", which leads the run."""
    return run.leader_epoch


async def park(run: Any, epoch: int, position: Position = START) -> bool:
    return await park_leadership(run.term_of(epoch), position)


@pytest.mark.parametrize("owner", ["p", "q"])
async def test_parked_run_is_led_in_a_new_epoch(run: Any, epoch: int, owner: str) -> None:
    assert await park(run, epoch)

    found = await acquire(run, owner)

    assert (found.is_ours, found.epoch) == (True, epoch + 1)
    assert await run.client.hget(run.keys.leader, "parked") is None


async def test_follower_learns_the_position_of_a_parked_run(run: Any, epoch: int) -> None:
    await park(run, epoch, Position("5-0", "7-1"))

    found = await acquire(run, "q", leads_parked=False)

    assert (found.is_ours, found.parked) == (False, Position("5-0", "7-1"))


async def test_parked_run_can_be_led_after_the_clock_was_reset(run: Any, epoch: int) -> None:
    await park(run, epoch)
    await run.client.hincrby(run.keys.leader, "expires_ms", 3_600_000)

    found = await acquire(run, "q")

    assert found.is_ours


@pytest.mark.parametrize("kind", ["lease", "deadline", "observer"])
async def test_run_in_which_something_can_expire_is_not_parked(
    run: Any, epoch: int, kind: str
) -> None:
    if kind == "lease":
        await run.open("g")
    elif kind == "deadline":
        await run.client.zadd(run.keys.deadlines, {"group:g": 1})
    else:
        await declare_observer(run.client, run.name, observer="o", first_step=1, expiry_s=60)

    assert not await park(run, epoch)


@pytest.mark.both_servers
async def test_renewal_does_not_lengthen_the_lease_of_a_parked_run(run: Any, epoch: int) -> None:
    await park(run, epoch)
    before = await run.hash_of("leader")

    reply = await run_command_async(
        run.client, renew_command(run.name, owner="p", epoch=epoch, lease_s=60)
    )

    assert reply[0] == 1
    assert await run.hash_of("leader") == before


async def test_time_of_a_parked_run_stands_still(run: Any, epoch: int) -> None:
    clock = RunClock(run.term_of(epoch), most_s=15)
    seconds, _ = await run.client.time()
    await clock.tick(server_ms=seconds * 1000, own_s=0)
    await park(run, epoch)
    parked = await run.hash_of("clock")

    await clock.tick(server_ms=seconds * 1000 + 5_000, own_s=5)

    assert parked[b"most_ms"] == b"0"
    assert await run.hash_of("clock") == parked


@pytest.mark.both_servers
async def test_write_of_a_fenced_leader_changes_nothing(run: Any) -> None:
    await run.plan_steps(1)
    changes = Changes()
    changes.wake()
    for epoch in (run.leader_epoch - 1, run.leader_epoch + 1):
        async with run.refuses(FencedError, match=f"another planner .* epoch {epoch}"):
            await write(run.term_of(epoch), changes)


NewRun = Callable[..., str]


async def test_planner_from_before_a_restart_is_fenced_despite_an_equal_epoch(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(own_client)
    async with PinnedClient(own_server.url) as before, PinnedClient(own_server.url) as after:
        old = await acquire_leadership(before.client, run, owner="old", lease_s=30.0)
        own_server.kill()
        shutil.rmtree(own_server.data_dir / "appendonlydir")
        own_server.restart()
        create_run(own_client, run, BatchingConfig(batch_groups=1, mini_batch_groups=1))
        new = await acquire_leadership(after.client, run, owner="new", lease_s=30.0)

        for _ in range(2):  # it does not get used to it
            with pytest.raises(FencedError, match="the store was restarted"):
                await announce_due(Term(before.client, run, old.epoch), BatchDue(step=1))
        await announce_due(Term(after.client, run, new.epoch), BatchDue(step=1))

    assert old.epoch == new.epoch


async def test_a_lost_connection_to_the_same_start_of_the_store_is_none(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(own_client)
    async with PinnedClient(own_server.url) as store:
        mine = await acquire_leadership(store.client, run, owner="o", lease_s=30.0)
        own_client.client_kill_filter(_type="normal", skipme=True)

        again = await acquire_leadership(store.client, run, owner="o", lease_s=30.0)

    assert again.epoch == mine.epoch


async def test_cancellation_while_leaving_a_store_closes_every_connection(
    client: redis.Redis, server: EmbeddedServer
) -> None:
    # A replica that stopped just when a term had ended kept one.
    ids: list[Any] = []
    is_leaving = asyncio.Event()

    async def live() -> None:
        async with PinnedClient(server.url) as store:
            ids.append(await store.client.client_id())
            is_leaving.set()

    living = asyncio.create_task(live())
    await is_leaving.wait()
    living.cancel()
    with pytest.raises(asyncio.CancelledError):
        await living

    wait_until(lambda: not client.client_list(client_id=ids), describe="its end")
