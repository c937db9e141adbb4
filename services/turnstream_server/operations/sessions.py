"""Client sessions: opened by a client, kept alive by its heartbeats, and closed by silence.

A closed session takes no new work. Its results are deleted, its models leave their workers, and its
saved checkpoints stay.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import redis.asyncio

from turnstream.errors import EndOfRunError, RunNotFoundError, StoreFullError
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import run_command_async
from turnstream_server.ledger.leadership.writes import time_ms
from turnstream_server.operations.announcing import announce, announce_end, essential_write
from turnstream_server.operations.keys import (
    ALIVE,
    MODEL_ID,
    model_keys,
    models_key,
    owner_keys,
    sampler_keys,
    session_keys,
)
from turnstream_server.operations.models import read_model_async

DEFAULT_SILENCE_S: Final = 600.0
"""Seconds without a heartbeat after which a session is closed. Clients send one every 10 s."""

_GRACE: Final = 0.1
"""Share of the silence after its end in which a heartbeat keeps a session. An outage of the store,
or a jump of its clock, makes all sessions silent at once."""


class Session(NamedTuple):
    """A client session.

    Attributes:
        session_id: without `:` and `/`.
        owner: the owner of its key, from `keys.records.owner_of`.
        tags, user_metadata, display_name, sdk_version: as the client sent them.
        finished: the reason that the client gave at its end; "" while it works.
    """

    session_id: str
    owner: str
    tags: Sequence[str] = ()
    user_metadata: Mapping[str, Any] | None = None
    display_name: str | None = None
    sdk_version: str = ""
    finished: str = ""

    def require_open(self) -> Session:
        """Return the session, which takes work; EndOfRunError for a closed one."""
        if self.finished:
            raise EndOfRunError(f"session {self.session_id!r} has ended: {self.finished}")
        return self


async def open_session(client: redis.asyncio.Redis, session: Session) -> None:
    """Create a session with a new id."""
    now_ms = await _now_ms(client)
    with translating():
        key = session_keys(session.session_id).session
        record = json.dumps(session._asdict() | {"finished": None})
        # First: a session without heartbeats that is not listed would never be closed.
        await client.zadd(ALIVE, {session.session_id: now_ms})
        await cast(Any, client.hset(key, "record", record))
        await client.zadd(owner_keys(session.owner).sessions, {session.session_id: now_ms})


async def read_session(client: redis.asyncio.Redis, session_id: str) -> Session:
    """Return a session; RunNotFoundError if there is none."""
    with translating():
        key = session_keys(session_id).session
        record, finished = await cast(Any, client.hmget(key, "record", "finished"))
    if record is None:
        raise RunNotFoundError(f"there is no session {session_id!r}")
    values = json.loads(record) | {"finished": (finished or b"").decode()}
    return Session(**values)


async def beat(client: redis.asyncio.Redis, session_id: str) -> None:
    """Record a heartbeat; EndOfRunError for a closed session, RunNotFoundError for none."""
    (await read_session(client, session_id)).require_open()
    now_ms = await _now_ms(client)
    await run_command_async(client, essential_write("ZADD", ALIVE, now_ms, session_id))
    with translating():
        await cast(Any, client.hdel(session_keys(session_id).session, "silent_ms"))


async def finish_session(client: redis.asyncio.Redis, session_id: str, *, reason: str) -> None:
    """Refuse further work of a session; the first reason stays. Its results stay a while."""
    await read_session(client, session_id)
    key = session_keys(session_id).session
    if await run_command_async(client, essential_write("HSETNX", key, "finished", reason)):
        await announce_end(client, session_id)


async def add_member(client: redis.asyncio.Redis, session_id: str, member: str) -> None:
    """Record a model or sampling session of a session, before it is created."""
    with translating():
        await cast(Any, client.sadd(session_keys(session_id).members, member))


async def members_of(client: redis.asyncio.Redis, session_id: str) -> list[str]:
    """Return the ids of the models and sampling sessions of a session."""
    with translating():
        found = await cast(Any, client.smembers(session_keys(session_id).members))
    return sorted(each.decode() for each in found)


async def sessions_of(client: redis.asyncio.Redis, owner: str) -> list[str]:
    """Return the ids of the sessions of an owner, the newest first."""
    with translating():
        found = await client.zrevrange(owner_keys(owner).sessions, 0, -1)
    return [each.decode() for each in cast("list[bytes]", found)]


async def close_silent(client: redis.asyncio.Redis, *, silence_s: float) -> list[str]:
    """Close the sessions without a heartbeat for so long; return their ids.

    Logs and results of their models and sampling sessions are deleted. A silent session is closed
    by a further call, a tenth of `silence_s` later.
    """
    now_ms = await _now_ms(client)
    with translating():
        found = await client.zrangebyscore(ALIVE, 0, now_ms - silence_s * 1000)
    silent = [each.decode() for each in cast("list[bytes]", found)]
    grace_ms = silence_s * 1000 * _GRACE
    closed = [each for each in silent if now_ms - await _silent_since(client, each) >= grace_ms]
    for session_id in closed:
        await _close(client, session_id)
    return closed


async def _silent_since(client: redis.asyncio.Redis, session_id: str) -> int:
    """Return the server ms at which a session was first found silent; 0 if it was not created."""
    key = session_keys(session_id).session
    with translating():
        record, since = await cast(Any, client.hmget(key, "record", "silent_ms"))
    if record is None:
        return 0
    if since is not None:
        return int(since)
    now_ms = await _now_ms(client)
    await run_command_async(client, essential_write("HSETNX", key, "silent_ms", now_ms))
    return now_ms


async def _close(client: redis.asyncio.Redis, session_id: str) -> None:
    """Close a session; it leaves the list of living ones last, so that a crash repeats this."""
    with contextlib.suppress(RunNotFoundError):  # the gateway that was creating it has crashed
        await finish_session(client, session_id, reason="no heartbeat")
    for member in await members_of(client, session_id):
        if MODEL_ID.fullmatch(member):
            await _close_model(client, member)
        else:
            keys = sampler_keys(member)
            await run_command_async(client, essential_write("HSET", keys.sampler, "ended", "1"))
            with translating():
                await client.delete(keys.samples, keys.results)
    with translating():
        await client.zrem(ALIVE, session_id)


async def _close_model(client: redis.asyncio.Redis, model_id: str) -> None:
    try:
        model = await read_model_async(client, model_id)
    except RunNotFoundError:
        return
    keys = model_keys(model_id)
    ended = essential_write("HSET", keys.model, "ended", "its session has ended")
    await run_command_async(client, ended)
    with translating():
        await client.delete(keys.commands, keys.bodies, keys.results, keys.passes)
        await cast(Any, client.srem(models_key(model.base_model), model_id))
    with contextlib.suppress(StoreFullError), translating():
        # Its worker also reads the end at the next renewal.
        await announce(client, model_id)


async def _now_ms(client: redis.asyncio.Redis) -> int:
    with translating():
        return time_ms(cast("tuple[int, int]", await client.time()))
