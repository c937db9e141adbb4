"""Observers: consumers beside the trainer, which see its batches and drive nothing."""

from __future__ import annotations

from dataclasses import dataclass

import redis
import redis.asyncio

from turnstream.errors import InvalidConfigError
from turnstream.store import keys
from turnstream.store.scripts import Script, run_command_async
from turnstream_server.bus.pages import hash_fields, server_ms

_OBSERVE = Script("observe", "turnstream_server.bus")
_OBSERVED = Script("observed", "turnstream_server.bus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """An observer, as the run knows it.

    Attributes:
        seen: the newest step that it has seen; 0 before the first.
        silent_s: seconds since it was heard of.
        left_s: seconds until it is forgotten, and nothing is kept for it; 0 or below: it is gone.
    """

    name: str
    seen: int
    silent_s: float
    left_s: float


def read_observers(client: redis.Redis, run: str) -> tuple[Observer, ...]:
    """The observers of a run, by name; also those that expired and were not missed yet.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    found = dict(hash_fields(client, keys.run_keys(run).observers))
    now_ms = server_ms(client)
    return tuple(_observer(name, found[name].decode(), now_ms) for name in sorted(found))


def _observer(name: str, entry: str, now_ms: int) -> Observer:
    seen, expires_ms, expiry_ms = map(int, entry.split(":"))
    return Observer(
        name=keys.decode_name(name),
        seen=seen,
        silent_s=max(0, now_ms - (expires_ms - expiry_ms)) / 1_000,
        left_s=(expires_ms - now_ms) / 1_000,
    )


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
