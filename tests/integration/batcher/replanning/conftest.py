"""Runs whose payload is damaged after it was planned, and what can be seen of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from harness.stored import content_of
from testkit.services.clusters import Cluster
from turnstream.batching.merge.plan import Manifest
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.run.credits import credit
from turnstream.types import Group
from turnstream_server.batcher.planner.snapshotting import DEFAULT_UPKEEP, Upkeep
from turnstream_server.ledger.admin.dead_letters import read_dead_letters
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.planning.announcements import await_replan, request_replan
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.ledger import read_budget
from turnstream_server.ledger.sessions.observers import declare_observer, note_observed


@pytest.fixture
def planned(cluster):
    """Starts a run of groups, its batcher and its trainer, once a step is delivered."""

    async def start(
        *groups: Group,
        step: int,
        closes: bool = False,
        upkeep: Upkeep = DEFAULT_UPKEEP,
        **fields: Any,
    ):
        run = cluster.create_run(**{"batch_groups": 1, **fields})
        trainer = cluster.trainer(await cluster.start_batcher(upkeep=upkeep), run)
        await cluster.publish(run, *groups, closes=closes)
        await trainer.start("a")
        await trainer.get(step)
        return run, trainer

    return start


@pytest.fixture
def replan(cluster):
    def ask(run: str) -> str:
        return await_replan(cluster.client, run, request_replan(cluster.client, run), wait_s=30)

    return lambda run: asyncio.to_thread(ask, run)


@pytest.fixture
def store(cluster) -> StoreReader:
    return StoreReader(cluster)


class StoreReader:
    """The state of a run in the store, for comparisons."""

    def __init__(self, cluster: Cluster) -> None:
        self.url = cluster.url
        self.client = cluster.client

    def letters(self, run: str) -> dict[str, str]:
        """The dead letters, with their reasons."""
        found = read_dead_letters(self.client, run).trajectories
        return {each.name: each.reason for each in found}

    def plans(self, run: str) -> list[Manifest]:
        """The plans, but for what names their run and the moment of an event."""
        stored = [read_plan(self.client, run, step + 1) for step in range(self.planned(run))]
        return [
            replace(each.manifest, run="", previous_hash="", last_event_id="")
            for each in stored
            if each is not None
        ]

    def chain(self, run: str) -> list[int]:
        """The steps whose plans make one chain, from the first on."""
        stored = [read_plan(self.client, run, step + 1) for step in range(self.planned(run))]
        hashes = {b"%d" % (step + 1): each.hash for step, each in enumerate(stored) if each}
        entries: Any = self.client.hgetall(keys.run_keys(run).batches)
        assert {step: entry.decode().partition(":")[2] for step, entry in entries.items()} == hashes
        previous = ""
        for each in stored:
            assert each is not None
            assert each.manifest.previous_hash == previous
            previous = each.hash
        return [each.manifest.step for each in stored if each is not None]

    def digest(self, run: str) -> list[Any]:
        """Return the state of a run, except its leader, requests and time."""
        names = keys.run_keys(run)
        may_change = (names.leader, names.frontier, names.wake, names.clock)
        contents = [content_of(self.client, name) for name in names if name not in may_change]
        frontier: Any = self.client.hgetall(names.frontier)
        frontier.pop(b"replanned", None)
        return [*contents, frontier]

    def planned(self, run: str) -> int:
        """The newest step that is planned."""
        return read_frontier(self.client, run).planned

    def most_live(self, run: str) -> int:
        """How many groups may be live now."""
        return credit(self.client, run).most

    async def observe(self, run: str, *, seen_step: int) -> int:
        """The next step of an observer, which has seen another one since."""
        async with connect_async(self.url) as client:
            declared = await declare_observer(
                client, run, observer="eyes", first_step=1, expiry_s=60.0
            )
            await note_observed(client, run, observer="eyes", seen=seen_step)
        return declared.next_step

    def held(self, run: str) -> tuple[int, int, int]:
        """The sums of bytes: reserved, planned, and the rest of what is stored."""
        held = read_budget(self.client, run)
        return held.reserved, held.planned, held.stored

    def sum_held(self, run: str, state: str) -> int:
        """The bytes of every trajectory in a state, one by one."""
        names = keys.run_keys(run)
        ledger: Any = self.client.hgetall(names.ledger)
        held: Any = self.client.hgetall(names.payload_bytes)
        start = f"{state}:".encode()
        return sum(int(held.get(name, 0)) for name, of in ledger.items() if of.startswith(start))
