"""Trajectories of a generator that is killed, end to end."""

from __future__ import annotations

import asyncio

import pytest

from testkit import group, ids
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.types import TrajectoryState

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

TAKEOVER_S = 600.0
"""For so long a generator of a test may stand still and lose nothing."""

# Opens a group of two, writes two turns of both samples, and waits to be killed.
GENERATOR = """
import sys
from turnstream.generator import Publisher
from testkit import ids

with Publisher(*sys.argv[1:], writer="first") as publisher, publisher.group("first", 2) as visit:
    for sample in range(2):
        episode = visit.trajectory(sample)
        episode.append(ids("ab"), ids("c")).result(10)
        episode.append(ids("abcd"), ids("e")).result(10)
    print("wrote", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def kill_generator(house, start_process):
    """Kills a generator that has written its turns."""

    async def kill(run: str) -> None:
        doomed = start_process(GENERATOR, house.url, run)
        assert await doomed.line() == "wrote"
        doomed.kill()
        doomed.wait()

    return kill


async def test_turns_of_a_killed_generator_are_adopted_and_trained_once(house, kill_generator):
    run, trainer = await house.serve(batch_groups=1, takeover_s=TAKEOVER_S)
    await kill_generator(run)
    house.end_leases(run, ago_s=1)

    def adopt() -> None:
        with Publisher(house.url, run, writer="second") as publisher:
            for lapsed in publisher.lapsed():
                episode = publisher.adopt(*lapsed.key)
                last = episode.turns[-1]
                context = [*last.prompt_ids, *last.response_ids, ord("f")]
                episode.append(context, ids("g"))
                episode.seal(float(lapsed.key.sample))

    await asyncio.to_thread(adopt)
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.rows == ["abCdEfG", "abCdEfG"]
    assert pulled.mini_batch.rows.group_id == ["first", "first"]
    assert house.ledger(run).accepted == 2
    assert house.states(run) == {TrajectoryState.PLANNED: 2}


async def test_group_of_a_killed_generator_is_abandoned_and_makes_room(house, kill_generator):
    one_group = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}
    run, trainer = await house.serve(**one_group, lease_s=2.0, takeover_s=TAKEOVER_S)
    await kill_generator(run)

    house.end_leases(run)
    await house.publish(run, group("g"))  # waits for admission
    await trainer.start()
    (pulled,) = await trainer.get(1)

    names = keys.run_keys(run)
    assert pulled.mini_batch.rows.group_id == ["g", "g"]
    ended = b"abandoned:the lease of first ended"
    assert house.client.hget(names.ledger, "first/0/0") == ended
    assert house.client.hget(names.groups, "first") == b"2:incomplete"
    assert house.client.hget(names.frontier, "live_groups") == b"1"
    assert house.states(run)[TrajectoryState.ABANDONED] == 2
