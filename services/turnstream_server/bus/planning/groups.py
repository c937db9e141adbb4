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
from turnstream.store.client.scripts import Command, Script, run_command_async, run_commands_async
from turnstream.types import BatchDue, RefillGranted
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.evals import settle_eval_command

Settlement = MemberDropped | GroupDropped | GroupCut | GroupEvaluated
"""A decision that ends trajectories."""

_DUE = Script("batch_due", "turnstream_server.bus.planning")
_SETTLE_MEMBERS = Script("settle_members", "turnstream_server.bus.planning")
_SETTLE_GROUP = Script("settle_group", "turnstream_server.bus.planning")
_GRANT = Script("grant_refill", "turnstream_server.bus.planning")
_MEMBERS_PER_CALL: Final = 200


async def announce_due(term: Term, due: BatchDue) -> str:
    """Put the event at which the groups of a batch are chosen behind those before; its id.

    Sent twice in a row it is there once.
    """
    names = keys.run_keys(term.run)
    command = _DUE((names.leader, names.events), term.epoch, encode_event(due))
    event_id: bytes = await run_command_async(term.client, command)
    return event_id.decode()


async def settle_groups(term: Term, settled: Sequence[Settlement]) -> None:
    """End trajectories untrained, with the reason; a dropped group makes room for another.

    Each group is settled whole or not at all, once: settling it again changes nothing.

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
        command = _grant(term, wanted, attempt)
        answer: int = await run_command_async(term.client, command)
        if answer >= 0:
            return bool(answer)
    raise AssertionError("there is always another attempt")


def _settle_members(term: Term, dropped: Sequence[MemberDropped]) -> Iterator[Command]:
    names = keys.run_keys(term.run)
    for start in range(0, len(dropped), _MEMBERS_PER_CALL):
        arguments: list[str] = []
        for member in dropped[start : start + _MEMBERS_PER_CALL]:
            arguments += (keys.trajectory_id(member.key), member.state, member.reason)
        yield _SETTLE_MEMBERS(
            (names.leader, names.ledger, names.counts, names.deadlines), term.epoch, *arguments
        )


def _settle_group(term: Term, group: GroupDropped | GroupCut | GroupEvaluated) -> Command:
    if isinstance(group, GroupEvaluated):
        return settle_eval_command(term, group)
    names = keys.run_keys(term.run)
    is_dropped = isinstance(group, GroupDropped)
    return _SETTLE_GROUP(
        (
            *(names.leader, names.groups, names.ledger, names.counts, names.frontier),
            *(names.wake, names.members, names.deadlines, names.refills, names.leases),
            *(names.config, names.tasks, names.prompts, names.again),
            *(names.held, names.budget),
        ),
        term.epoch,
        keys.encode_name(group.group_id),
        group.state if is_dropped else "decided",
        group.reason,
        0 if is_dropped else group.num_granted,
        *map(keys.trajectory_id, group.keys if is_dropped else ()),
    )


def _grant(term: Term, wanted: RefillWanted, attempt: int) -> Command:
    names = keys.run_keys(term.run)
    key = wanted.key._replace(attempt=attempt)
    return _GRANT(
        (
            *(names.leader, names.groups, names.ledger, names.members, names.refills),
            *(names.deadlines, names.config, names.events, names.wake, names.frontier),
            names.clock,
        ),
        term.epoch,
        keys.encode_name(key.group_id),
        wanted.number,
        keys.trajectory_id(key),
        wanted.prompt_uid,
        encode_event(RefillGranted(key=key, number=wanted.number)),
    )
