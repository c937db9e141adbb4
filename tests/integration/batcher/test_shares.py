"""The shares of many ranks of one mini-batch."""

import asyncio

import pytest

from testkit import group
from turnstream.batching.rows import minibatch

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

NUM_RANKS = 8


async def test_ranks_of_one_mini_batch_share_one_cut(house, monkeypatch):
    _, trainer = await house.started(
        group("g0"),
        group("g1"),
        batch_groups=2,
        mini_batch_groups=1,
        session="s",
        dp_world_size=NUM_RANKS,
    )
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
