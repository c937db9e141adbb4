"""The leader of a run: its lease, its fence, parked runs and restarted stores."""

import asyncio
import importlib
import pkgutil
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import redis

import turnstream_server.bus
from testkit import wait_until, wait_until_async
from turnstream.batching.config import BatchingConfig
from turnstream.errors import FencedError
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.runs import create_run
from turnstream.types import BatchDue
from turnstream_server.bus.core.server_instance import PinnedClient
from turnstream_server.bus.leadership.leadership import (
    LeaderScript,
    Position,
    RunClock,
    Term,
    acquire_leadership,
    note_trouble,
    park_leadership,
    release_leadership,
    renew_command,
)
from turnstream_server.bus.planning.announcements import announce_due
from turnstream_server.bus.sessions.observers import declare_observer
from turnstream_server.embedded import EmbeddedServer


async def test_only_one_of_two_planners_leads(run: Any) -> None:
    first = await acquire_leadership(run.client, run.name, owner="p", lease_s=60)
    asked_ms = await run.server_ms()
    second = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    told_ms = await run.server_ms()

    assert (first.is_ours, first.epoch, first.owner) == (True, 1, "p")
    assert (second.is_ours, second.epoch, second.owner) == (False, 1, "p")
    expires_ms = int(await run.client.hget(run.keys.leader, "expires_ms"))
    left_ms = round(second.lease_left_s * 1000)
    assert expires_ms - told_ms <= left_ms <= expires_ms - asked_ms


async def test_a_renewal_keeps_the_epoch_and_lengthens_the_lease(run: Any) -> None:
    await acquire_leadership(run.client, run.name, owner="p", lease_s=60)

    renewed = await acquire_leadership(run.client, run.name, owner="p", lease_s=90)

    other = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    assert renewed.epoch == 1
    assert other.lease_left_s > 60


async def test_another_planner_takes_over_with_a_new_epoch_when_the_lease_ends(run: Any) -> None:
    await acquire_leadership(run.client, run.name, owner="p", lease_s=0.05)

    async def taken_over() -> Any:
        other = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
        return other if other.is_ours else None

    taken = await wait_until_async(taken_over)

    assert taken.epoch == 2
    late = await acquire_leadership(run.client, run.name, owner="p", lease_s=60)
    assert not late.is_ours


async def test_a_released_leadership_can_be_taken_at_once(run: Any) -> None:
    released = await release_leadership(run.term_of(1), owner="p")
    again = await release_leadership(run.term_of(1), owner="p")

    taken = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    assert (released, again) == (True, False)
    assert (taken.is_ours, taken.epoch) == (True, 2)


async def test_a_late_release_does_not_touch_the_next_leader(run: Any) -> None:
    await release_leadership(run.term_of(1), owner="p")
    await acquire_leadership(run.client, run.name, owner="p", lease_s=60)

    released = await release_leadership(run.term_of(1), owner="p")

    other = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    assert not released
    assert (other.is_ours, other.owner, other.epoch) == (False, "p", 2)


async def test_clock_set_back_does_not_extend_a_dead_leaders_lease(run: Any) -> None:
    # The server's clock went back by an hour: to it, the lease ends in an hour and a minute.
    seconds, _ = await run.client.time()
    await run.client.hset(run.keys.leader, "expires_ms", (seconds + 3660) * 1000)

    seen = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    later = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    assert not seen.is_ours
    assert seen.lease_left_s == 60
    assert later.lease_left_s <= 60


async def test_trouble_is_recorded_by_the_leader_and_cleared_with_its_term(run: Any) -> None:
    by_leader = await note_trouble(
        run.client, run.name, "planning_trouble", "the moon is full", owner="p"
    )
    by_other = await note_trouble(
        run.client, run.name, "planning_trouble", "no moon at all", owner="q"
    )
    kept = await run.client.hget(run.keys.leader, "planning_trouble")
    await release_leadership(run.term_of(1), owner="p")
    await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    assert (by_leader, by_other, kept) == (True, False, b"the moon is full")
    assert await run.client.hget(run.keys.leader, "planning_trouble") is None


START = Position("0-0", "0-0")


@pytest.fixture
def epoch(run: Any) -> int:
    """The epoch of the planner "p", which leads the run."""
    return run.leader_epoch


async def park(run: Any, epoch: int, position: Position = START) -> bool:
    return await park_leadership(run.term_of(epoch), position)


async def test_parked_run_is_led_by_the_next_planner_in_a_new_epoch(run: Any, epoch: int) -> None:
    was_parked = await park(run, epoch)

    first = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    assert was_parked
    assert (first.is_ours, first.epoch) == (True, epoch + 1)
    assert await run.client.hget(run.keys.leader, "parked") is None


async def test_planner_that_parked_a_run_leads_it_in_a_new_epoch(run: Any, epoch: int) -> None:
    await park(run, epoch)

    again = await acquire_leadership(run.client, run.name, owner="p", lease_s=60)

    assert (again.is_ours, again.epoch) == (True, epoch + 1)


async def test_follower_learns_the_position_of_a_parked_run(run: Any, epoch: int) -> None:
    await park(run, epoch, Position("5-0", "7-1"))

    found = await acquire_leadership(
        run.client, run.name, owner="q", lease_s=60, leads_parked=False
    )

    assert (found.is_ours, found.parked) == (False, Position("5-0", "7-1"))


async def test_parked_run_can_be_led_after_the_clock_was_reset(run: Any, epoch: int) -> None:
    await park(run, epoch)
    await run.client.hincrby(run.keys.leader, "expires_ms", 3_600_000)

    found = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

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


async def test_lease_that_begins_in_a_parked_run_wakes_it(run: Any, epoch: int) -> None:
    await run.open("g", num_samples=2, num_begun=1)
    await run.seal("g", 0)
    woken_before = await run.last_wake_up()
    assert await park(run, epoch)

    await run.open("g", num_samples=2, num_begun=2)

    assert await run.last_wake_up() != woken_before


def leader_scripts() -> dict[str, LeaderScript]:
    """Return each LeaderScript of the bus by the name of its script."""
    found: dict[str, LeaderScript] = {}
    for info in pkgutil.walk_packages(turnstream_server.bus.__path__, "turnstream_server.bus."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, LeaderScript):
                found[value.name] = value
    return found


SCRIPTS = leader_scripts()
assert len(SCRIPTS) >= 20, "scripts of a leader are missing"


@pytest.mark.parametrize("name", sorted(SCRIPTS))
async def test_script_of_a_fenced_leader_writes_nothing(run: Any, name: str) -> None:
    await run.plan_steps(1)
    before = await run.dump()

    for epoch in (run.leader_epoch - 1, run.leader_epoch + 1):
        with pytest.raises(FencedError, match=f"another planner leads the run, not epoch {epoch}"):
            await SCRIPTS[name].run(run.term_of(epoch))

    assert await run.dump() == before


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


async def test_waiting_call_learns_that_the_store_was_restarted(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(own_client)
    async with PinnedClient(own_server.url) as store:
        await store.client.ping()
        waiting = asyncio.create_task(read_in_the_end(store, f"ts:{{{run}}}:wake"))
        await asyncio.sleep(0)
        await asyncio.to_thread(own_server.restart)

        with pytest.raises(FencedError, match="the store was restarted"):
            await waiting


async def read_in_the_end(store: PinnedClient, stream: str) -> None:
    """Wait for an entry, and ask again for as long as the store is away."""
    while True:
        try:
            await store.client.execute_command("XREAD", "BLOCK", 20_000, "STREAMS", stream, "$")
        except redis.ConnectionError:
            await asyncio.sleep(0.05)


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
