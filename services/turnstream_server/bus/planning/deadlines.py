"""Deadlines of groups and rewards that have passed, by the run's clock, written as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import Script, run_command_async
from turnstream.types import DeadlineFired
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.failpoints import reach

_FIRE = Script("fire_deadlines", "turnstream_server.bus.planning")
_PER_CALL: Final = 200


async def fire_deadlines(term: Term, *, run_ms: int) -> int:
    """Write the events of all deadlines that have passed.

    Args:
        term: the leader's term.
        run_ms: the run's time, see RunClock.

    Returns:
        Milliseconds until the next one is due; -1 where there is none.
    """
    names = keys.run_keys(term.run)
    script_keys = (
        *(names.leader, names.deadlines, names.members, names.events),
        *(names.config, names.rewards),
    )
    arguments: list[str | bytes] = []
    while True:
        if arguments:
            reach("fire_deadlines.before")
        command = _FIRE(script_keys, term.epoch, run_ms, _PER_CALL, *arguments)
        _, next_ms, *due = await run_command_async(term.client, command)
        if arguments:
            reach("fire_deadlines.after")
        if not due:
            return int(next_ms)
        arguments = _with_records(due)


def _with_records(due: Sequence[Any]) -> list[str | bytes]:
    """Three words per deadline, from the two that name it."""
    words: list[str | bytes] = []
    for member, num_refills in zip(due[::2], due[1::2], strict=True):
        words += (member, num_refills, encode_event(_event(member.decode(), int(num_refills))))
    return words


def _event(member: str, num_refills: int) -> DeadlineFired:
    kind, _, name = member.partition(":")
    if kind == "group":
        return DeadlineFired(group_id=keys.decode_name(name), num_refills=num_refills)
    awaited = keys.parse_trajectory_id(name)
    return DeadlineFired(group_id=awaited.group_id, awaited=awaited)
