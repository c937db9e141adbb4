"""Trainer sessions: start, acknowledgements of steps, commits, and announced policy versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import redis.asyncio

from turnstream.errors import InvalidConfigError
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import RecoveryToken, RolledBack, VersionAnnounced
from turnstream_server.ledger.core.run_script import RunScript

_NEWEST_VERSIONS: Final = 16

_START = RunScript("start_session", "sessions", "frontier batches wake sessions events ranks times")
_STEPPED = RunScript("stepped", "sessions", "frontier batches wake ranks times")
_COMMITTED = RunScript("committed", "sessions", "frontier batches times wake ranks")
_RECORD_RANK = RunScript("record_rank", "sessions", "frontier batches ranks wake")
_ANNOUNCE = RunScript("announce_version", "sessions", "frontier versions events wake")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSession:
    """A trainer session, with its fencing number, and the run before it."""

    session_epoch: int
    next_step: int
    lineage: str
    previous_stepped: int
    previous_committed: int

    @property
    def returning_steps(self) -> range:
        """Batches that were stepped before and will be trained again."""
        return range(self.next_step, self.previous_stepped + 1)

    @property
    def is_rollback(self) -> bool:
        """Whether batches that were committed will be trained again."""
        return self.next_step <= self.previous_committed


async def start_session(
    client: redis.asyncio.Redis,
    run: str,
    *,
    session: str,
    dp_world_size: int,
    token: RecoveryToken | None,
) -> TrainerSession:
    """Start a session after the batch that the token names, and fence every earlier session.

    All ranks of a session may call this: a repeat before its first step changes nothing. Each start
    of a trainer needs a new name. Without a token, no batch may be committed. The token of step 0
    with an empty hash returns to the start in any case.

    Raises:
        StoreBehindError: this store does not have the batch of the token.
        ConflictError: no token, but batches are committed; or the session started otherwise.
        FencedError: the session has started before, and another one since.
    """
    if not session:
        raise InvalidConfigError("session", "a trainer session needs a name")
    if dp_world_size < 1:
        raise InvalidConfigError("dp_world_size", f"{dp_world_size} is not at least 1")
    step, chain_hash = ("", "") if token is None else (token.step, token.chain_hash)
    record = encode_event(RolledBack(step=step or 0))
    words = (session, dp_world_size, step, chain_hash, record)
    epoch, next_step, lineage, stepped, committed = await _START.call_async(client, run, *words)
    return TrainerSession(
        session_epoch=epoch,
        next_step=next_step,
        lineage=lineage.decode(),
        previous_stepped=stepped,
        previous_committed=committed,
    )


async def record_rank(
    client: redis.asyncio.Redis,
    run: str,
    *,
    session_epoch: int,
    dp_rank: int,
    step: int,
    manifest_hash: str,
    has: bool,
    session: str = "",
) -> None:
    """Record that a rank has a batch (`has`), or is about to receive it.

    If it has a batch that the store does not have, its ranks may train different data. Then the
    session is lost, and all its ranks are refused from now on.

    Raises:
        StoreBehindError: the session is lost; names the step that differs.
        NotReadyError: the requested batch is not in the store any more.
        FencedError: another session has started.
    """
    words = (session_epoch, session, dp_rank, step, manifest_hash, "has" if has else "gets")
    await _RECORD_RANK.call_async(client, run, *words)


async def acknowledge_stepped(
    client: redis.asyncio.Redis,
    run: str,
    *,
    session_epoch: int,
    step: int,
    manifest_hash: str,
    session: str = "",
    dp_rank: int = 0,
) -> RecoveryToken:
    """Record that a rank took the last update of a step; return its recovery token.

    The step counts once all ranks have called. A repeat, for this or an earlier step, returns the
    same token. If `session` is set, it must be the name of the epoch's session, here and below.

    Raises:
        FencedError: another session has started.
        StoreBehindError: this store does not have the batch, or the session is lost.
        ConflictError: not the next step, or trained from another manifest.
        NotReadyError: another rank has not called yet.
    """
    words = (session_epoch, step, manifest_hash, session, dp_rank)
    lineage: bytes = await _STEPPED.call_async(client, run, *words)
    return RecoveryToken(lineage=lineage.decode(), step=step, chain_hash=manifest_hash)


async def acknowledge_committed(
    client: redis.asyncio.Redis,
    run: str,
    *,
    session_epoch: int,
    token: RecoveryToken,
    session: str = "",
    dp_rank: int = 0,
) -> None:
    """Record that a rank's part of the checkpoint with this token is on disk.

    The commit counts once all ranks have called; a repeat changes nothing.

    Raises:
        FencedError: another session has started.
        StoreBehindError: a rank has the step, or one before it, from another manifest.
        ConflictError: its step is not stepped, or was trained from another manifest.
    """
    words = (session_epoch, token.step, token.chain_hash, session, dp_rank)
    await _COMMITTED.call_async(client, run, *words)


async def announce_version(
    client: redis.asyncio.Redis,
    run: str,
    announced: VersionAnnounced,
    *,
    session_epoch: int,
    session: str = "",
) -> None:
    """Announce new weights to generators and the planner; a repeat changes nothing.

    From the first announcement of a session on, groups are admitted after the announcement of a
    step: see `turnstream.batching.fold.capacity`.

    Raises:
        FencedError: another trainer session has started, or the run has another lineage.
        ConflictError: a higher version exists, or this one was announced with another content.
    """
    if announced.version < 0:
        raise InvalidConfigError("version", f"{announced.version} is below 0")
    record = encode_event(announced)
    words = (session_epoch, announced.version, record, session, announced.lineage, announced.step)
    await _ANNOUNCE.call_async(client, run, *words)


async def newest_version(client: redis.asyncio.Redis, run: str) -> VersionAnnounced | None:
    """The highest version announced so far; None before the first.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
    """
    versions = keys.run_keys(run).versions
    with translating():
        entries: Any = await client.execute_command("XREVRANGE", versions, "+", "-", "COUNT", 1)
    if not entries:
        return None
    return cast("VersionAnnounced", decode_event(entries[0][1][b"r"]))


async def version_before(client: redis.asyncio.Redis, run: str, step: int) -> int:
    """Return the highest version announced for a step before this one; -1 if there is none.

    Only the newest few versions are read: a step has one, as a rule.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
    """
    versions = keys.run_keys(run).versions
    with translating():
        entries: Any = await client.execute_command(
            "XREVRANGE", versions, "+", "-", "COUNT", _NEWEST_VERSIONS
        )
    found = (cast("VersionAnnounced", decode_event(fields[b"r"])) for _, fields in entries)
    return next((each.version for each in found if each.step < step), -1)
