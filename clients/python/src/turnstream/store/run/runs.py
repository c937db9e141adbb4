"""Runs in the store: create, list, pause, resume, close, reopen and watch for new weights."""

from __future__ import annotations

from typing import Any, Final, get_args

import redis
import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import changed_settings, unread_settings
from turnstream.errors import ConflictError, InvalidConfigError, RunNotFoundError
from turnstream.records.configs import encode_config
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import create_under, find_run, listed_run
from turnstream.store.client.scripts import Command, Script, run_command
from turnstream.store.client.stored_values import reading
from turnstream.store.run.configs import read_config, read_revisions
from turnstream.types import Leftover, RunClosed, RunReopened, VersionAnnounced
from turnstream.types.names import RunId, checked_setting

_NUM_NEWS: Final = 1_000
"""Kept entries; a batcher that missed more reads the list of all runs."""

_CREATE_RUN = Script("create_run", "turnstream.store.run")
_SET_CLOSED = Script("set_closed", "turnstream.store.run")
_SET_PAUSED = Script("set_paused", "turnstream.store.run")


def create_run(client: redis.Redis, run: str, config: BatchingConfig) -> int:
    """Create a run, or find the run that was created with this config.

    Returns:
        The config revision in force: 1 for a new run, more for a run that was revised since.

    Raises:
        InvalidConfigError: a setting of a new run has no effect.
        ConflictError: the run exists with another config.
    """
    _check_new(client, run, config)

    def create(run_id: RunId) -> int:
        try:
            return run_command(client, _create_command(run_id, config))
        except ConflictError:
            revisions = read_revisions(client, run_id)
            now = revisions.revision(revisions.in_force)
            if config not in (now.config, revisions.stored[0].config):
                raise _other_config(run_id, now.config, config) from None
            return now.number

    run_id, revision = create_under(client, run, create)
    list_run(client, run_id)
    return revision


def _check_new(client: redis.Redis, run: str, config: BatchingConfig) -> None:
    """Refuse a new run with a setting that has no effect; a run of an older release may have it."""
    problem = next(unread_settings(config), None)
    if problem is None:
        return
    try:
        read_config(client, find_run(client, run))
    except RunNotFoundError:
        raise InvalidConfigError(*problem) from None


def _other_config(run: str, stored: BatchingConfig, config: BatchingConfig) -> ConflictError:
    changes = "; ".join(
        f"{change.name} is {change.before!r}, not {change.after!r}"
        for change in changed_settings(stored, config)
    )
    return ConflictError(
        f"run {run} exists with another config: {changes}. Open it with its own settings, change "
        "them with `turnstream run revise`, or use another name"
    )


def _create_command(run: RunId, config: BatchingConfig) -> Command:
    names = keys.run_keys(run)
    shared = keys.incarnation_key(run)
    where = (names.frontier, names.config, names.counts, names.clock, shared)
    return _CREATE_RUN(where, encode_config(config), run.incarnation)


def list_run(client: redis.Redis, run: str) -> None:
    """List a run that was created, and announce it to the batchers."""
    with translating():
        client.sadd(keys.RUNS, keys.encode_run(run))
    announce_run(client, run)


def announce_run(client: redis.Redis, run: str) -> None:
    """Announce that a run needs a planner: it is new, or was reopened."""
    with translating():
        words = ("MAXLEN", "~", _NUM_NEWS, "*", "n", keys.encode_run(run))
        client.execute_command("XADD", keys.NEWS, *words)


def list_runs(client: redis.Redis) -> list[RunId]:
    """Return the ids of all runs, sorted, those that are being deleted among them."""
    with translating():
        names: Any = client.smembers(keys.RUNS)
    return sorted(run for each in names if (run := listed_run(each)) is not None)


def newest_version(client: redis.Redis, run: str) -> VersionAnnounced | None:
    """Return the highest announced version; None before the first."""
    versions = keys.run_keys(find_run(client, run)).versions
    with translating():
        entries: Any = client.xrevrange(versions, count=1)
    if not entries:
        return None
    event = decode_event(entries[0][1][b"r"])
    assert isinstance(event, VersionAnnounced)  # only announcements are written there
    return event


def list_versions(
    client: redis.Redis, run: str, *, above: int, limit: int
) -> list[VersionAnnounced]:
    """Return the announced versions above a number, the newest first, at most `limit`."""
    versions = keys.run_keys(find_run(client, run)).versions
    with reading(versions), translating():
        # The entry of version v has the id <v + 1>-0.
        entries: Any = client.xrevrange(versions, min=f"({above + 1}-0", count=limit)
        events = [decode_event(fields[b"r"]) for _, fields in entries]
    return [event for event in events if isinstance(event, VersionAnnounced)]


def close_run(
    client: redis.Redis, run: str, reason: str = "", *, leftover: Leftover | None = None
) -> bool:
    """Close a run to new groups; return False if it was closed before.

    Without `leftover`, it is "short" or the rule of the first close.
    """
    run = find_run(client, run)
    return bool(run_command(client, close_command(run, reason, leftover=leftover)))


def close_command(run: str, reason: str, *, leftover: Leftover | None = None) -> Command:
    """Return the call that closes a run; nothing is sent."""
    check_leftover(leftover)
    names = keys.run_keys(run)
    checked_setting(reason, field="reason")
    record = encode_event(RunClosed(reason=reason, leftover=leftover or "short"))
    where = (names.frontier, names.events, names.wake)
    return _SET_CLOSED(where, 1, record, leftover or "")


def check_leftover(leftover: object) -> None:
    """Raise InvalidConfigError for a rule that a closed run cannot have."""
    if leftover not in (None, *get_args(Leftover)):
        choices = ", ".join(get_args(Leftover))
        raise InvalidConfigError("leftover", f"{leftover!r} is not one of {choices}")


def pause_run(client: redis.Redis, run: str, reason: str = "") -> bool:
    """Pause a run; return False if it was paused before, and keep the first reason."""
    return _set_paused(client, run, 1, reason)


def resume_run(client: redis.Redis, run: str) -> bool:
    """End the pause of a run; return whether it was paused."""
    return _set_paused(client, run, 0, "")


def reopen_run(client: redis.Redis, run: str) -> bool:
    """Reopen a closed run; return whether it was closed. Carried groups are planned."""
    run = find_run(client, run)
    names = keys.run_keys(run)
    where = (names.frontier, names.events, names.wake)
    command = _SET_CLOSED(where, 0, encode_event(RunReopened()), "")
    was_closed = bool(run_command(client, command))
    announce_run(client, run)  # a batcher that started after the end does not follow it
    return was_closed


def _set_paused(client: redis.Redis, run: str, is_paused: int, reason: str) -> bool:
    names = keys.run_keys(find_run(client, run))
    text = checked_setting(reason, field="reason")
    return bool(run_command(client, _SET_PAUSED((names.frontier, names.wake), is_paused, text)))
