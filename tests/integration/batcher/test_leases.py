"""Generators that are killed with trajectories and tasks, and seals that a store lost."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from harness.proxy import Proxy
from testkit import group, ids, wait_until_async
from testkit.runs.scripts import script
from turnstream.errors import StoreBehindError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.run.tasks import Prompt, add_prompts, read_prompt_counts
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.queries.ledger import read_ledger

TAKEOVER_S = 600.0
"""For so long a generator of a test may stand still and lose nothing."""

LEASE_S = 2.0

UIDS = ("p0", "p1", "p2", "p3", "p4")

# Takes two tasks, writes a turn of each, prints their prompts, and waits to be killed.
DOOMED = """
import sys
from turnstream.generator import Publisher
from testkit import ids

url, run = sys.argv[1:]
with Publisher(url, run) as publisher:
    held = [publisher.next_task(30) for _ in range(2)]
    for task in held:
        task.trajectories[0].append(ids("ab"), ids("c")).result(10)
    print(*(task.prompt_uid for task in held), flush=True)
    sys.stdin.read()
"""

# Does every task, and prints the error that ends its loop.
DILIGENT = """
import sys
from turnstream.errors import NotReadyError, PromptsExhaustedError
from turnstream.generator import Publisher
from testkit import ids

url, run = sys.argv[1:]
with Publisher(url, run) as publisher:
    while True:
        try:
            task = publisher.next_task(1)
        except NotReadyError:
            continue
        except PromptsExhaustedError as error:
            print(type(error).__name__, flush=True)
            break
        with task:
            for trajectory in task.trajectories:
                trajectory.append(ids(task.payload.decode()), ids("x"))
                trajectory.seal(float(trajectory.key.sample))
"""


@pytest.mark.parametrize(
    "policy", [{}, {"deadline_policy": "refill", "max_refills": 4}], ids=["revisit", "refill"]
)
async def test_tasks_of_a_killed_generator_are_granted_again_and_trained_once(
    cluster: Any, start_process: Any, policy: dict[str, Any]
) -> None:
    run, trainer = await cluster.serve(
        batch_groups=1, lease_s=LEASE_S, takeover_s=TAKEOVER_S, **policy
    )
    prompts = [Prompt(prompt_uid=uid, payload=uid.encode(), num_samples=2) for uid in UIDS]
    add_prompts(cluster.client, run, prompts)
    doomed = start_process(DOOMED, cluster.url, run)
    assert await doomed.line() == "p0 p1"

    doomed.kill()
    doomed.wait()
    cluster.end_leases(run)
    diligent = start_process(DILIGENT, cluster.url, run)
    await trainer.start()
    trained: Counter[str] = Counter()
    for step in range(1, len(UIDS) + 1):
        pulled = await trainer.get(step)
        trained.update({uid for each in pulled for uid in each.mini_batch.rows.prompt_uid})
        assert all(row[:2] in {f"p{number}" for number in range(5)} for row in pulled[0].rows)
        await trainer.stepped(pulled)
    said = await diligent.line()

    assert trained == Counter(UIDS)
    assert said == "PromptsExhaustedError"
    cluster.ledger(run)
    seen = read_prompt_counts(cluster.client, run)
    assert (seen.num_trained, seen.num_left, seen.num_given) == (5, 0, 0)
    left: Any = cluster.client.hkeys(keys.run_keys(run).prompts)
    assert [name for name in left if name.isdigit()] == []


PastOf = Callable[[EmbeddedServer], Any]
SMALL = Upkeep(snapshot_events=1, snapshot_steps=1, compact_ended=2)


def _give_up(url: str, run: str) -> None:
    """Another generator opens the group g, and abandons all of it."""
    with Publisher(url, run, writer="second") as publisher:
        for sample in (0, 1):
            writer = publisher.trajectory("g", sample, num_samples=2)
            writer.append(ids("ab"), ids("d")).result(10)
            writer.abandon("no more time").result(10)


async def _folded(cluster: Any, run: str) -> None:
    """Nothing is left of the ledger: ended trajectories have no payload and are compact."""
    names = keys.run_keys(run)
    await wait_until_async(
        lambda: cluster.client.hlen(names.untrained) > 0 and cluster.client.hlen(names.ledger) == 0,
        describe="the release",
    )


async def test_writer_of_a_lost_seal_learns_that_its_trajectory_was_abandoned(
    cluster: Any, server: EmbeddedServer, past_of: PastOf
) -> None:
    run = cluster.create_run(batch_groups=1)
    past = await asyncio.to_thread(past_of, server)

    with Publisher(cluster.url, run, writer="first", keep_s=60.0) as publisher:
        await asyncio.to_thread(publisher.publish(group("g")).result, 10)
        await asyncio.to_thread(past.come_back)
        await asyncio.to_thread(_give_up, cluster.url, run)
        await cluster.start_batcher(upkeep=SMALL)
        await _folded(cluster, run)
        await asyncio.to_thread(publisher.publish(group("h")).result, 10)

        with pytest.raises(StoreBehindError, match=r"g/[01]/0 was acknowledged, and .* lost"):
            await asyncio.to_thread(publisher.flush)


async def test_seal_with_a_lost_answer_counts_after_the_run_released_it(
    cluster: Any,
) -> None:
    run = cluster.create_run(batch_groups=1, retain_checkpoints=1)
    trainer = await cluster.start_trainer(run, upkeep=SMALL)

    with Proxy(cluster.url) as proxy:
        proxy.unanswered = script("post_sealed").sha.encode()
        sealing = asyncio.create_task(asyncio.to_thread(_seal, proxy.url, run))
        pulled = await trainer.get(1, wait_s=60)
        await trainer.committed(await trainer.stepped(pulled))
        ledger = keys.run_keys(run).ledger
        await wait_until_async(
            lambda: not cluster.client.hexists(ledger, "g/0/0"), describe="the release"
        )
        proxy.unanswered, proxy.replies.is_silent = b"", False
        proxy.cut_all()
        statistics = await sealing

    assert (statistics.num_trajectories, statistics.num_lost) == (1, 0)
    assert read_ledger(cluster.client, run).by_state[TrajectoryState.COMMITTED] == 1


def _seal(url: str, run: str) -> Any:
    with Publisher(url, run, timeout_s=60) as publisher:
        writer = publisher.trajectory("g", 0, num_samples=1)
        writer.append(ids("ab"), ids("c"))
        writer.seal(1.0)
        publisher.flush()
        return publisher.statistics()
