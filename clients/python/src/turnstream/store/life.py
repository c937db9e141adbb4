"""The life of a run beside its data: paused and going on, closed and open again."""

from __future__ import annotations

import redis

from turnstream.records.events import encode_event
from turnstream.store import keys
from turnstream.store.run_ids import find_run
from turnstream.store.runs import tell_batchers
from turnstream.store.scripts import Command, Script, run_command
from turnstream.types import RunReopened
from turnstream.types.names import checked_setting

_REOPEN_RUN = Script("reopen_run")
_SET_PAUSED = Script("set_paused")


def pause_run(client: redis.Redis, run: str, reason: str = "") -> bool:
    """Take no new group and plan no batch until the run is resumed.

    Groups that are open may be finished, batches that are planned are delivered; leases and
    deadlines go on. Generators and trainers that wait are told the reason when their time is up.

    Returns:
        False where it was paused before; the first reason stays.

    Raises:
        InvalidConfigError: a reason that is no valid Unicode.
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    return bool(run_command(client, _set_paused(find_run(client, run), 1, reason)))


def resume_run(client: redis.Redis, run: str) -> bool:
    """Let a paused run go on.

    Returns:
        False where it was not paused.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    return bool(run_command(client, _set_paused(find_run(client, run), 0, "")))


def reopen_run(client: redis.Redis, run: str) -> bool:
    """Let a closed run take groups again; what was carried is planned with them.

    Returns:
        False where it was not closed.

    Raises:
        RunNotFoundError: no such run.
        StoreUnavailableError: the store cannot be reached.
    """
    run = find_run(client, run)
    names = keys.run_keys(run)
    record = encode_event(RunReopened())
    command = _REOPEN_RUN((names.frontier, names.events, names.wake), record)
    was_closed = bool(run_command(client, command))
    tell_batchers(client, run)  # one that began after the run had ended has let it lie
    return was_closed


def _set_paused(run: str, is_paused: int, reason: str) -> Command:
    names = keys.run_keys(run)
    text = checked_setting(reason, field="reason")
    return _SET_PAUSED((names.frontier, names.wake), is_paused, text)
