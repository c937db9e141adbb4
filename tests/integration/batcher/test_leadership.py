"""Leaderships are kept by a thread: while the event loop works, and not when it hangs for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import FencedError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect, connect_async
from turnstream_server.batcher.planner import timekeeper
from turnstream_server.batcher.planner.renewal import RENEWALS_PER_LEASE, LeadershipKeeper
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership, release_leadership

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

LEASE_S = 0.5

# A batcher whose event loop stands still between the check of its first plan and its writing, until
# it reads a line. Its lease is renewed in that time.
STALLED = """
import asyncio, sys
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner import renewal
from turnstream_server.batcher.serving.service import BatcherOptions
from turnstream_server.batcher.serving.service import serving

url, lease_s, renewal.RENEWALS_PER_LEASE = sys.argv[1], sys.argv[2], float(sys.argv[3])

check = Assembler.check

async def check_and_stall(self, batch):
    await check(self, batch)
    print("stalls", flush=True)
    sys.stdin.readline()
    print("continues", flush=True)

Assembler.check = check_and_stall

async def main():
    options = BatcherOptions(redis_url=url, leader_lease_s=float(lease_s))
    async with serving(options) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def start_stalled(house, start_process) -> Callable[..., Any]:
    """Starts a batcher process, and returns it when it answers."""

    async def start(*, lease_s: float = LEASE_S, renewals: float = RENEWALS_PER_LEASE) -> Any:
        process = start_process(STALLED, house.url, str(lease_s), str(renewals))
        assert await process.line()  # its address
        return process

    return start


async def is_renewed(url: str, run: str, number: int) -> None:
    """Wait until the leadership of a run was renewed so often."""
    ends: set[Any] = set()

    async def is_so() -> bool:
        with connect(url) as client:
            ends.add(client.hget(keys.run_keys(run).leader, "expires_ms"))
        return len(ends) > number

    await wait_until_async(is_so, describe=f"{number} renewals of the leadership")


async def test_a_planner_leads_on_while_its_loop_is_busy(house, start_stalled):
    run = house.create_run(batch_groups=1)
    process = await start_stalled(lease_s=60.0, renewals=600)
    await is_renewed(house.url, run, 1)  # it leads, before another may
    other = await house.start_batcher()
    await house.publish(run, group("g0"))
    stalled = await process.line()
    await is_renewed(house.url, run, 4)
    process.tell("continue")
    continued = await process.line()

    trainer = house.trainer(other, run)
    await trainer.start()
    await trainer.get(1)

    assert (stalled, continued) == ("stalls", "continues")
    assert house.client.hget(keys.run_keys(run).leader, "epoch") == b"1"


async def test_losing_the_leadership_ends_the_term_and_no_other(house):
    lost, kept = house.create_run(), house.create_run()
    async with connect_async(house.url) as client:
        keeper = LeadershipKeeper(house.url, owner="p", lease_s=LEASE_S)
        try:
            for run in (lost, kept):
                await acquire_leadership(client, run, owner="p", lease_s=LEASE_S)
            holds = [asyncio.create_task(keeper.hold(run, 1)) for run in (lost, kept)]
            await release_leadership(Term(client, lost, 1), owner="p")
            await acquire_leadership(client, lost, owner="q", lease_s=60)

            with pytest.raises(FencedError, match="epoch 1 has ended, 'q' leads with epoch 2"):
                await holds[0]
            was_held = not holds[1].done()
            holds[1].cancel()
        finally:
            await keeper.close()

    assert was_held


async def test_short_outage_of_the_store_costs_no_leadership(house_at, own_server, caplog):
    run = house_at(own_server.url).create_run()
    async with connect_async(own_server.url) as client:
        keeper = LeadershipKeeper(own_server.url, owner="p", lease_s=LEASE_S)
        try:
            await acquire_leadership(client, run, owner="p", lease_s=LEASE_S)
            hold = asyncio.create_task(keeper.hold(run, 1))
            await asyncio.to_thread(own_server.kill)
            await wait_until_async(lambda: "leaderships cannot be renewed" in caplog.text)
            await asyncio.to_thread(own_server.restart)
            await is_renewed(own_server.url, run, 1)
            was_held = not hold.done()
            hold.cancel()
        finally:
            await keeper.close()

    assert was_held


async def test_a_leader_whose_epoch_was_given_again_writes_nothing(
    house_at, own_server, past_of, caplog, monkeypatch
):
    monkeypatch.setattr(timekeeper, "LONGEST_PAUSE_S", 600.0)
    house = house_at(own_server.url)
    run = house.create_run(batch_groups=1, lease_s=6000)
    await house.publish(run, group("g0"))
    past = past_of(own_server)
    is_checked, may_write = asyncio.Event(), asyncio.Event()

    async def wait(_manifest):
        is_checked.set()
        await may_write.wait()

    async def release_nothing(_act):
        await asyncio.Event().wait()

    await house.start_batcher(before_write=wait, before_act=release_nothing, lease_s=600)
    await is_checked.wait()
    async with connect_async(own_server.url) as client:
        epoch: Any = await client.hget(keys.run_keys(run).leader, "epoch")
        await asyncio.to_thread(past.come_back)
        other = await acquire_leadership(client, run, owner="other", lease_s=60)
        may_write.set()

        await wait_until_async(
            lambda: f"no longer leading run {run}" in caplog.text, describe="the end of the term"
        )
        planned = (await read_frontier_async(client, run)).planned

    assert (other.is_ours, other.epoch) == (True, int(epoch))
    assert planned == 0
