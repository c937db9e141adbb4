"""Payload that the disk damages when it is sealed or planned, and who has it planned again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from simulator.clients import thread_client
from simulator.processes import Process
from simulator.run_writes import RunWrites
from simulator.shared_state import SharedState
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.members import FoldState
from turnstream.batching.fold.withdrawing import state_before, with_planned_reward
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.planning.selection import Selector
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.types import SealedTrajectory, TrajectoryKey
from turnstream_server.ledger.planning.announcements import request_replan

_UNPLANNED = 0.02
"""How often, of damaged payload, it is not planned yet."""
_UNASKED = 0.05
"""Rate of requests of an operator without a refused rank."""


def strike(writes: RunWrites) -> None:
    """Flip a bit of a trajectory that is planned and not stepped, or is sealed to be planned."""
    world, shared = writes.world, writes.shared
    stepped = int(writes.hash("frontier")[b"stepped"])
    planned = [name for name, step in writes.step_of.items() if step > stepped]
    sealed = [
        name.decode()
        for name, entry in writes.hash("ledger").items()
        if entry.startswith(b"sealed:") and not name.startswith(b"e")
    ]
    chosen = sealed if sealed and world.rng.random() < _UNPLANNED else planned
    names = [name for name in chosen if name not in shared.rotten]
    if not names:
        return
    world.note("rot")
    name = world.rng.choice(names)
    turns: Any = writes.values[keys.trajectory_keys(shared.run, name).turns.encode()]
    position = world.rng.randrange(len(turns))
    field, record = turns.entries[position]
    turns.entries[position] = [field, record[:-9] + bytes([record[-9] ^ 1]) + record[-8:]]
    shared.rotten.add(name)


async def replanner(process: Process, shared: SharedState) -> None:
    random = process.world.rng.random
    client = thread_client(process)
    while True:
        await asyncio.sleep(0.1 + 0.4 * random())
        damaged = client.execute_command("HGET", keys.run_keys(shared.run).frontier, "damaged")
        if damaged is not None or (shared.rotten and random() < _UNASKED):
            request_replan(client, shared.run)


@dataclass(frozen=True)
class PutBack:
    """A withdrawal of plans from a step on, at a position of the fold."""

    step: int
    manifests: tuple[Manifest, ...]
    members: dict[TrajectoryKey, SealedTrajectory]

    def state(self, state: FoldState) -> FoldState:
        """Return the state of the fold after the withdrawal."""
        return state_before(self.manifests, self.members, state)

    def new_selector(self, config: BatchingConfig, before: Selector) -> Selector:
        """Return the selector of a leader that restarts after the last valid plan."""
        selector = Selector(config)
        selector.versions = before.versions
        selector.pass_step(self.step - 1)
        return selector


def put_back(writes: RunWrites, manifests: list[Manifest], dead: set[TrajectoryKey]) -> PutBack:
    """The groups of withdrawn plans, from the events of the whole run."""
    events = [decode_event(record) for _, record in writes.events]
    sealed = {each.key: each for each in events if isinstance(each, SealedTrajectory)}
    members = {
        plan.key: with_planned_reward(
            sealed[plan.key], plan, config=writes.config(manifest.config_revision)
        )
        for manifest in manifests
        for group in manifest.groups
        for plan in group.trajectories
        if plan.key not in dead
    }
    return PutBack(manifests[0].step, tuple(manifests), members)
