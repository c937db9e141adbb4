"""Writes of the planner's decisions on groups and their members."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from turnstream.batching.fold.decisions import (
    GroupCut,
    GroupDropped,
    GroupEvaluated,
    MemberDropped,
    RefillWanted,
)
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import Command, run_commands_async
from turnstream.types import BatchDue, RefillGranted
from turnstream_server.bus.leadership.leadership import LeaderScript, Term
from turnstream_server.bus.planning.evals import settle_eval_command

Settlement = MemberDropped | GroupDropped | GroupCut | GroupEvaluated
"""A decision that ends trajectories."""

_DUE = LeaderScript("batch_due", "planning", "events")
_SETTLE_MEMBERS = LeaderScript("settle_members", "planning", "ledger counts deadlines")
_SETTLE_GROUP = LeaderScript(
    "settle_group",
    "planning",
    "groups ledger counts frontier wake members deadlines refills leases config tasks prompts "
    "again held budget",
)
_GRANT = LeaderScript(
    "grant_refill",
    "planning",
    "groups ledger members refills deadlines config events wake frontier clock",
)
_MEMBERS_PER_CALL: Final = 200


async def announce_due(term: Term, due: BatchDue) -> str:
    """Write the event at which the groups of a batch are chosen, once; return its id."""
    event_id: bytes = await _DUE.run(term, encode_event(due))
    return event_id.decode()


async def settle_groups(term: Term, settled: Sequence[Settlement]) -> None:
    """End trajectories untrained, with the reason; a dropped group frees capacity.

    Each group is settled whole or not at all, once.

    Raises:
        ConflictError: a group is in a batch already, or was never opened.
    """
    if not settled:
        return
    members = [each for each in settled if isinstance(each, MemberDropped)]
    groups = [each for each in settled if not isinstance(each, MemberDropped)]
    commands = [
        *_settle_members(term, members),
        *(_settle_group(term, group) for group in groups),
    ]
    for reply in await run_commands_async(term.client, commands):
        if isinstance(reply, Exception):
            raise reply


async def grant_refill(term: Term, wanted: RefillWanted) -> bool:
    """Grant another attempt of a sample.

    Returns:
        False if it was granted before, or the group needs none any more.

    Raises:
        ConflictError: the group was never opened.
    """
    for attempt in itertools.count(wanted.key.attempt):
        key = wanted.key._replace(attempt=attempt)
        answer: int = await _GRANT.run(
            term,
            keys.encode_name(key.group_id),
            wanted.number,
            keys.trajectory_id(key),
            wanted.prompt_uid,
            encode_event(RefillGranted(key=key, number=wanted.number)),
        )
        if answer >= 0:
            return bool(answer)
    raise AssertionError("there is always another attempt")


def _settle_members(term: Term, dropped: Sequence[MemberDropped]) -> Iterator[Command]:
    for start in range(0, len(dropped), _MEMBERS_PER_CALL):
        arguments: list[str] = []
        for member in dropped[start : start + _MEMBERS_PER_CALL]:
            arguments += (keys.trajectory_id(member.key), member.state, member.reason)
        yield _SETTLE_MEMBERS(term, *arguments)


def _settle_group(term: Term, group: GroupDropped | GroupCut | GroupEvaluated) -> Command:
    if isinstance(group, GroupEvaluated):
        return settle_eval_command(term, group)
    is_dropped = isinstance(group, GroupDropped)
    return _SETTLE_GROUP(
        term,
        keys.encode_name(group.group_id),
        group.state if is_dropped else "decided",
        group.reason,
        0 if is_dropped else group.num_granted,
        *map(keys.trajectory_id, group.keys if is_dropped else ()),
    )
