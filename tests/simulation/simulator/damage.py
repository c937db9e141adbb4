"""Payload that the disk damages when it is sealed or planned, and who has it planned again."""

from __future__ import annotations

import asyncio
from typing import Any

from simulator.checks.run_writes import RunWrites
from simulator.processes import Process
from simulator.shared_state import SharedState
from simulator.store.clients import thread_client
from turnstream.store.client import keys
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
