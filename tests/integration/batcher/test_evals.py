"""Evaluations during training, with a real batcher and generators."""

import asyncio
import signal
from dataclasses import replace
from typing import Any

import pytest

from testkit import group, trajectory, turn, wait_until_async
from turnstream.errors import ConflictError, EndOfRunError, InvalidTurnError
from turnstream.generator import AsyncPublisher
from turnstream.store.client import keys
from turnstream.store.run.evals import eval_results
from turnstream.types import Group, Purpose, TrajectoryState
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.ledger.planning.manifests import read_plan

# Opens an evaluation of two, seals one of them, prints a line, and hangs.
GENERATOR = """
import sys
from turnstream.generator import Publisher
from testkit import ids

url, run = sys.argv[1:]
with Publisher(url, run) as publisher, publisher.group("e", 2, purpose="eval") as visit:
    for sample in range(2):
        visit.trajectory(sample).append(ids("ab"), ids("c"), policy_version=4).result(10)
    visit.trajectory(0).seal(0.5)
    print("sealed", flush=True)
    sys.stdin.read()
"""


def evaluation(group_id: str, *rewards: float, version: int = 1) -> Group:
    members = [
        trajectory(turn("ab", "CD", version=version), sample=sample, reward=reward)
        for sample, reward in enumerate(rewards or (1.0, 0.0))
    ]
    return replace(group(group_id, *members), purpose=Purpose.EVAL)


async def num_evaluated(cluster: Any, run: str, number: int) -> None:
    await wait_until_async(
        lambda: cluster.ledger(run).by_state[TrajectoryState.EVALUATED] == number,
        describe=f"{number} evaluated",
    )


def plans(cluster: Any, run: str, steps: int) -> list[Any]:
    found = [read_plan(cluster.client, run, step) for step in range(1, steps + 1)]
    return [
        replace(each.manifest, run="", previous_hash="", last_event_id="")
        for each in found
        if each is not None
    ]


async def test_the_same_training_gives_the_same_batches_with_evaluations_in_between(cluster):
    training = [group(name) for name in "abcd"]
    alone, mixed = (cluster.create_run(batch_groups=2) for _ in range(2))
    batcher = await cluster.start_batcher()

    await cluster.publish(alone, *training)
    for number, each in enumerate(training):
        await cluster.publish(mixed, evaluation(f"e{number}"), each, evaluation(f"f{number}"))
    pulled = []
    for run in (alone, mixed):
        trainer = cluster.trainer(batcher, run)
        await trainer.start()
        pulled.append([each.rows for step in (1, 2) for each in await trainer.get(step)])
    await num_evaluated(cluster, mixed, 16)

    assert pulled[0] == pulled[1]
    assert plans(cluster, alone, 2) == plans(cluster, mixed, 2)
    assert len(plans(cluster, mixed, 2)) == 2
    found = cluster.ledger(mixed)
    assert (found.accepted, found.num_in_batches) == (24, 8)


@pytest.mark.parametrize("place", ["settle.before", "settle.after"])
async def test_an_evaluation_ends_once_though_its_planner_is_killed_at_its_end(
    cluster, start_batcher_process, place
):
    run = cluster.create_run()
    await cluster.publish(run, evaluation("e", 1.0, 0.0, version=3))

    status = await asyncio.to_thread(start_batcher_process(place).wait, 60)
    known = eval_results(cluster.client, run)
    await cluster.start_batcher(lease_s=0.6)
    await cluster.publish(run, evaluation("f", 0.5, version=3))
    await num_evaluated(cluster, run, 3)

    assert status == -signal.SIGKILL
    assert [each.num_groups for each in known] == ([1] if place == "settle.after" else [])
    (found,) = eval_results(cluster.client, run)
    assert (found.num_groups, found.num_trajectories, found.reward.mean) == (2, 3, 0.5)
    assert [each.group_id for each in found.groups] == ["e", "f"]


async def test_evaluation_continues_while_training_waits_and_ends_with_the_run(cluster):
    run = cluster.create_run(batch_groups=1, max_staleness=0, max_planned_ahead=0)
    await cluster.start_batcher()
    await cluster.publish(run, group("a"))

    async with AsyncPublisher(cluster.url, run) as publisher:
        await (await publisher.publish(evaluation("e"))).result(10)
        with pytest.raises(ConflictError, match="evaluat"):
            async with publisher.trajectory("e", 1, num_samples=2):
                pass
        with pytest.raises(InvalidTurnError, match="num_needed: 2 of 4 samples: an evaluation"):
            publisher.group("some", 4, num_needed=2, purpose="eval")
        await publisher.close_run()
        with pytest.raises(EndOfRunError):
            await (await publisher.publish(evaluation("late"))).result(10)
    await num_evaluated(cluster, run, 2)


async def test_the_evaluation_of_a_killed_generator_ends_with_its_lease(cluster, start_process):
    run = cluster.create_run(lease_s=2.0, takeover_s=600)
    await cluster.start_batcher()
    process = start_process(GENERATOR, cluster.url, run)
    assert await process.line() == "sealed"
    process.kill()

    cluster.end_leases(run)
    await num_evaluated(cluster, run, 1)

    (result,) = eval_results(cluster.client, run)
    assert (result.version, result.num_trajectories, result.num_lost) == (4, 1, 1)
    by_state = cluster.ledger(run).by_state
    assert by_state[TrajectoryState.ABANDONED] == 1
    turns = keys.trajectory_keys(run, "e/0/0").turns
    await wait_until_async(lambda: not cluster.client.exists(turns), describe="released payload")


async def test_results_survive_compaction_snapshots_and_a_successor(cluster):
    upkeep = Upkeep(snapshot_events=1, compact_ended=1)
    run = cluster.create_run()
    first = await cluster.start_batcher(upkeep=upkeep, lease_s=0.6)
    await cluster.publish(run, evaluation("e", 1.0, 0.0, version=3))
    await num_evaluated(cluster, run, 2)
    await left_ledger(cluster, run)
    await first.stop()

    await cluster.start_batcher(upkeep=upkeep, lease_s=0.6)
    await cluster.publish(run, evaluation("f", 0.5, 0.5, version=3))
    await num_evaluated(cluster, run, 4)
    await left_ledger(cluster, run)

    (result,) = eval_results(cluster.client, run)
    assert (result.num_groups, result.reward.num, result.reward.mean) == (2, 4, 0.5)
    assert [each.group_id for each in result.groups] == ["e", "f"]
    with pytest.raises(ConflictError, match="is finished"):
        await cluster.publish(run, evaluation("e"))


async def left_ledger(cluster: Any, run: str) -> None:
    names = keys.run_keys(run)
    await wait_until_async(
        lambda: not cluster.client.exists(names.ledger, names.groups), describe="an empty ledger"
    )
