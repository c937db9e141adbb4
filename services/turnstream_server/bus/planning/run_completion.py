"""The end of a closed run: orphaned groups are decided, then the run is finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translate
from turnstream.store.client.scripts import Script, run_command_async
from turnstream.types import DeadlineFired, RunFinished
from turnstream_server.bus.leadership.leadership import Term

_FINISH = Script("finish_run", "turnstream_server.bus.planning")
_END_ORPHANED = Script("end_orphaned", "turnstream_server.bus.planning")


async def finish_run(term: Term, *, step: int, position: str) -> bool:
    """Tell everybody that nothing is planned after `step`.

    Args:
        term: the leader's term.
        step: the last.
        position: id of the last event that the leader has folded in.

    Returns:
        False where the run is not closed, or there are later events.
    """
    names = keys.run_keys(term.run)
    command = _FINISH(
        (names.leader, names.frontier, names.events, names.wake),
        term.epoch,
        position,
        encode_event(RunFinished(step=step)),
    )
    return bool(await run_command_async(term.client, command))


async def is_evaluating(client: redis.asyncio.Redis, run: str) -> bool:
    """Whether an evaluation of the run has not ended: a run ends without waiting for them."""
    try:
        groups: Any = await client.execute_command("HVALS", keys.run_keys(run).groups)
    except (RedisError, OSError) as error:
        raise translate(error) from error
    return any(state.endswith(b":evaluating") for state in groups)


async def find_orphaned(term: Term, group_ids: Sequence[str]) -> dict[str, int]:
    """Return the groups without a writer, with the refills that were granted to each."""
    replies = await _end(term, [(each, "", b"") for each in group_ids])
    found = zip(group_ids, replies, strict=True)
    return {group_id: refills for group_id, refills in found if refills >= 0}


async def end_orphaned(term: Term, unheld: Mapping[str, int]) -> int:
    """Fire the deadlines of groups, unless somebody holds them now; how many."""
    items = [
        (each, refills, encode_event(DeadlineFired(group_id=each, num_refills=refills)))
        for each, refills in unheld.items()
    ]
    return (await _end(term, items)).count(-2)


async def _end(term: Term, items: Sequence[tuple[str, int | str, bytes]]) -> list[int]:
    if not items:
        return []
    names = keys.run_keys(term.run)
    words = [
        word
        for group_id, refills, record in items
        for word in (keys.encode_name(group_id), refills, record)
    ]
    command = _END_ORPHANED(
        (
            *(names.leader, names.frontier, names.groups, names.members),
            *(names.ledger, names.events, names.deadlines),
        ),
        term.epoch,
        *words,
    )
    replies: list[int] = await run_command_async(term.client, command)
    return replies
