"""The writes of the release: from what the store holds of finished steps to `Changes`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnstream.errors import ConflictError
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream_server.ledger.leadership.writes import Changes
from turnstream_server.ledger.planning.ending import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkFacts:
    """The facts in the store about the low watermark of a run.

    Attributes:
        released: the watermark; None before the first.
        checkpoints: the committed steps, in order and separated by commas, or None.
        revision: number of the config in force.
        num_kept: checkpoints that this config keeps.
        observers: entries by name, `<newest step seen>:<ms of expiry, 0 once expired>:...`.
    """

    released: bytes | None
    checkpoints: bytes | None
    revision: int
    num_kept: int
    observers: Mapping[bytes, bytes]


def advance(facts: WatermarkFacts, *, at_most: int | None) -> tuple[int, Changes | None]:
    """Return the newest step that nobody can ask for, and the writes that release up to it.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedFacts:
    """The facts in the store about the released steps of a run; None for missing fields.

    Attributes:
        released: the low watermark.
        folded: newest step with a compact record.
        snapshot_step: newest plan that a starting planner does not read.
    """

    released: bytes | None
    folded: bytes | None
    snapshot_step: bytes | None


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

    Raises:
        ConflictError: the step is not released.
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


def finish(facts: FoldedFacts, records: Mapping[int, bytes]) -> list[Changes]:
    """Return the writes that replace plans by compact records, for each step in order.

    Raises:
        ConflictError: a step is not released, not the next one, or not in the snapshot.
    """
    released, folded, in_snapshot = (
        parsed_number(each or b"0") for each in (facts.released, facts.folded, facts.snapshot_step)
    )
    stored, all_changes = facts.folded, list[Changes]()
    for step in sorted(each for each in records if each > folded):
        if step != folded + 1 or step > released:
            raise ConflictError(
                f"step {step} is not next: step {folded} is folded, step {released} is released"
            )
        if step > in_snapshot:
            raise ConflictError(f"step {step} is not in the snapshot")
        changes = Changes()
        changes.expect("frontier", "released", facts.released)
        changes.expect("frontier", "folded", stored)
        changes.expect("snapshot", "step", facts.snapshot_step)
        changes.write("HSET", "finished_batches", step, records[step])
        changes.write("XTRIM", "plan", "MINID", f"{step + 1}-0")
        changes.write("HDEL", "batches", step - 1)
        whats = ("planned", "stepped", "committed")
        changes.write("HDEL", "times", *(f"{what}:{step - 1}" for what in whats))
        changes.write("HSET", "frontier", "folded", step)
        all_changes.append(changes)
        folded, stored = step, b"%d" % step
    return all_changes
