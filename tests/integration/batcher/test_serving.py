"""Batches as ranks and observers get them, and announced versions."""

import asyncio
import dataclasses
from collections import Counter

import pytest

from testkit import group, trajectory, turn
from turnstream.batching.rows import minibatch
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.worker.tensors import to_torch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.servicer import BatchesServicer
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.sessions.observers import declare_observer
from turnstream_server.bus.sessions.sessions import newest_version

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.mark.parametrize("dp_world_size", [1, 2, 3])
async def test_ranks_share_a_mini_batch_and_get_inert_rows(house, dp_world_size):
    _, trainer = await house.started(
        _lettered("g0", "CD", "E"),
        _lettered("g1", "F", "GH"),
        batch_groups=2,
        dp_world_size=dp_world_size,
    )
    shares = [(await trainer.get(1, dp_rank=r))[0].mini_batch for r in range(dp_world_size)]

    real = [row for share in shares for row in share.rows.row_id.tolist() if row >= 0]
    num_rows = {len(share.rows) for share in shares}
    assert sorted(real) == [0, 1, 2, 3]
    assert num_rows == {-(-4 // dp_world_size)}
    assert sum(share.info.num_inert_rows for share in shares) == num_rows.pop() * dp_world_size - 4


async def test_a_rank_gets_its_inert_row_where_no_row_is_as_long(house):
    _, trainer = await house.started(
        _lettered("g0", "", ""), batch_groups=1, rows_multiple_of=3, dp_world_size=3
    )
    shares = [(await trainer.get(1, dp_rank=rank))[0].mini_batch for rank in range(3)]

    assert [share.info.num_inert_rows for share in shares] == [0, 0, 1]
    assert {(share.info.width, share.info.response_width) for share in shares} == {(2, 1)}
    assert [to_torch(share).loss_mask_BR.shape for share in shares] == [(1, 1)] * 3


async def test_info_of_a_mini_batch_is_equal_on_every_rank(house):
    _, trainer = await house.started(
        _lettered("g0", "CD", "E"),
        _lettered("g1", "F", "GH"),
        batch_groups=2,
        max_tokens_per_micro_batch=8,
        dp_world_size=3,
    )
    infos = [(await trainer.get(1, dp_rank=rank))[0].mini_batch.info for rank in range(3)]

    own = {"dp_rank": 0, "num_real_rows": 0, "num_inert_rows": 0, "micro_batches": ()}
    first, *others = [dataclasses.replace(info, **own) for info in infos]
    assert others == [first] * 2
    assert len({len(info.micro_batches) for info in infos}) == 1
    assert infos[0].denominators.num_tokens == 6


async def test_trajectory_too_long_for_any_pass_is_refused_by_the_run(house):
    run, trainer = await house.serve(
        batch_groups=1, max_tokens_per_micro_batch=5, over_long="refuse"
    )
    await house.publish(run, _lettered("g0", "CD", "EFGHI", "J"))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.rows == ["abCD", "abJ"]


async def test_mini_batches_of_a_step_are_ordered_and_hold_whole_groups(house):
    _, trainer = await house.started(
        *(group(f"g{i}") for i in range(3)), batch_groups=3, mini_batch_groups=1
    )
    pulled = await trainer.get(1)

    assert [each.header.mini_batch for each in pulled] == [0, 1, 2]
    assert [each.mini_batch.info.is_last for each in pulled] == [False, False, True]
    assert [set(each.mini_batch.rows.group_id) for each in pulled] == [{"g0"}, {"g1"}, {"g2"}]


async def test_info_of_the_rows_follows_from_the_turns(house):
    run, trainer = await house.serve(batch_groups=1)
    two_turns = trajectory(turn("ab", "CD", version=3), turn("abcde", "FG", version=4), sample=0)
    one_turn = trajectory(turn("ab", "C", version=5), sample=1, reward=0.0)
    await house.publish(run, group("g0", two_turns, one_turn))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    info = pulled.mini_batch.info
    assert pulled.rows == ["abCDeFG", "abC"]
    assert (info.width, info.response_width) == (7, 5)
    assert info.padding_share == pytest.approx(1 - 10 / 14)
    assert info.merge_ratio == pytest.approx((4 + 7 + 3) / 10)
    assert (info.oldest_version, info.newest_version) == (3, 5)
    assert pulled.mini_batch.rows.advantage.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


async def test_a_mini_batch_of_several_chunks_arrives_whole(house):
    run, trainer = await house.serve(batch_groups=1)
    long = "abcdefgh" * 100_000
    members = [trajectory(turn(long, "CD"), sample=i, reward=float(i)) for i in range(2)]
    await house.publish(run, group("g0", *members))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.header.num_bytes > 6 << 20
    assert Counter(pulled.rows) == {long + "CD": 2}


def _lettered(group_id: str, *responses: str):
    """A group of one-turn trajectories with the prompt "ab"."""
    members = [
        trajectory(turn("ab", response), sample=sample, reward=float(sample))
        for sample, response in enumerate(responses)
    ]
    return group(group_id, *members)


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


@pytest.mark.parametrize(("asks", "is_alive"), [(1, True), (2, False)])
async def test_observer_is_alive_if_it_asks_for_the_next_unseen_step(house, asks, is_alive):
    run = house.create_run(batch_groups=1, max_staleness=9, max_planned_ahead=3)
    caller = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"))
    silent = b"0:99999999999999:600000"
    async with connect_async(house.url) as client:
        observers = keys.run_keys(run).observers
        await declare_observer(client, run, observer="o", first_step=1, expiry_s=600)
        await client.hset(observers, "o", silent)

        (pulled,) = await caller.get(asks, observer="o")
        entry = await client.hget(observers, "o")

    assert pulled.mini_batch.info.step == asks
    assert (entry != silent) == is_alive


async def test_a_replica_that_is_behind_announces_in_the_lineage_of_the_store(house):
    run, trainer = await house.started(
        group("g1"), group("g2"), batch_groups=1, retain_checkpoints=5
    )
    tokens = [await trainer.stepped(await trainer.get(step)) for step in (1, 2)]

    async with connect_async(house.url) as client:
        before = await read_frontier_async(client, run)
        views = {run: RunView(client, run, frontier=before, on_stepped=lambda _: None)}
        await trainer.start("back", token=str(tokens[0]))
        request = wire.AnnounceVersionRequest(
            run=run, version=5, step=1, session_epoch=trainer.session_epoch
        )

        async def find(run: str) -> RunView:
            return views[run]

        await BatchesServicer(client, find).announce_version(request)

        announced = await newest_version(client, run)

    assert before.lineage == "main"
    assert announced is not None
    assert (announced.version, announced.lineage) == (5, "main-1")
