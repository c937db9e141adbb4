"""Operators of a run, who pause, revise, close and reopen it, and its observer.

Each call may be lost, late or repeated, and its process may be killed without a successor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from simulator.processes import Process
from simulator.shared_state import SharedState, patiently
from simulator.store.clients import AsyncClient, run_stepwise
from turnstream.errors import (
    ConflictError,
    ObserverExpiredError,
    ReleasedError,
    StoreBehindError,
)
from turnstream.store.run.configs import revise_config
from turnstream.store.run.runs import close_run, pause_run, reopen_run, resume_run
from turnstream.types import Leftover
from turnstream_server.ledger.core.frontier import read_frontier_async
from turnstream_server.ledger.sessions.observers import declare_observer, note_observed

_LONGEST_PAUSE_S = 0.4
_LONGEST_REST_S = 0.8
"""Between two revisions, and while a run is open or closed."""
_LEFTOVERS: tuple[Leftover | None, ...] = (None, "short", "carry", "drop")
_AT_THE_END = b"short"
"""Policy for groups that make no whole batch."""
_READ_AGE_S = 0.1
"""Highest age of the state that a revision is decided on."""


async def _call(
    process: Process, shared: SharedState, act: Callable[..., Any], **options: Any
) -> Any:
    """Return the result of a call that is repeated until the store answers."""
    act = partial(act, run=shared.run, **options)
    client = AsyncClient(process)
    return await patiently(lambda: run_stepwise(client, act))


async def pauser(process: Process, shared: SharedState) -> None:
    random = process.world.rng.random
    while not shared.is_closing:
        await asyncio.sleep(random() * _LONGEST_PAUSE_S)
        if not shared.is_closing:
            await _call(process, shared, pause_run, reason="to look at it")
        await asyncio.sleep(random() * _LONGEST_PAUSE_S)
        await _call(process, shared, resume_run)


async def reviser(process: Process, shared: SharedState) -> None:
    await asyncio.gather(*[_revise(process, shared) for _ in range(2)])


async def _revise(process: Process, shared: SharedState) -> None:
    rng = process.world.rng
    while not shared.is_closing:
        await asyncio.sleep(rng.random() * _LONGEST_REST_S)
        planned = int(shared.frontier(process.world).get(b"planned", 0))
        step = max(1, planned + rng.choice((0, 1, 1, 1, 2, 3)))
        config = shared.another_config(shared.in_force)
        await asyncio.sleep(rng.random() * _READ_AGE_S)
        try:
            number = await _call(process, shared, revise_config, config=config, from_step=step)
        except ConflictError as error:
            shared.history.refused(error)
        else:
            if number > 1:  # else it is the first, which is from step 1 on
                shared.history.revised[number] = step, config


async def reopener(process: Process, shared: SharedState) -> None:
    rng = process.world.rng
    while not shared.is_closing:
        await asyncio.sleep(rng.random() * _LONGEST_REST_S)
        leftover = rng.choice(_LEFTOVERS)
        if shared.is_closing:
            return
        try:
            await _call(process, shared, close_run, reason="for a while", leftover=leftover)
        except ConflictError as error:  # an earlier call came late, and closed it otherwise
            shared.history.refused(error)
        await asyncio.sleep(rng.random() * _LONGEST_REST_S)
        await _call(process, shared, reopen_run)


async def closer(process: Process, shared: SharedState) -> None:
    while True:
        frontier = shared.frontier(process.world)
        if b"paused" in frontier:
            await _call(process, shared, resume_run)
        if frontier[b"closed"] == b"1" and frontier[b"leftover"] != _AT_THE_END:
            await _call(process, shared, reopen_run)
        await _call(process, shared, close_run, reason="the end")
        await asyncio.sleep(_LONGEST_REST_S)


_EXPIRY_S = 0.4
_LONGEST_SILENCE_S = 0.5
"""A little above the expiry: by chance the observer expires."""


async def observer(process: Process, shared: SharedState) -> None:
    client, rng = AsyncClient(process), process.world.rng
    while not shared.is_ended:
        declare = partial(
            declare_observer,
            *(client, shared.run),
            observer="observer",
            first_step=rng.choice((None, 1)),
            expiry_s=_EXPIRY_S,
        )
        try:
            declared = await patiently(declare)
            await _observe(process, shared, client, declared.next_step)
        except (ObserverExpiredError, ReleasedError, StoreBehindError) as error:
            shared.history.refused(error)
            await asyncio.sleep(rng.random() * _LONGEST_SILENCE_S)


async def _observe(
    process: Process, shared: SharedState, client: AsyncClient, next_step: int
) -> None:
    note = partial(note_observed, client, shared.run, observer="observer")
    while not shared.is_ended:
        await asyncio.sleep(process.world.rng.random() * _LONGEST_SILENCE_S)
        frontier = await patiently(lambda: read_frontier_async(client, shared.run))
        has_seen = frontier.planned >= next_step
        await patiently(partial(note, **{"seen" if has_seen else "asks": next_step}))
        next_step += has_seen
