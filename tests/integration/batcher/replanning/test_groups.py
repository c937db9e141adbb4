"""Groups whose plan is withdrawn, and their remaining members."""

from dataclasses import replace
from typing import cast

from testkit import ZERO_VARIANCE, group, trajectory, turn, wait_until_async
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.store.run.rewards import post_reward
from turnstream.types import SealedTrajectory, TrajectoryKey, TrajectoryState


async def test_two_steps_are_planned_again_without_a_damaged_member(cluster, replan, store):
    run, trainer = await cluster.serve(batch_groups=2)
    members = [
        replace(trajectory(turn("ab", "CD"), sample=s, reward=None), awaits_reward=True)
        for s in range(3)
    ]
    await cluster.publish(run, group("g0", *members))
    for sample in range(3):
        post_reward(cluster.client, run, TrajectoryKey("g0", sample), reward=float(sample))
    await cluster.publish(run, group("g1"), group("g2"), group("g3"))
    await trainer.start("a")
    before = await trainer.get(2)
    cluster.damage(run, "g0/1/0")

    done = await replan(run)
    await trainer.start("b")
    pulled = [*await trainer.get(1), *await trainer.get(2)]

    assert done == "steps 1 to 2; damaged trajectories: 1"
    assert [each.mini_batch.rows.trajectory_id for each in pulled] == [
        ["g0/0/0", "g0/2/0", "g1/0/0", "g1/1/0"],
        ["g2/0/0", "g2/1/0", "g3/0/0", "g3/1/0"],
    ]
    assert pulled[1].mini_batch.info.manifest_hash != before[0].mini_batch.info.manifest_hash
    assert [each.mini_batch.info.revision for each in pulled] == [1, 1]
    assert cluster.states(run) == {TrajectoryState.PLANNED: 8, TrajectoryState.DEAD: 1}
    assert "checksum" in store.letters(run)["g0/1/0"]
    planned = {each.group_id: each for each in store.plans(run)[0].groups}["g0"].trajectories
    assert [member.reward for member in planned] == [0.0, 2.0]


async def test_group_too_small_without_its_dead_is_dropped_and_frees_bytes(
    cluster, planned, replan, store
):
    run, trainer = await planned(group("g0"), group("g1"), group("g2"), step=2)
    cluster.damage(run, "g0/0/0")
    cluster.damage(run, "g1/0/0", record=-1)

    def change_seal(records: list[bytes]) -> list[bytes]:
        seal = cast("SealedTrajectory", decode_event(records[-1]))
        return [*records[:-1], encode_event(replace(seal, payload_crcs=(7,)))]

    cluster.change_records(keys.trajectory_keys(run, "g1/1/0").turns, change_seal)

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)

    assert store.letters(run).keys() == {"g0/0/0", "g1/0/0", "g1/1/0"}
    assert "its seal cannot be read" in store.letters(run)["g1/0/0"]
    assert store.letters(run)["g1/1/0"] == "its seal is not the one that it was planned with"
    assert pulled.mini_batch.rows.group_id == ["g2", "g2"]
    assert cluster.states(run) == {
        TrajectoryState.PLANNED: 2,
        TrajectoryState.INCOMPLETE: 1,
        TrajectoryState.DEAD: 3,
    }
    await wait_until_async(lambda: store.sum_held(run, "incomplete") == 0)
    assert store.held(run) == (0, *(store.sum_held(run, state) for state in ("planned", "dead")))


async def test_steps_of_two_configs_are_planned_again_by_the_later_one(
    cluster, replan, store, of_3
):
    run = cluster.create_run(batch_groups=1)
    before = read_revisions(cluster.client, run).last.config
    revise_config(cluster.client, run, replace(before, batch_groups=2), from_step=2)
    trainer = cluster.trainer(await cluster.start_batcher(), run)
    await cluster.publish(run, of_3("g0"), group("g1"), group("g2"))
    await trainer.start("a")
    await trainer.get(2)
    most = store.most_live(run)
    cluster.damage(run, "g0/0/0")

    await replan(run)
    await trainer.start("b")
    pulled = await trainer.get(1)

    assert [each.mini_batch.rows.group_id for each in pulled] == [["g0", "g0"], ["g1", "g1"]]
    assert pulled[0].mini_batch.info.config_revision == 2
    assert (most, store.most_live(run)) == (1 + 2 * 1000, 2 + 2 * 1000)
    assert read_revisions(cluster.client, run).last.from_step == 1


async def test_config_from_before_the_damaged_step_stays_in_force(cluster, replan, of_3):
    run = cluster.create_run(batch_groups=1)
    before = read_revisions(cluster.client, run).last.config
    revise_config(cluster.client, run, replace(before, group_filters=ZERO_VARIANCE), from_step=2)
    trainer = cluster.trainer(await cluster.start_batcher(), run)
    await cluster.publish(run, group("g0"), group("g1"), of_3("g2"))
    await trainer.start("a")
    await trainer.stepped(await trainer.get(1))
    await trainer.get(3)
    cluster.damage(run, "g2/0/0")

    assert (await replan(run)).startswith("steps 3 to 3;")
    assert read_revisions(cluster.client, run).last.from_step == 2
