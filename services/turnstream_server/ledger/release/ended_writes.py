"""The compact record of trajectories that ended untrained: from stored facts to `Changes`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from turnstream.errors import ConflictError
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream.types import TrajectoryState
from turnstream_server.ledger.leadership.writes import Changes
from turnstream_server.ledger.release.release_writes import finish_names

DROPPED: Final = ("filtered", "expired", "incomplete", "surplus", "evaluated", "abandoned")
"""States in which a trajectory ends untrained. Dead ones are kept until they are discarded."""

OVER: Final = frozenset(
    {b"planned", b"filtered", b"expired", b"incomplete", b"surplus", b"evaluated"}
)
"""States of a group that takes no member any more."""

MOST_REASONS: Final = 1_000
"""Reasons that are counted by themselves: generators make some of them up."""

_VALUE: Final = re.compile(r" \([^()]*\)$")
"""The value at the end of a reason."""


class EndedFacts(NamedTuple):
    """The facts in the store about trajectories that ended untrained.

    Attributes:
        newest: number of the newest record; None before the first.
        entries: their ledger entries by id.
        groups: entries of their groups by name; None for a group that is compact.
        reasons: those of `counts_of(entries)` that are counted already.
        num_reasons: number of all reasons that are counted.
    """

    newest: bytes | None
    entries: Mapping[str, bytes | None]
    groups: Mapping[str, bytes | None]
    reasons: Collection[str]
    num_reasons: int


def replace_ended(facts: EndedFacts, *, number: int, record: bytes) -> Changes | None:
    """Return the writes that replace trajectories by a record; None where it was written before.

    Raises:
        ConflictError: `number` is not the next one, or a trajectory or its group may still change.
    """
    newest = parsed_number(facts.newest or b"0")
    if number <= newest:
        return None
    if number != newest + 1:
        raise ConflictError(f"record {number} does not follow {newest}")
    changes = Changes()
    changes.expect("frontier", "ends", facts.newest)
    for each, entry in facts.entries.items():
        if not has_ended(entry):
            shown = (entry or b"unknown").decode(errors="replace")
            raise ConflictError(with_readable_names(f"{each} is {shown}, not at its end"))
        changes.expect("ledger", each, entry)
    _fold_groups(changes, facts)
    for reason, count in _counted(facts):
        changes.add("reasons", reason, count)
    changes.write_each("HDEL", "rewards", [*facts.entries])
    changes.write_each("HDEL", "ledger", [*facts.entries])
    changes.write("HSET", "untrained", number, record)
    changes.write("HSET", "frontier", "ends", number)
    return changes


def counts_of(entries: Mapping[str, bytes | None]) -> Counter[str]:
    """Return the numbers of trajectories by "<state>:<reason>" of their ledger entries.

    >>> counts_of({"g/0/0": b"filtered:below low=0.2 (0.1)", "g/1/0": b"surplus:late (1)"})
    Counter({'filtered:below low=0.2': 1, 'surplus:late (1)': 1})
    """
    counts: Counter[str] = Counter()
    for each, entry in entries.items():
        with reading("ledger", each):
            state, _, reason = (entry or b"").decode().partition(":")
        counts[f"{state}:{counted_reason(state, reason)}"] += 1
    return counts


def counted_reason(state: str, reason: str) -> str:
    """Return the reason by which trajectories are counted.

    Reasons of group filters end with the judged value. Groups with different values count together.

    >>> counted_reason(TrajectoryState.FILTERED, "the mean of the reward is below low=0.2 (0.125)")
    'the mean of the reward is below low=0.2'
    """
    return _VALUE.sub("", reason) if state == TrajectoryState.FILTERED else reason


def has_ended(entry: bytes | None) -> bool:
    """Return whether a trajectory ended untrained. A dead one counts once it is discarded.

    >>> has_ended(b"expired:no time"), has_ended(b"dead:bad"), has_ended(b"dead:discarded")
    (True, False, True)
    """
    state = (entry or b"").partition(b":")[0].decode(errors="replace")
    return state in DROPPED or (entry or b"").startswith(b"dead:discarded")


def _fold_groups(changes: Changes, facts: EndedFacts) -> None:
    """Add the end of the dropped groups; a planned one goes with its batch."""
    first = {each.partition("/")[0]: each for each in reversed([*facts.entries])}
    dropped: list[str] = []
    for name, entry in facts.groups.items():
        changes.expect("groups", name, entry)
        state = None if entry is None else entry.partition(b":")[2]
        if state is not None and state not in OVER:
            shown = state.decode(errors="replace")
            message = f"group {name} of {first[name]} is {shown}"
            raise ConflictError(with_readable_names(message))
        if state is not None and state != b"planned":
            dropped.append(name)
    finish_names(changes, dropped)


def _counted(facts: EndedFacts) -> Iterator[tuple[str, int]]:
    """Yield the counted reasons; new ones beyond MOST_REASONS count together for each state."""
    num_reasons = facts.num_reasons
    for reason, count in counts_of(facts.entries).items():
        is_new = reason not in facts.reasons
        is_one_too_many = is_new and num_reasons >= MOST_REASONS
        num_reasons += is_new
        yield (
            f"{reason.partition(':')[0]}:another reason" if is_one_too_many else reason,
            count,
        )
