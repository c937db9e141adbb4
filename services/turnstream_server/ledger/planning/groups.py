"""Writes of the planner's decisions: ends of groups and of their members, and refills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio

from turnstream.batching.fold.decisions import (
    GroupCut,
    GroupDropped,
    GroupEvaluated,
    MemberDropped,
    RefillWanted,
)
from turnstream.errors import ConflictError, RejectedError, StoreUnavailableError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream.store.run import clock
from turnstream.store.run.configs import parse_revisions, read_config_async
from turnstream.types import RefillGranted, TrajectoryKey
from turnstream_server.ledger.leadership.writes import (
    MAX_TRIES,
    Changes,
    Difference,
    Term,
    read_facts,
    time_ms,
    write_all,
    write_decision,
)
from turnstream_server.ledger.planning.settling import (
    GroupState,
    end_members,
    read_group_states,
    read_trajectories,
    settle,
    settle_evaluation,
)

_GroupDecision = GroupDropped | GroupCut | GroupEvaluated
Settlement = MemberDropped | _GroupDecision
"""A decision that ends trajectories."""

_PER_CALL: Final = 200
"""Trajectories that are ended by one call."""

_PER_ROUND: Final = 64
"""Groups whose facts are read, and whose ends are written, in one round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillFacts:
    """The facts in the store about a refill.

    `key` is the first attempt of the sample that was neither opened nor granted. `deadline_s` is
    that of the config in force, and 0 for none.
    """

    key: TrajectoryKey
    group: GroupState
    revision: int
    deadline_s: float
    run_ms: int
    now_ms: int


def grant(facts: RefillFacts, *, number: int, prompt_uid: str) -> Changes | None:
    """Return the writes that grant an attempt and open its group; None where it needs none."""
    group, trajectory_id = facts.group, keys.trajectory_id(facts.key)
    if group.entry is None:
        raise _refused(ConflictError, f"group {group.name} is unknown, or finished")
    if group.state not in {"open", "decided"}:
        return None
    if facts.key.sample >= group.num_samples:
        message = f"trajectory {trajectory_id} is none of the {group.num_samples} samples of group"
        raise _refused(RejectedError, f"{message} {group.name}")
    if number <= group.num_granted:
        return None
    if number > group.num_granted + 1:
        message = f"refill {number} of group {group.name} does not follow refill"
        raise _refused(ConflictError, f"{message} {group.num_granted}")
    changes = Changes()
    changes.expect("groups", group.name, group.entry)
    changes.expect("members", group.name, group.members)
    changes.expect("ledger", trajectory_id, None)
    changes.expect("config", "newest", b"%d" % facts.revision)
    highest = max(group.highest, facts.key.attempt)
    entry = f"{group.num_needed}:{highest}:{number}:{prompt_uid}"
    changes.write("HSET", "members", group.name, entry)
    changes.write("HSET", "groups", group.name, f"{group.num_samples}:open")
    if group.state == "decided":
        changes.add("frontier", "open_groups", 1)
    changes.write("ZADD", "refills", facts.now_ms, trajectory_id)
    if facts.deadline_s > 0:
        due_ms = facts.run_ms + round(facts.deadline_s * 1_000)
        changes.write("ZADD", "deadlines", due_ms, f"group:{group.name}")
    changes.write_entry("events", encode_event(RefillGranted(key=facts.key, number=number)))
    changes.wake()
    return changes


def _refused(kind: type[RejectedError], message: str) -> RejectedError:
    return kind(with_readable_names(message))


async def settle_groups(term: Term, settled: Sequence[Settlement]) -> None:
    """End trajectories untrained, with the reason; a dropped group frees capacity.

    Each group is settled whole or not at all, once.

    Raises:
        ConflictError: a group is in a batch already, or was never opened.
        StoreUnavailableError: the facts of a group changed each time.
    """
    await _end_members(term, [each for each in settled if isinstance(each, MemberDropped)])
    groups: list[_GroupDecision] = [each for each in settled if not isinstance(each, MemberDropped)]
    refusals: list[ConflictError] = []
    num_vain = 0
    while groups:
        some = next_round(groups)
        left = await _settle_round(term, some, refusals)
        done = {*map(id, some)} - {*map(id, left)}
        num_vain = 0 if done else num_vain + 1
        if num_vain == MAX_TRIES:
            raise StoreUnavailableError(
                f"run {term.run}: group {some[0].group_id} changed in each of {MAX_TRIES} tries"
            )
        groups = [each for each in groups if id(each) not in done]
    if refusals:
        raise refusals[0]


