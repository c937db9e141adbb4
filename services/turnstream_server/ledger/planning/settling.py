"""The end of a group and of its attempts: from what the store holds of them to `Changes`.

A dropped group is finished with its sealed trajectories, and another group may be opened in its
place. A decided group is ready and takes no more samples. An evaluated group has its result. In all
three cases its open trajectories become surplus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from turnstream.batching.fold.decisions import GroupCut, GroupDropped, GroupEvaluated
from turnstream.errors import ConflictError
from turnstream.records.evals import encode_evaluation
from turnstream.store.client import keys
from turnstream.store.client.stored_values import damaged
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream.store.run.evals import version_field
from turnstream.types import TrajectoryKey
from turnstream_server.ledger.leadership.writes import Changes, Term, read_facts

ALL_READ: Final = 4_096
"""Attempts of all samples of a group that are read at once. Only granted refills, and releases
without that limit, lead to more."""


class Attempt(NamedTuple):
    """One attempt of a sample: its ledger entry and its entry in `held`, None where missing."""

    trajectory_id: str
    entry: bytes | None
    held: bytes | None

    @property
    def state(self) -> str:
        """Return the state in the ledger; empty for an attempt that was never opened."""
        return (self.entry or b"").partition(b":")[0].decode()

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that are reserved for an attempt that is not sealed."""
        held = self.held or b""
        return int(held[1:]) if held[:1] == b"r" and held[1:].isdigit() else 0

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of a sealed attempt; 0 where the entry is missing or damaged."""
        return int(self.held) if self.held is not None and self.held.isdigit() else 0


async def read_attempts(
    term: Term, group: str, *, num_samples: int, highest: int, also: Collection[str] = ()
) -> list[Attempt]:
    """Return the attempts of a group up to the highest known one, and the ids in `also`.

    A restarted store may have lost an attempt before a known one, so all of them are read. In a
    group of more than ALL_READ, an attempt is read if the one before it was opened.
    """
    found: list[Attempt] = []
    samples: Sequence[int] = range(num_samples)
    if num_samples * (highest + 1) <= ALL_READ:
        ids = [f"{group}/{sample}/{a}" for a in range(highest + 1) for sample in samples]
        found = await read_trajectories(term, ids)
    else:
        for attempt in range(highest + 1):
            some = await read_trajectories(term, [f"{group}/{s}/{attempt}" for s in samples])
            found += some
            if attempt:  # attempt 1 may be granted before attempt 0 was opened
                pairs = zip(samples, some, strict=True)
                samples = [sample for sample, each in pairs if each.entry is not None]
    seen = {each.trajectory_id for each in found}
    return found + await read_trajectories(term, [each for each in also if each not in seen])


async def read_trajectories(term: Term, ids: Sequence[str]) -> list[Attempt]:
    """Return some trajectories, a slice of ALL_READ in each round trip."""
    known = keys.run_keys(term.run)
    found: list[Attempt] = []
    for start in range(0, len(ids), ALL_READ):
        some = ids[start : start + ALL_READ]
        entries, held = await read_facts(
            term, ("HMGET", known.ledger, *some), ("HMGET", known.payload_bytes, *some)
        )
        found += (Attempt(*each) for each in zip(some, entries, held, strict=True))
    return found


def end_attempts(
    changes: Changes, attempts: Iterable[Attempt], *, becomes: Mapping[str, str], reason: str
) -> Counter[str]:
    """Add the end of those attempts whose state is a key of `becomes`; return counts by new state.

    The bytes that were reserved for attempts that were never opened are released.

    >>> changes = Changes()
    >>> one = Attempt("g/0/0", b"open:1:writer", None)
    >>> end_attempts(changes, [one], becomes={"open": "surplus"}, reason="no time")
    Counter({'surplus': 1})
    >>> list(changes.calls())  # doctest: +NORMALIZE_WHITESPACE
    [('FIELDS', 'ledger', ('g/0/0', b'=open:1:writer')),
     ('HSET', 'ledger', ('g/0/0', 'surplus:no time')), ('ZREM', 'leases', ('g/0/0',)),
     ('HINCRBY', 'counts', ('open', -1)), ('HINCRBY', 'counts', ('surplus', 1))]
    """
    numbers: Counter[str] = Counter()
    entries: list[str] = []
    leases: list[str] = []
    deadlines: list[str] = []
    reserved: list[str] = []
    num_bytes = 0
    ended: Counter[str] = Counter()
    for each in attempts:
        into = becomes.get(each.state)
        if into is not None:
            changes.expect("ledger", each.trajectory_id, each.entry)
            entries += (each.trajectory_id, f"{into}:{reason}")
            numbers[each.state] -= 1
            numbers[into] += 1
            ended[into] += 1
            if each.state == "open":
                leases.append(each.trajectory_id)
            elif each.state == "awaiting_reward":
                deadlines.append(f"reward:{each.trajectory_id}")
        elif each.entry is None:
            changes.expect("ledger", each.trajectory_id, None)
            if each.reserved_bytes:
                reserved.append(each.trajectory_id)
                num_bytes += each.reserved_bytes
    changes.write_each("HSET", "ledger", entries)
    changes.write_each("ZREM", "leases", leases)
    changes.write_each("ZREM", "deadlines", deadlines)
    changes.write_each("HDEL", "payload_bytes", reserved)
    changes.add("budget", "reserved", -num_bytes)
    for state, number in numbers.items():
        changes.add("counts", state, number)
    return ended


SLICE: Final = 1_000
"""Attempts of a group that one call ends."""

EVALUATED: Final = "part of an evaluation"
NOT_EVALUATED: Final = "its evaluation ended without it"
"""Reasons in the ledger for trajectories of an evaluated group."""

_MAX_VERSIONS: Final = 1_000
_MAX_EVAL_GROUPS: Final = 10_000


class End(NamedTuple):
    """Attempts of a group, the state that each of their states becomes, and the reason."""

    attempts: Sequence[Attempt]
    becomes: Mapping[str, str]
    reason: str

    def is_due(self, attempt: Attempt) -> bool:
        """Return whether something of an attempt is to be written."""
        return attempt.state in self.becomes or attempt.reserved_bytes > 0


class GroupState(NamedTuple):
    """The entries of a group in `groups`, `members` and `tasks`, or None; and its attempts."""

    name: str
    entry: bytes | None
    members: bytes | None
    task: bytes | None
    attempts: Sequence[Attempt] = ()

    @property
    def state(self) -> str:
        """Return the state of the group; empty for a finished or unknown one."""
        return (self.entry or b"").partition(b":")[2].decode()

    @property
    def num_samples(self) -> int:
        """Return the number of its samples; the group must be known."""
        assert self.entry is not None
        return int(self.entry.partition(b":")[0])

    @property
    def num_needed(self) -> int:
        """Return the number of trajectories with which it is ready; the group must be known."""
        return self.num_samples if self.members is None else self._member(0)

    @property
    def highest(self) -> int:
        """Return the highest known attempt."""
        return self._member(1)

    @property
    def num_granted(self) -> int:
        """Return the number of its granted refills."""
        return self._member(2)

    def _member(self, position: int) -> int:
        if self.members is None:
            return 0
        try:
            return int(self.members.split(b":")[position])
        except (IndexError, ValueError):
            raise damaged("members", self.name, "it is no entry of members") from None


async def read_group_states(term: Term, named: Mapping[str, Collection[str]]) -> list[GroupState]:
    """Return the facts about some groups, and about the trajectories that are named with each."""
    known = keys.run_keys(term.run)
    columns = await read_facts(
        term, *(("HMGET", key, *named) for key in (known.groups, known.members, known.tasks))
    )
    found: list[GroupState] = []
    for each in zip(named, *columns, strict=True):
        group = GroupState(*each)
        if group.entry is not None:
            attempts = await read_attempts(
                term,
                group.name,
                num_samples=group.num_samples,
                highest=group.highest,
                also=named[group.name],
            )
            group = group._replace(attempts=attempts)
        found.append(group)
    return found


def end_members(
    attempts: Iterable[Attempt], becomes: Mapping[str, tuple[str, str]]
) -> Changes | None:
    """Return the writes that end sealed trajectories with their states and reasons; or None."""
    changes = Changes()
    num_ended = 0
    for each in attempts:
        state, reason = becomes[each.trajectory_id]
        ends = {"sealed": state, "awaiting_reward": state}
        num_ended += end_attempts(changes, [each], becomes=ends, reason=reason).total()
    return changes if num_ended else None


def settle(
    group: GroupState, decision: GroupDropped | GroupCut, *, limits_open: bool
) -> Changes | None:
    """Return the writes that decide or drop a group; None where nothing is left to write.

    If a group has more than SLICE attempts to end, the first are ended: decide again after them.
    `limits_open` says whether the run limits its open groups: a decided one then admits another.
    """
    is_dropped = isinstance(decision, GroupDropped)
    into = decision.state.value if is_dropped else "decided"
    if group.state == into or (not is_dropped and group.state != "open"):
        return None  # decided before: a planner folds the events again
    granted = group.num_granted
    if isinstance(decision, GroupCut) and granted > decision.num_granted:
        return None  # a later refill has opened the group again
    if group.state not in {"open", "decided"}:
        raise ConflictError(_which(group))
    named, others = _split(group, decision.keys if is_dropped else ())
    ends = {"open": "surplus", "awaiting_reward": into if is_dropped else "surplus"}
    dropped = End(named, {**ends, "sealed": into}, decision.reason)
    changes = _expecting(group)
    if not _end(changes, group, dropped, End(others, ends, decision.reason)):
        return changes
    changes.write("HSET", "groups", group.name, f"{group.num_samples}:{into}")
    if is_dropped:
        changes.write("HDEL", "members", group.name)
        changes.add("frontier", "live_groups", -1)
        _finish_prompt(changes, group, is_filtered=into == "filtered")
    if group.state == "open":
        changes.add("frontier", "open_groups", -1)
    if is_dropped or limits_open or _releases_bytes(group):
        changes.wake()
    return changes


def settle_evaluation(
    group: GroupState, ended: GroupEvaluated, *, versions: Collection[str]
) -> Changes | None:
    """Return the writes that end a group of an evaluation; None where nothing is left to write.

    A sealed trajectory does not count where its reward came after the deadline. `versions` are
    those that have a stored result.
    """
    if group.state == "evaluated":
        return None
    if group.state != "evaluating":
        raise ConflictError(f"{_which(group)}, not evaluating")
    counted, others = _split(group, ended.keys)
    counts = End(counted, {"sealed": "evaluated", "awaiting_reward": "evaluated"}, EVALUATED)
    ends = {"open": "surplus", "awaiting_reward": "surplus", "sealed": "surplus"}
    changes = _expecting(group)
    if not _end(changes, group, counts, End(others, ends, NOT_EVALUATED)):
        return changes
    changes.write("HSET", "groups", group.name, f"{group.num_samples}:evaluated")
    changes.write("HDEL", "members", group.name)
    if ended.result is not None:
        record = encode_evaluation(ended.result)
        changes.write("XADD", "evalgroups", "MAXLEN", "~", _MAX_EVAL_GROUPS, "*", "r", record)
    if ended.result is not None and ended.total is not None:
        version = version_field(ended.result.version)
        changes.write("HSET", "evals", version, encode_evaluation(ended.total))
        changes.write_each("HDEL", "evals", _versions_to_drop({*versions, version}))
    changes.wake()
    return changes


def _which(group: GroupState) -> str:
    return with_readable_names(f"group {group.name} is {group.state or 'unknown, or finished'}")


def _split(
    group: GroupState, named: Sequence[TrajectoryKey]
) -> tuple[list[Attempt], list[Attempt]]:
    ids = {keys.trajectory_id(each) for each in named}
    parts: tuple[list[Attempt], list[Attempt]] = ([], [])
    for each in group.attempts:
        parts[each.trajectory_id not in ids].append(each)
    return parts


def _expecting(group: GroupState) -> Changes:
    """Return changes that hold while the group is as it was read."""
    changes = Changes()
    changes.expect("groups", group.name, group.entry)
    changes.expect("members", group.name, group.members)
    return changes


def _end(changes: Changes, group: GroupState, *ends: End) -> bool:
    """Add the end of all attempts, and return True; or of the first SLICE, and return False."""
    num_due = sum(end.is_due(each) for end in ends for each in end.attempts)
    if num_due > SLICE:
        for end in ends:
            due = [each for each in end.attempts if end.is_due(each)][:SLICE]
            if due:
                end_attempts(changes, due, becomes=end.becomes, reason=end.reason)
                changes.is_part = True
                return False
    for end in ends:
        end_attempts(changes, end.attempts, becomes=end.becomes, reason=end.reason)
    changes.write_each("ZREM", "refills", [each.trajectory_id for each in group.attempts])
    changes.write("ZREM", "deadlines", f"group:{group.name}")
    return True


def _releases_bytes(group: GroupState) -> bool:
    return any(each.entry is None and each.reserved_bytes for each in group.attempts)


def _finish_prompt(changes: Changes, group: GroupState, *, is_filtered: bool) -> None:
    """Finish the prompt of a dropped group; one that was not filtered is sampled again."""
    if group.task is None:
        return
    changes.write("HDEL", "tasks", group.name)
    if not is_filtered:
        changes.write("ZADD", "retry", group.task, group.task)
        return
    changes.write("HDEL", "prompts", group.task)
    changes.add("prompts", "done", 1)
    changes.add("prompts", "filtered", 1)


def _versions_to_drop(versions: Collection[str]) -> list[str]:
    """Return the lowest versions above the limit of stored results; an unknown one is the lowest.

    >>> _versions_to_drop({"7", "unknown"})
    []
    """

    def number(version: str) -> int:
        return int(version) if version.isdigit() else -1

    return sorted(versions, key=number)[: max(0, len(versions) - _MAX_VERSIONS)]
