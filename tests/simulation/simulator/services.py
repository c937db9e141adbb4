"""Batchers: the real planner with all that stands beside it."""

from __future__ import annotations

import asyncio
import threading

from simulator.processes import Process
from simulator.shared_state import URL, SharedState, patiently
from simulator.store.clients import AsyncClient
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.listener import ParkedRuns
from turnstream_server.batcher.planner.planner import RunPlanner
from turnstream_server.batcher.planner.renewal import RENEWALS_PER_LEASE, LeadershipKeeper
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.ledger.core.frontier import read_frontier_async

_HANGS = 1.0
_HANGS_LEASES = 2
"""How often at most such a thread hangs, and by how much longer than a lease."""

_SEARCH_EVERY_S = 1.0

_HESITATES, _LONGEST_HESITATION_S = 0.2, 0.3
"""How often a plan that is checked is not written at once: much may come in between."""


async def batcher(process: Process, shared: SharedState) -> None:
    """A replica: it follows the run, and leads it while it can."""
    client = AsyncClient(process)
    frontier = await patiently(lambda: read_frontier_async(client, shared.run))
    view = RunView(client, shared.run, frontier=frontier, on_stepped=lambda _: None)
    keeper = LeadershipKeeper(URL, owner=process.name, lease_s=shared.leader_lease_s)
    keeper._thread = threading.Thread()  # never started: `_renew` below is what it would do
    parked = ParkedRuns(AsyncClient(process), after_s=shared.park_after_s)
    planner = RunPlanner(
        view,
        _HesitatingAssembler(process),
        keeper=keeper,
        upkeep=shared.upkeep,
        parked=parked,
    )
    await asyncio.gather(
        planner.run(),
        parked.watch(),
        _renew(process, keeper),
        _wake_after_restarts(process, parked, shared.run),
    )


class _HesitatingAssembler(Assembler):
    """May delay the writing of a checked plan: much may happen in between."""

    def __init__(self, process: Process) -> None:
        super().__init__(URL, max_cache_bytes=1 << 16)
        self._random = process.world.rng.random

    async def check(self, batch: PlannedBatch) -> None:
        """Check a plan as always, then hesitate."""
        await super().check(batch)
        if self._random() < _HESITATES:
            await asyncio.sleep(self._random() * _LONGEST_HESITATION_S)


async def _wake_after_restarts(process: Process, parked: ParkedRuns, run: str) -> None:
    """Wake the planner of a parked run after each restart of the store, as RunDiscovery does."""
    store = process.world.store
    num_starts = store.num_starts
    while True:
        await asyncio.sleep(_SEARCH_EVERY_S)
        if store.num_starts != num_starts:
            num_starts = store.num_starts
            parked.wake(run)


async def _renew(process: Process, keeper: LeadershipKeeper) -> None:
    """Renew leases as the keeper's thread does; it may hang while the planner continues."""
    world = process.world
    random = world.rng.random
    hangs = random() * _HANGS
    while True:
        await asyncio.sleep(keeper.lease_s / RENEWALS_PER_LEASE)
        if world.fault_rates.sleep and random() < hangs:
            await asyncio.sleep((1 + random() * _HANGS_LEASES) * keeper.lease_s)
        keeper._renew(keeper._living_terms())
