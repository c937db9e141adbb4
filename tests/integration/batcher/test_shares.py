"""The shares of many ranks of one mini-batch."""

import asyncio

import pytest

from testkit import group
from turnstream.batching.rows import minibatch

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

NUM_RANKS = 8


async def test_ranks_of_one_mini_batch_share_one_cut(house, monkeypatch):
    # Every rank divided the rows among all ranks, and did so twice: for 8 ranks 16 cuts of a
    # mini-batch, for 64 ranks 128, each of which grows with the number of ranks.
    run = house.create_run(batch_groups=2, mini_batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"))
    await trainer.start("s", dp_world_size=NUM_RANKS)
    num_cuts, balance = [], minibatch.balance

    def counted(weights, **options):
        num_cuts.append(options["num_parts"])
        return balance(weights, **options)

    monkeypatch.setattr(minibatch, "balance", counted)
    pulled = await asyncio.gather(*[trainer.get(1, dp_rank=rank) for rank in range(NUM_RANKS)])

    assert [len(share) for share in pulled] == [2] * NUM_RANKS
    assert num_cuts == [NUM_RANKS, NUM_RANKS]
    real = [share[index].mini_batch.info.num_real_rows for share in pulled for index in (0, 1)]
    assert sum(real) == 4


async def test_cut_is_made_again_for_another_world_size(house):
    run = house.create_run(batch_groups=1)
    replica = await house.start_batcher()
    first, second = house.trainer(replica, run), house.trainer(replica, run)
    await house.publish(run, group("g0"))

    await first.start("two", dp_world_size=2)
    of_two = [await first.get(1, dp_rank=rank) for rank in range(2)]
    await second.start("four", dp_world_size=4)
    of_four = [await second.get(1, dp_rank=rank) for rank in range(4)]

    assert [len(share.rows) for (share,) in of_two] == [1, 1]
    assert [len(share.rows) for (share,) in of_four] == [1, 1, 1, 1]
    assert [share.mini_batch.info.num_inert_rows for (share,) in of_four] == [0, 0, 1, 1]
