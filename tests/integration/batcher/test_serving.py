import dataclasses
from collections import Counter

import pytest

import testkit
from testkit import group, trajectory, turn
from turnstream.batching.scoring.denominators import check_share
from turnstream.types import Status
from turnstream.worker.layouts import packed_to_torch
from turnstream.worker.tensors import to_torch

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_a_batch_comes_to_the_trainer_as_rows(house):
    run = house.create_run(batch_groups=2)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _lettered("g0", "CD", "E"), _lettered("g1", "F", "GH"))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.rows == ["abCD", "abE", "abF", "abGH"]
    assert pulled.mini_batch.rows.group_id == ["g0", "g0", "g1", "g1"]


async def test_two_replicas_give_the_same_content_for_the_same_call(house):
    run = house.create_run(batch_groups=4, mini_batch_groups=2)
    trainers = [house.trainer(await house.start_batcher(), run) for _ in range(2)]
    await house.publish(run, *(_lettered(f"g{i}", "CD", "E") for i in range(4)))

    for trainer in trainers:
        await trainer.start(dp_world_size=2)
    hashes = [
        [pulled.header.content_hash for rank in range(2) for pulled in await t.get(1, dp_rank=rank)]
        for t in trainers
    ]

    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 4


@pytest.mark.parametrize("dp_world_size", [1, 2, 3])
async def test_ranks_share_a_mini_batch_and_get_inert_rows(house, dp_world_size):
    run = house.create_run(batch_groups=2)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _lettered("g0", "CD", "E"), _lettered("g1", "F", "GH"))

    await trainer.start(dp_world_size=dp_world_size)
    shares = [(await trainer.get(1, dp_rank=r))[0].mini_batch for r in range(dp_world_size)]

    real = [row for share in shares for row in share.rows.row_id.tolist() if row >= 0]
    num_rows = {len(share.rows) for share in shares}
    assert sorted(real) == [0, 1, 2, 3]
    assert num_rows == {-(-4 // dp_world_size)}
    assert sum(share.info.num_inert_rows for share in shares) == num_rows.pop() * dp_world_size - 4


async def test_a_rank_gets_its_inert_row_where_no_row_is_as_long(house):
    # Real rows have no response at all. The rank that got no row was refused at every call.
    run = house.create_run(batch_groups=1, rows_multiple_of=3)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _lettered("g0", "", ""))

    await trainer.start(dp_world_size=3)
    shares = [(await trainer.get(1, dp_rank=rank))[0].mini_batch for rank in range(3)]

    assert [share.info.num_inert_rows for share in shares] == [0, 0, 1]
    assert {(share.info.width, share.info.response_width) for share in shares} == {(2, 1)}
    assert [to_torch(share).loss_mask_BR.shape for share in shares] == [(1, 1)] * 3


async def test_the_rows_of_a_split_trajectory_weigh_what_the_run_says(house):
    run = house.create_run(
        batch_groups=1, aggregation="seq_mean_token_mean", row_weights="rollout_mean"
    )
    trainer = house.trainer(await house.start_batcher(), run)
    split = trajectory(turn("ab", "CDE"), turn("xy", "F"), sample=0, reward=1.0)
    await house.publish(run, group("g0", split, trajectory(turn("ab", "G"), sample=1, reward=0.0)))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.rows == ["abCDE", "xyF", "abG"]
    assert pulled.mini_batch.rows.weight.tolist() == [0.75, 0.25, 1.0]
    assert pulled.mini_batch.info.denominators.weight_sum == 2.0


async def test_info_of_a_mini_batch_is_equal_on_every_rank(house):
    run = house.create_run(batch_groups=2, max_tokens_per_micro_batch=8)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _lettered("g0", "CD", "E"), _lettered("g1", "F", "GH"))

    await trainer.start(dp_world_size=3)
    infos = [(await trainer.get(1, dp_rank=rank))[0].mini_batch.info for rank in range(3)]

    own = {"dp_rank": 0, "num_real_rows": 0, "num_inert_rows": 0, "micro_batches": ()}
    first, *others = [dataclasses.replace(info, **own) for info in infos]
    assert others == [first] * 2
    assert len({len(info.micro_batches) for info in infos}) == 1
    assert infos[0].denominators.num_tokens == 6


async def test_every_rank_has_the_passes_that_the_run_asks_for(house):
    run = house.create_run(
        batch_groups=2,
        max_tokens_per_micro_batch=20,
        micro_batch_cost="packed",
        passes_multiple_of=3,
        rows_multiple_of=5,
    )
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _lettered("g0", "CD", "E"), _lettered("g1", "F", "GH"))

    await trainer.start(dp_world_size=2)
    shares = [(await trainer.get(1, dp_rank=rank))[0].mini_batch for rank in range(2)]

    # Two rows of 7 tokens together and 13 inert ones of 2 tokens each are two passes: three.
    assert [len(share.info.micro_batches) for share in shares] == [3, 3]
    assert [len(share.rows) for share in shares] == [15, 15]
    assert sum(share.info.num_inert_rows for share in shares) == 26


