"""Who stands beside a run: an observer of its batches."""

from __future__ import annotations

import asyncio

from simulator.clients import AsyncClient
from simulator.life import Life, patiently
from simulator.processes import Process
from turnstream.errors import ObserverExpiredError, ReleasedError
from turnstream_server.bus.frontier import read_frontier_async
from turnstream_server.bus.observers import declare_observer, note_observed

_EXPIRY_S = 0.4
_LONGEST_SILENCE_S = 0.5
"""A little above what it may be: by chance it is forgotten."""


async def observer(process: Process, life: Life) -> None:
    """One observer: it sees one batch after another, and is forgotten where it is silent."""
    client, rng = AsyncClient(process), process.world.rng
    while not life.is_ended:
        first_step = rng.choice((None, 1))
        try:
            declared = await patiently(
                lambda first_step=first_step: declare_observer(
                    client,
                    life.run,
                    observer="observer",
                    first_step=first_step,
                    expiry_s=_EXPIRY_S,
                )
            )
            await _observe(process, life, client, declared.next_step)
        except (ObserverExpiredError, ReleasedError) as error:
            life.history.refused(error)
            await asyncio.sleep(rng.random() * _LONGEST_SILENCE_S)


async def _observe(process: Process, life: Life, client: AsyncClient, next_step: int) -> None:
    rng = process.world.rng
    while not life.is_ended:
        await asyncio.sleep(rng.random() * _LONGEST_SILENCE_S)
        frontier = await patiently(lambda: read_frontier_async(client, life.run))
        has_seen = frontier.planned >= next_step
        said = {"seen": next_step} if has_seen else {"asks": next_step}
        await patiently(
            lambda said=said: note_observed(client, life.run, observer="observer", **said)
        )
        next_step += has_seen
