"""The writes of the release: from facts about finished steps and trajectories to `Changes`."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from turnstream.errors import ConflictError
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream.types import TrajectoryState
from turnstream_server.ledger.leadership.writes import Changes
from turnstream_server.ledger.planning.settling import Attempt

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFacts:
    """The facts in the store about the low watermark of a run.

    `num_kept` checkpoints are kept by the config in force. The entries of observers are
    `<newest step seen>:<ms of expiry, 0 once expired>:...`.
    """

    released: bytes | None
    checkpoints: bytes | None
    revision: int
    num_kept: int
    observers: Mapping[bytes, bytes]


def advance(facts: WatermarkFacts, *, at_most: int | None) -> tuple[int, Changes | None]:
    """Return the newest step that no process can ask for, and the writes that release up to it.

    A session can start at each kept checkpoint, and a live observer asks for what it has not seen.
    The watermark never falls: None where it stays.

    >>> facts = WatermarkFacts(
    ...     released=None, checkpoints=b"2,3,5", revision=1, num_kept=2, observers={}
    ... )
    >>> advance(facts, at_most=None)[0], advance(facts, at_most=2)[0]
    (3, 2)
    """
    steps = [parsed_number(each) for each in (facts.checkpoints or b"").split(b",") if each]
    kept = steps[-facts.num_kept :]
    released = parsed_number(facts.released or b"0")
    floor = kept[0] if len(kept) == facts.num_kept else 0
    changes = Changes()
    changes.expect("frontier", "released", facts.released)
    changes.expect("frontier", "checkpoints", facts.checkpoints)
    changes.expect("config", "newest", b"%d" % facts.revision)
    changes.expect_size("observers", len(facts.observers))
    for field, entry in facts.observers.items():
        name = field.decode()
        with reading("observers", name):
            seen, expires_ms, _ = entry.decode().split(":", 2)
            is_live, step = expires_ms != "0", int(seen)
        if is_live:
            floor = min(floor, step)
            changes.expect_prefix("observers", f"{seen}:", [name])
        else:
            changes.expect("observers", name, entry)
    floor = floor if at_most is None else min(floor, at_most)
    if floor <= released:
        return released, None
    text = ",".join(map(str, kept))
    changes.write("HSET", "frontier", "released", floor, "checkpoints", text)
    return floor, changes


def release_bytes(ended: Iterable[Attempt]) -> Changes | None:
    """Return the writes that return the bytes of trajectories to the budget; None without any.

    Their payload must be deleted.

    >>> changes = release_bytes([Attempt("g/0/0", b"planned:1", b"70")])
    >>> changes and list(changes.calls())[1:]  # doctest: +NORMALIZE_WHITESPACE
    [('HDEL', 'payload_bytes', ('g/0/0',)), ('XADD', 'wake', ('MAXLEN', 1, '*', 'w', '')),
     ('HINCRBY', 'budget', ('planned', -70))]
    """
    changes = Changes()
    released: list[str] = []
    for each in ended:
        if each.held is not None:
            released.append(each.trajectory_id)
            changes.expect("payload_bytes", each.trajectory_id, each.held)
            changes.add("budget", "reserved", -each.reserved_bytes)
            part = "planned" if each.state == "planned" else "stored"
            changes.add("budget", part, -each.stored_bytes)
    changes.write_each("HDEL", "payload_bytes", released)
    changes.wake()
    return changes if released else None


class Part(NamedTuple):
    """Names of trajectories, or (encoded) of groups, of a planned step."""

    step: int
    names: Sequence[str]
    are_groups: bool


def compact(
    part: Part, entries: Sequence[bytes | None], *, released: bytes | None
) -> Changes | None:
    """Return the writes that remove a part of a released step; None where none of it is left.

    `entries` are those of the names in `groups` or `ledger`. Groups leave fingerprints.
    """
    number = parsed_number(released or b"0")
    if part.step > number:
        raise ConflictError(f"step {part.step} is not released; step {number} is")
    changes = Changes()
    changes.expect("frontier", "released", released)
    pairs = zip(part.names, entries, strict=True)
    if part.are_groups:
        planned = {name: e for name, e in pairs if e and e.partition(b":")[2] == b"planned"}
        for name, entry in planned.items():
            changes.expect("groups", name, entry)
        finish_names(changes, [*planned])
        return changes if planned else None
    state = f"planned:{part.step}"
    ours = [name for name, entry in pairs if entry == state.encode()]
    changes.expect_prefix("ledger", state, ours)
    changes.write_each("HDEL", "rewards", ours)
    changes.write_each("HDEL", "ledger", ours)
    return changes if ours else None


def finish_names(changes: Changes, names: Sequence[str]) -> None:
    """Add the writes that replace groups by fingerprints; `changes` must expect their entries."""
    changes.write_each("HDEL", "groups", names)
    buckets: dict[str, bytes] = {}
    for name in names:
        bucket, fingerprint = fingerprint_of(name)
        buckets[bucket] = buckets.get(bucket, b"") + fingerprint
    changes.extend_each("finished_groups", buckets)


def fingerprint_of(name: str) -> tuple[str, bytes]:
    """Return the bucket and the fingerprint of a finished name: see finished_names.lua.

    >>> bucket, fingerprint = fingerprint_of("g1")
    >>> bucket, fingerprint.hex()
    ('a46', 'a46e558d11cb2400')
    """
    digest = hashlib.sha1(name.encode(), usedforsecurity=False)
    return digest.hexdigest()[:3], digest.digest()[:8]


def finish(facts: Sequence[bytes | None], records: Mapping[int, bytes]) -> list[Changes]:
    """Return the writes that replace plans by compact records, for each step in order.

    `facts` are the watermark, the newest step with a record, and the step of the snapshot.
    """
    released, folded, in_snapshot = (parsed_number(each or b"0") for each in facts)
    watermark, stored, snapshot_step = facts
    all_changes: list[Changes] = []
    for step in sorted(each for each in records if each > folded):
        if step != folded + 1 or step > released:
            raise ConflictError(
                f"step {step} is not next: step {folded} is folded, step {released} is released"
            )
        if step > in_snapshot:
            raise ConflictError(f"step {step} is not in the snapshot")
        changes = Changes()
        changes.expect("frontier", "released", watermark)
        changes.expect("frontier", "folded", stored)
        changes.expect("snapshot", "step", snapshot_step)
        changes.write("HSET", "finished_batches", step, records[step])
        changes.write("XTRIM", "plan", "MINID", f"{step + 1}-0")
        changes.write("HDEL", "batches", step - 1)
        whats = ("planned", "stepped", "committed")
        changes.write("HDEL", "times", *(f"{what}:{step - 1}" for what in whats))
        changes.write("HSET", "frontier", "folded", step)
        all_changes.append(changes)
        folded, stored = step, b"%d" % step
    return all_changes


class EndedFacts(NamedTuple):
    """The facts in the store about trajectories that ended untrained.

    `newest` is the number of the newest record. A group that is compact has no entry. `reasons` are
    those of `counts_of(entries)` that are counted already, among `num_reasons` of all.
    """

    newest: bytes | None
    entries: Mapping[str, bytes | None]
    groups: Mapping[str, bytes | None]
    reasons: Collection[str]
    num_reasons: int


def replace_ended(facts: EndedFacts, *, number: int, record: bytes) -> Changes | None:
    """Return the writes that replace trajectories by a record; None where it was written before."""
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