async def test_a_pass_of_concatenated_rows_holds_more_than_a_rectangle_of_them(house):
    passes = {}
    for model in ("padded", "packed"):
        run = house.create_run(batch_groups=1, max_tokens_per_micro_batch=9, micro_batch_cost=model)
        trainer = house.trainer(await house.start_batcher(), run)
        await house.publish(run, _lettered("g0", "CDEF", "G"))
        await trainer.start()
        passes[model] = (await trainer.get(1))[0].mini_batch.info.micro_batches

    assert passes == {"padded": ((0,), (1,)), "packed": ((0, 1),)}


async def test_aligned_rows_are_counted_and_laid_out_with_the_tokens_between_them(house):
    slots = {}
    for limit in (11, 12):
        run = house.create_run(
            batch_groups=1,
            max_tokens_per_micro_batch=limit,
            micro_batch_cost="packed",
            alignment=4,
        )
        trainer = house.trainer(await house.start_batcher(), run)
        await house.publish(run, _lettered("g0", "CDEF", "G"))
        await trainer.start()
        share = (await trainer.get(1))[0].mini_batch
        slots[limit] = [part.cu_seqlens.tolist() for part in packed_to_torch(share)]

    assert slots == {11: [[0, 8], [0, 4]], 12: [[0, 8, 12]]}


async def test_trajectory_too_long_for_any_pass_is_refused_by_the_run(house):
    run = house.create_run(batch_groups=1, max_tokens_per_micro_batch=5, over_long="refuse")
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _lettered("g0", "CD", "EFGHI", "J"))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.rows == ["abCD", "abJ"]


async def test_a_truncated_trajectory_comes_with_no_token_trained(house):
    run = house.create_run(batch_groups=1, mask_truncated=True, masked_reward="leave_out")
    trainer = house.trainer(await house.start_batcher(), run)
    members = [
        trajectory(turn("ab", "CD"), sample=0, reward=1.0),
        trajectory(turn("ab", "E"), sample=1, reward=0.0),
        trajectory(turn("ab", "FGH"), sample=2, reward=0.0, status=Status.TRUNCATED),
    ]
    await house.publish(run, group("g0", *members))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    rows, denominators = pulled.mini_batch.rows, pulled.mini_batch.info.denominators
    assert pulled.rows == ["abCD", "abE", "abfgh"]
    assert rows.advantage.tolist() == pytest.approx([0.7071, -0.7071, 0.0], abs=1e-4)
    assert (denominators.num_tokens, denominators.num_trajectories) == (3, 2)
    check_share(rows, denominators, dp_world_size=1, row_weights="per_row")


async def test_mini_batches_of_a_step_are_ordered_and_hold_whole_groups(house):
    run = house.create_run(batch_groups=3, mini_batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, *(group(f"g{i}") for i in range(3)))

    await trainer.start()
    pulled = await trainer.get(1)

    assert [each.header.mini_batch for each in pulled] == [0, 1, 2]
    assert [each.mini_batch.info.is_last for each in pulled] == [False, False, True]
    assert [set(each.mini_batch.rows.group_id) for each in pulled] == [{"g0"}, {"g1"}, {"g2"}]


async def test_info_of_the_rows_follows_from_the_turns(house):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
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
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    long = "abcdefgh" * 100_000
    members = [trajectory(turn(long, "CD"), sample=i, reward=float(i)) for i in range(2)]
    await house.publish(run, group("g0", *members))

    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.header.num_bytes > 6 << 20
    assert Counter(pulled.rows) == {long + "CD": 2}


async def test_steps_follow_one_another_with_rising_row_ids(house):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, *(group(f"g{i}") for i in range(3)))

    await trainer.start()
    row_ids = []
    for step in (1, 2, 3):
        (pulled,) = await trainer.get(step)
        row_ids += pulled.mini_batch.rows.row_id.tolist()
        await trainer.stepped([pulled])

    assert row_ids == [0, 1, 2, 3, 4, 5]


async def test_step_can_be_fetched_again_until_a_new_session_starts(house):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"))
    await trainer.start()
    first = await trainer.get(1)
    await trainer.stepped(first)

    again = await trainer.get(1)

    assert again[0].header == first[0].header
    testkit.assert_same(again[0].mini_batch, first[0].mini_batch)


def _lettered(group_id: str, *responses: str):
    """A group of one-turn trajectories with the prompt "ab"."""
    members = [
        trajectory(turn("ab", response), sample=sample, reward=float(sample))
        for sample, response in enumerate(responses)
    ]
    return group(group_id, *members)
