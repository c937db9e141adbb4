"""Writes of the planner's decisions on groups and their members."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import redis.asyncio

from turnstream.batching.fold.decisions import (
    GroupCut,
    GroupDropped,
    GroupEvaluated,
    MemberDropped,
    RefillWanted,
)
from turnstream.records.evals import encode_evaluation
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command, run_commands_async
from turnstream.store.run.evals import version_field
from turnstream.types import RefillGranted
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

Settlement = MemberDropped | GroupDropped | GroupCut | GroupEvaluated
"""A decision that ends trajectories."""

EVALUATED: Final = "part of an evaluation"
NOT_EVALUATED: Final = "its evaluation ended without it"
"""Reasons in the ledger for trajectories of an evaluated group."""

_SETTLE_MEMBERS = LeaderScript("settle_members", "planning", "ledger counts deadlines")
_SETTLE_GROUP = LeaderScript(
    "settle_group",
    "planning",
    "groups ledger counts frontier wake members deadlines refills leases config tasks prompts "
    "again held budget",
)
_SETTLE_EVAL: Final = LeaderScript(
    "settle_eval",
    "planning",
    "groups ledger counts members refills deadlines leases evals evalgroups held budget wake",
)
_GRANT = LeaderScript(
    "grant_refill",
    "planning",
    "groups ledger members refills deadlines config events wake frontier clock",
)
_MEMBERS_PER_CALL: Final = 200


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


async def is_evaluating(client: redis.asyncio.Redis, run: str) -> bool:
    """Return whether an evaluation of the run has not ended."""
    with translating():
        groups: Any = await client.execute_command("HVALS", keys.run_keys(run).groups)
    return any(state.endswith(b":evaluating") for state in groups)


def _settle_members(term: Term, dropped: Sequence[MemberDropped]) -> Iterator[Command]:
    for start in range(0, len(dropped), _MEMBERS_PER_CALL):
        arguments: list[str] = []
        for member in dropped[start : start + _MEMBERS_PER_CALL]:
            arguments += (keys.trajectory_id(member.key), member.state, member.reason)
        yield _SETTLE_MEMBERS(term, *arguments)


def _settle_group(term: Term, group: GroupDropped | GroupCut | GroupEvaluated) -> Command:
    if isinstance(group, GroupEvaluated):
        return _settle_eval(term, group)
    is_dropped = isinstance(group, GroupDropped)
    return _SETTLE_GROUP(
        term,
        keys.encode_name(group.group_id),
        group.state if is_dropped else "decided",
        group.reason,
        0 if is_dropped else group.num_granted,
        *map(keys.trajectory_id, group.keys if is_dropped else ()),
    )


def _settle_eval(term: Term, ended: GroupEvaluated) -> Command:
    result, total = ended.result, ended.total
    return _SETTLE_EVAL(
        term,
        keys.encode_name(ended.group_id),
        EVALUATED,
        NOT_EVALUATED,
        b"" if result is None else encode_evaluation(result),
        "" if result is None else version_field(result.version),
        b"" if total is None else encode_evaluation(total),
        *map(keys.trajectory_id, ended.keys),
    )
