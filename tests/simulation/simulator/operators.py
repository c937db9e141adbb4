"""Operators of a run, who pause, revise, close and reopen it, and its observer.

Each call may be lost, late or repeated, and its process may be killed without a successor.
"""

from __future__ import annotations

import asyncio
from functools import partial

from simulator.clients import AsyncClient, run_stepwise
from simulator.processes import Process
from simulator.shared_state import SharedState, patiently
from turnstream.errors import ConflictError, ObserverExpiredError, ReleasedError
from turnstream.store.client import keys
from turnstream.store.run.configs import revise_config
from turnstream.store.run.runs import close_run, pause_run, reopen_run, resume_run
from turnstream.types import Leftover
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.sessions.observers import declare_observer, note_observed

_LONGEST_PAUSE_S = 0.4
_LONGEST_REST_S = 0.8
"""Between two revisions, and while a run is open or closed."""
_LEFTOVERS: tuple[Leftover | None, ...] = (None, "short", "carry", "drop")
_AT_THE_END = b"short"
"""Policy for groups that make no whole batch."""
_HEARD_OF_S = 0.1
"""How much later than the others somebody may look at what he decides on."""


async def pauser(process: Process, shared: SharedState) -> None:
    client, random = AsyncClient(process), process.world.rng.random
    while not shared.is_closing:
        await asyncio.sleep(random() * _LONGEST_PAUSE_S)
        if not shared.is_closing:
            await patiently(
                lambda: run_stepwise(client, lambda c: pause_run(c, shared.run, "to look at it"))
            )
        await asyncio.sleep(random() * _LONGEST_PAUSE_S)
        await patiently(lambda: run_stepwise(client, lambda c: resume_run(c, shared.run)))


async def reviser(process: Process, shared: SharedState) -> None:
    await asyncio.gather(*[_revise(process, shared) for _ in range(2)])


async def _revise(process: Process, shared: SharedState) -> None:
    client, rng = AsyncClient(process), process.world.rng
    while not shared.is_closing:
        await asyncio.sleep(rng.random() * _LONGEST_REST_S)
        frontier = _frontier(process, shared)
        step = int(frontier.get(b"planned", 0)) + rng.choice((0, 1, 1, 1, 2, 3))
        config = shared.another_config(shared.in_force)
        await asyncio.sleep(rng.random() * _HEARD_OF_S)
        try:
            number = await patiently(
                lambda step=step, config=config: run_stepwise(
                    client,
                    lambda c: revise_config(c, shared.run, config, from_step=max(1, step)),
                )
            )
        except ConflictError as error:
            shared.history.refused(error)
        else:
            if number > 1:  # else it is the first, which is from step 1 on
                shared.history.revised[number] = max(1, step), config


async def reopener(process: Process, shared: SharedState) -> None:
    client, rng = AsyncClient(process), process.world.rng
    while not shared.is_closing:
        await asyncio.sleep(rng.random() * _LONGEST_REST_S)
        leftover = rng.choice(_LEFTOVERS)
        if shared.is_closing:
            return
        close = partial(close_run, run=shared.run, reason="for a while", leftover=leftover)
        try:
            await patiently(partial(run_stepwise, client, close))
        except ConflictError as error:  # an earlier call came late, and closed it otherwise
            shared.history.refused(error)
        await asyncio.sleep(rng.random() * _LONGEST_REST_S)
        await patiently(lambda: run_stepwise(client, lambda c: reopen_run(c, shared.run)))


async def closer(process: Process, shared: SharedState) -> None:
    client = AsyncClient(process)
    while True:
        frontier = _frontier(process, shared)
        if b"paused" in frontier:
            await patiently(lambda: run_stepwise(client, lambda c: resume_run(c, shared.run)))
        if frontier[b"closed"] == b"1" and frontier[b"leftover"] != _AT_THE_END:
            await patiently(lambda: run_stepwise(client, lambda c: reopen_run(c, shared.run)))
        await patiently(lambda: run_stepwise(client, lambda c: close_run(c, shared.run, "the end")))
        await asyncio.sleep(_LONGEST_REST_S)


def _frontier(process: Process, shared: SharedState) -> dict[bytes, bytes]:
    frontier = process.world.store.values[keys.run_keys(shared.run).frontier.encode()]
    assert isinstance(frontier, dict)
    return frontier


_EXPIRY_S = 0.4
_LONGEST_SILENCE_S = 0.5
"""A little above what it may be: by chance it is forgotten."""


async def observer(process: Process, shared: SharedState) -> None:
    client, rng = AsyncClient(process), process.world.rng
    while not shared.is_ended:
        first_step = rng.choice((None, 1))
        try:
            declared = await patiently(
                lambda first_step=first_step: declare_observer(
                    client,
                    shared.run,
                    observer="observer",
                    first_step=first_step,
                    expiry_s=_EXPIRY_S,
                )
            )
            await _observe(process, shared, client, declared.next_step)
        except (ObserverExpiredError, ReleasedError) as error:
            shared.history.refused(error)
            await asyncio.sleep(rng.random() * _LONGEST_SILENCE_S)


async def _observe(
    process: Process, shared: SharedState, client: AsyncClient, next_step: int
) -> None:
    rng = process.world.rng
    while not shared.is_ended:
        await asyncio.sleep(rng.random() * _LONGEST_SILENCE_S)
        frontier = await patiently(lambda: read_frontier_async(client, shared.run))
        has_seen = frontier.planned >= next_step
        said = {"seen": next_step} if has_seen else {"asks": next_step}
        await patiently(
            lambda said=said: note_observed(client, shared.run, observer="observer", **said)
        )
        next_step += has_seen
