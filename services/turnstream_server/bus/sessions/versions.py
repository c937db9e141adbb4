"""Policy versions: announced once each, in rising order, to generators and to the plan."""

from __future__ import annotations

from typing import Any, cast

import redis.asyncio

from turnstream.errors import InvalidConfigError
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command_async
from turnstream.types import VersionAnnounced

_ANNOUNCE = Script("announce_version", "turnstream_server.bus.sessions")


async def announce_version(
    client: redis.asyncio.Redis,
    run: str,
    announced: VersionAnnounced,
    *,
    session_epoch: int,
    session: str = "",
) -> None:
    """Announce new weights to generators and the planner; a repeat changes nothing.

    Raises:
        FencedError: another trainer session has started, or the run has another lineage.
        ConflictError: a higher version exists, or this one was announced with another content.
    """
    if announced.version < 0:
        raise InvalidConfigError("version", f"{announced.version} is below 0")
    names = keys.run_keys(run)
    record = encode_event(announced)
    command = _ANNOUNCE(
        (names.frontier, names.versions, names.events),
        session_epoch,
        announced.version,
        record,
        session,
        announced.lineage,
    )
    await run_command_async(client, command)


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
