"""Deadlines of groups and rewards that have passed, by the run's clock, written as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.types import DeadlineFired
from turnstream_server.bus.leadership.leadership import LeaderScript, Term
from turnstream_server.failpoints import reach

_FIRE = LeaderScript("fire_deadlines", "planning", "deadlines members events config rewards")
_PER_CALL: Final = 200


async def fire_deadlines(term: Term, *, run_ms: int) -> int:
    """Write the events of all deadlines that have passed at a time of the run's clock.

    Returns:
        Milliseconds until the next one is due; -1 where there is none.
    """
    arguments: list[str | bytes] = []
    while True:
        if arguments:
            reach("fire_deadlines.before")
        _, next_ms, *due = await _FIRE.run(term, run_ms, _PER_CALL, *arguments)
        if arguments:
            reach("fire_deadlines.after")
        if not due:
            return int(next_ms)
        arguments = _with_records(due)


def _with_records(due: Sequence[Any]) -> list[str | bytes]:
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