def next_round(decisions: Sequence[_GroupDecision]) -> list[_GroupDecision]:
    """Return the decisions that can be written together: the first, and some after it.

    A group has one at a time. An evaluation stands alone: the result of its version has those of
    all evaluations before it.
    """
    some: dict[str, _GroupDecision] = {}
    for each in decisions:
        is_evaluation = isinstance(each, GroupEvaluated)
        if some and (is_evaluation or each.group_id in some or len(some) == _PER_ROUND):
            break
        some[each.group_id] = each
        if is_evaluation:
            break
    return list(some.values())


async def grant_refill(term: Term, wanted: RefillWanted) -> bool:
    """Grant another attempt of a sample.

    Returns:
        False if it was granted before, or the group needs none any more.

    Raises:
        ConflictError: the group was never opened, or a refill before this one was not granted.
        RejectedError: the group has no such sample.
    """
    written = await write_decision(
        term,
        lambda: _read_refill(term, wanted.key),
        lambda facts: grant(facts, number=wanted.number, prompt_uid=wanted.prompt_uid),
    )
    return written is not None


async def _read_refill(term: Term, key: TrajectoryKey) -> RefillFacts:
    """Return the facts about the first attempt from `key` on that can be granted."""
    known, name = keys.run_keys(term.run), keys.encode_name(key.group_id)
    while True:
        trajectory_id = keys.trajectory_id(key)
        entry, granted_ms, group, members, fields, now = await read_facts(
            term,
            ("HGET", known.ledger, trajectory_id),
            ("ZSCORE", known.refills, trajectory_id),
            ("HGET", known.groups, name),
            ("HGET", known.members, name),
            ("HMGET", known.clock, *clock.FIELDS),
            ("TIME",),
        )
        if entry is None and granted_ms is None:
            break
        key = key._replace(attempt=key.attempt + 1)
    revision, config = await read_config_async(term.client, term.run)
    now_ms = time_ms(now)
    return RefillFacts(
        key=key,
        group=GroupState(name, group, members, None),
        revision=revision,
        deadline_s=config.group_deadline_s,
        run_ms=clock.run_ms(fields, now_ms=now_ms),
        now_ms=now_ms,
    )


async def is_evaluating(client: redis.asyncio.Redis, run: str) -> bool:
    """Return whether an evaluation of the run has not ended."""
    with translating():
        groups: Any = await client.execute_command("HVALS", keys.run_keys(run).groups)
    return any(state.endswith(b":evaluating") for state in groups)


async def _end_members(term: Term, dropped: Sequence[MemberDropped]) -> None:
    for start in range(0, len(dropped), _PER_CALL):
        becomes = {
            keys.trajectory_id(each.key): (each.state.value, each.reason)
            for each in dropped[start : start + _PER_CALL]
        }
        await write_decision(
            term,
            lambda becomes=becomes: read_trajectories(term, [*becomes]),
            lambda found, becomes=becomes: end_members(found, becomes),
        )


async def _settle_round(
    term: Term, decisions: Sequence[_GroupDecision], refusals: list[ConflictError]
) -> list[_GroupDecision]:
    """Write decisions on groups; return those that are not written, or not whole."""
    named = {
        keys.encode_name(each.group_id): [keys.trajectory_id(key) for key in _keys_of(each)]
        for each in decisions
    }
    facts = await read_group_states(term, named)
    limits_open, versions = await _read_settings(term)
    written: list[tuple[_GroupDecision, Changes]] = []
    for decision, group in zip(decisions, facts, strict=True):
        try:
            if isinstance(decision, GroupEvaluated):
                changes = settle_evaluation(group, decision, versions=versions)
            else:
                changes = settle(group, decision, limits_open=limits_open)
        except ConflictError as error:
            refusals.append(error)
            continue
        if changes is not None:
            written.append((decision, changes))
    found = await write_all(term, [changes for _, changes in written])
    return [
        decision
        for (decision, changes), each in zip(written, found, strict=True)
        if isinstance(each, Difference) or changes.is_part
    ]


async def _read_settings(term: Term) -> tuple[bool, set[str]]:
    """Return whether the run limits its open groups, and the versions with a stored result."""
    known = keys.run_keys(term.run)
    config, versions = await read_facts(term, ("HGETALL", known.config), ("HKEYS", known.evals))
    revisions = parse_revisions(term.run, config)
    in_force = revisions.revision(revisions.in_force).config
    return bool(in_force.max_open_groups), {each.decode() for each in versions}


def _keys_of(decision: _GroupDecision) -> Sequence[TrajectoryKey]:
    return () if isinstance(decision, GroupCut) else decision.keys
