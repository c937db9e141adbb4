"""Observers: consumers beside the trainer, which see its batches and drive nothing."""

from __future__ import annotations

import redis.asyncio

from turnstream.errors import InvalidConfigError
from turnstream.store import keys
from turnstream.store.scripts import Script, run_command_async

_OBSERVE = Script("observe", "turnstream_server.bus")
_OBSERVED = Script("observed", "turnstream_server.bus")


async def declare_observer(
    client: redis.asyncio.Redis, run: str, *, observer: str, first_step: int | None, expiry_s: float
) -> int:
    """Declare an observer, or let one come back; gives the next step that it has not seen.

    Args:
        client: of the store.
        run: name of the run.
        observer: its name.
        first_step: that a new observer begins with; None: the one after the last stepped.
        expiry_s: an observer that is silent for so long is forgotten.

    Raises:
        InvalidConfigError: no name, or an expiry or step that cannot be.
        ReleasedError: the step that it would begin with is no longer retained.
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    if not observer:
        raise InvalidConfigError("observer", "an observer needs a name")
    if not 0.001 <= expiry_s < 1e9:
        raise InvalidConfigError("expiry_s", f"{expiry_s} is not from 0.001 to 1e9 seconds")
    if first_step is not None and first_step < 1:
        raise InvalidConfigError("first_step", f"{first_step}; steps count from 1")
    names = keys.run_keys(run)
    command = _OBSERVE(
        (names.frontier, names.observers),
        keys.encode_name(observer),
        first_step or 0,
        int(expiry_s * 1000),
    )
    return await run_command_async(client, command)


async def note_observed(
    client: redis.asyncio.Redis, run: str, *, observer: str, step: int = 0
) -> float:
    """Note that an observer lives and has seen all batches up to `step`; gives its expiry, in s.

    Raises:
        ObserverExpiredError: it was silent for too long, or never declared.
        StoreUnavailableError: the store cannot be reached.
    """
    names = keys.run_keys(run)
    command = _OBSERVED((names.observers,), keys.encode_name(observer), step)
    expiry_ms: int = await run_command_async(client, command)
    return expiry_ms / 1000
