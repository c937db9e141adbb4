"""Trainer sessions: start, acknowledgements of steps, commits, and announced policy versions."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import redis.asyncio

from turnstream.errors import InvalidConfigError, NotReadyError
from turnstream.records.events import decode_event
from turnstream.store.client.scripts import Argument
from turnstream.types import RecoveryToken, VersionAnnounced
from turnstream_server.ledger.core.frontier import Frontier, parse_frontier
from turnstream_server.ledger.leadership.writes import (
    Difference,
    RunClient,
    read_together,
    write_result,
)
from turnstream_server.ledger.sessions import session_writes
from turnstream_server.ledger.sessions.session_writes import Facts, TrainerRank, TrainerSession


class Stepped(NamedTuple):
    """The recovery token of a step, and the highest version announced for a step before it.

    The version is -1 if there is none.
    """

    token: RecoveryToken
    version_before: int


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
    own = RunClient(client, run)
    step = 0 if token is None else token.step
    started, _ = await write_result(
        own,
        partial(_read, own, step, ("HGET", "sessions", session)),
        partial(session_writes.start, session=session, dp_world_size=dp_world_size, token=token),
    )
    return started


async def record_rank(
    client: redis.asyncio.Redis,
    run: str,
    caller: TrainerRank,
    *,
    step: int,
    manifest_hash: str,
    has: bool,
) -> Frontier:
    """Record that a rank has a batch (`has`), or is about to receive it; return the frontier.

    If it has a batch that the store does not have, its ranks may train different data. Then the
    session is lost, and all its ranks are refused from now on.

    Raises:
        StoreBehindError: the session is lost; names the step that differs.
        NotReadyError: the requested batch is not in the store any more.
        FencedError: another session has started.
    """
    own = RunClient(client, run)
    frontier, _ = await write_result(
        own,
        partial(_read, own, step, ("HGET", "ranks", caller.dp_rank)),
        partial(session_writes.deliver, caller=caller, manifest_hash=manifest_hash, has=has),
    )
    session_writes.check_lost(frontier)
    return frontier


async def note_damage(
    client: redis.asyncio.Redis, run: str, *, step: int, manifest_hash: str, sentence: str
) -> None:
    """Record damaged payload of a planned step that a rank was refused, for `turnstream why`."""
    own = RunClient(client, run)
    decide = partial(session_writes.damage, manifest_hash=manifest_hash, sentence=sentence)
    await write_result(own, partial(_read, own, step), decide)


async def acknowledge_stepped(
    client: redis.asyncio.Redis,
    run: str,
    caller: TrainerRank,
    *,
    step: int,
    manifest_hash: str,
) -> Stepped:
    """Record that a rank took the last update of a step.

    The step counts once all ranks have called. A repeat, for this or an earlier step, returns the
    same token.

    Raises:
        FencedError: another session has started.
        StoreBehindError: this store does not have the batch, or the session is lost.
        ConflictError: not the next step, or trained from another manifest.
        NotReadyError: another rank has not called yet.
    """
    own = RunClient(client, run)
    lineage, replies = await write_result(
        own,
        partial(_read, own, step),
        partial(session_writes.step, caller=caller, manifest_hash=manifest_hash),
    )
    of_all = replies[-1] if replies else await read_together(own, session_writes.VERSIONS)
    if isinstance(of_all, Difference):
        rank = of_all.field.removeprefix("stepped:")
        raise NotReadyError(f"step {step}: dp_rank {rank} has not stepped it")
    newest = (cast("VersionAnnounced", decode_event(fields[1])) for _, fields in of_all[-1])
    before = next((each.version for each in newest if each.step < step), -1)
    return Stepped(RecoveryToken(lineage=lineage, step=step, chain_hash=manifest_hash), before)


async def acknowledge_committed(
    client: redis.asyncio.Redis, run: str, caller: TrainerRank, token: RecoveryToken
) -> None:
    """Record that a rank's part of the checkpoint with this token is on disk.

    The commit counts once all ranks have called; a repeat changes nothing.

    Raises:
        FencedError: another session has started.
        StoreBehindError: a rank has the step, or one before it, from another manifest.
        ConflictError: its step is not stepped, or was trained from another manifest.
    """
    own = RunClient(client, run)
    await write_result(
        own,
        partial(_read, own, token.step, ("HGET", "ranks", f"committed:{caller.dp_rank}")),
        partial(session_writes.commit, caller=caller, chain_hash=token.chain_hash),
    )


async def announce_version(
    client: redis.asyncio.Redis, run: str, caller: TrainerRank, announced: VersionAnnounced
) -> None:
    """Announce new weights to generators and the planner; a repeat changes nothing.

    An empty lineage is replaced by that of the run.

    From the first announcement of a session on, groups are admitted after the announcement of a
    step: see `turnstream.batching.fold.capacity`.

    Raises:
        FencedError: another trainer session has started, or the run has another lineage.
        ConflictError: a higher version exists, or this one was announced with another content.
    """
    if announced.version < 0:
        raise InvalidConfigError("version", f"{announced.version} is below 0")
    own = RunClient(client, run)
    entry_id = f"{announced.version + 1}-0"

    async def read() -> Facts:
        facts = await _read(own, 0, ("XRANGE", "versions", entry_id, entry_id))
        entries: Any = facts.noted
        return facts._replace(noted=entries[0][1][1] if entries else None)

    await write_result(
        own, read, partial(session_writes.announce, caller=caller, announced=announced)
    )


async def _read(
    own: RunClient, step: int, noted: tuple[str, str, *tuple[Argument, ...]] | None = None
) -> Facts:
    """Return the facts about a call for a step; a command reads the record of the call."""
    now_ms, fields, batch, newest, *known = await read_together(
        own,
        ("HGETALL", "frontier"),
        ("HGET", "batches", step),
        ("XREVRANGE", "versions", "+", "-", "COUNT", 1),
        *([] if noted is None else [noted]),
    )
    stored = dict(zip(fields[::2], fields[1::2], strict=True))
    frontier = parse_frontier(own.run, stored)
    newest_id = newest[0][0].decode() if newest else "0-0"
    return Facts(now_ms, frontier, stored, step, batch, newest_id, *known)
