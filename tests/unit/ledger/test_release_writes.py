"""Laws of the writes of the release, without a store."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.errors import ConflictError, CorruptRecordError
from turnstream_server.ledger.release.release_writes import (
    Part,
    WatermarkFacts,
    advance,
    compact,
    fingerprint_of,
    finish,
)

STEPS = st.lists(st.integers(1, 9), unique=True).map(sorted)
OBSERVERS = st.dictionaries(
    st.sampled_from([b"a", b"b", b"c"]), st.tuples(st.integers(0, 9), st.booleans())
)


@given(STEPS, st.integers(0, 9), st.integers(1, 4), OBSERVERS, st.none() | st.integers(0, 9))
def test_watermark_keeps_what_anyone_may_ask_for_and_never_falls(
    steps: list[int],
    released: int,
    num_kept: int,
    observers: dict[bytes, tuple[int, bool]],
    at_most: int | None,
) -> None:
    facts = WatermarkFacts(
        released=b"%d" % released,
        checkpoints=",".join(map(str, steps)).encode(),
        revision=1,
        num_kept=num_kept,
        observers={
            name: b"%d:%d:9@key" % (seen, 7 * is_live)
            for name, (seen, is_live) in observers.items()
        },
    )

    floor, changes = advance(facts, at_most=at_most)

    limits = [seen for seen, is_live in observers.values() if is_live]
    limits += [] if at_most is None else [at_most]
    oldest_kept = steps[-num_kept:][0] if len(steps) >= num_kept else 0
    assert floor == max(released, min([oldest_kept, *limits]))
    if floor == released:
        assert changes is None
        return
    assert changes is not None
    calls = [*changes.calls()]
    kept = ",".join(map(str, steps[-num_kept:]))
    assert calls[-1] == ("HSET", "frontier", ("released", floor, "checkpoints", kept))
    assert ("SIZE", "observers", ("HLEN", len(observers))) in calls
    expected = {words[1] for name, key, words in calls if (name, key) == ("PREFIX", "observers")}
    assert expected == {name.decode() for name, (_, is_live) in observers.items() if is_live}


def test_damaged_observer_is_named() -> None:
    facts = WatermarkFacts(
        released=None, checkpoints=b"1,2", revision=1, num_kept=1, observers={b"a": b"x:1:2"}
    )

    with pytest.raises(CorruptRecordError, match="observers, field 'a'"):
        advance(facts, at_most=None)


ENTRIES = st.lists(
    st.sampled_from([b"planned:3", b"planned:30", b"sealed:1", b"dead:why", None]), max_size=9
)


@given(ENTRIES, st.integers(0, 5))
def test_only_trajectories_of_the_released_step_are_folded(
    entries: list[bytes | None], released: int
) -> None:
    part = Part(3, [f"g/{sample}/0" for sample in range(len(entries))], are_groups=False)
    if released < 3:
        with pytest.raises(ConflictError, match=f"step 3 is not released; step {released} is"):
            compact(part, entries, released=b"%d" % released)
        return

    changes = compact(part, entries, released=b"%d" % released)

    ours = [each for each, entry in zip(part.names, entries, strict=True) if entry == b"planned:3"]
    calls = [] if changes is None else [*changes.calls()]
    assert bool(calls) is bool(ours)
    if ours:
        assert ("PREFIX", "ledger", ("planned:3", *ours)) in calls
        assert calls[-2:] == [("HDEL", "rewards", (*ours,)), ("HDEL", "ledger", (*ours,))]


@given(st.lists(st.sampled_from([b"8:planned", b"8:open", b"8:expired", None]), max_size=20))
def test_each_planned_group_leaves_one_fingerprint_for_its_entry(
    entries: list[bytes | None],
) -> None:
    names = [str(number) for number in range(len(entries))]

    changes = compact(Part(1, names, are_groups=True), entries, released=b"1")

    gone = [n for n, entry in zip(names, entries, strict=True) if entry == b"8:planned"]
    calls = [] if changes is None else [*changes.calls()]
    assert bool(calls) is bool(gone)
    if gone:
        expected = [word for name in gone for word in (name, b"=8:planned")]
        assert ("FIELDS", "groups", (*expected,)) in calls
        assert ("HDEL", "groups", (*gone,)) in calls
        words: Any
        (words,) = [
            words for name, key, words in calls if (name, key) == ("EXTEND", "finished_groups")
        ]
        found = {
            (bucket, packed[start : start + 8])
            for bucket, packed in zip(words[::2], words[1::2], strict=True)
            for start in range(0, len(packed), 8)
        }
        assert found == {*map(fingerprint_of, gone)}


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 20), st.booleans())
def test_each_step_is_finished_once_and_after_the_one_before(
    folded: int, first: int, num: int, limit: int, is_in_snapshot: bool
) -> None:
    facts = (b"%d" % limit, b"%d" % folded, b"%d" % (limit + 1) if is_in_snapshot else None)
    records = {step: b"r%d" % step for step in range(first, first + num)}
    new = [step for step in records if step > folded]

    if new and (new[0] != folded + 1 or new[-1] > limit or not is_in_snapshot):
        is_first_next = new[0] == folded + 1 and new[0] <= limit
        why = "not next" if is_in_snapshot or not is_first_next else "not in the snapshot"
        with pytest.raises(ConflictError, match=f"is {why}"):
            finish(facts, records)
        return
    written = [[*changes.calls()] for changes in finish(facts, records)]

    for step, calls in zip(new, written, strict=True):
        frontier = (*("released", b"=%d" % limit), *("folded", b"=%d" % (step - 1)))
        assert ("FIELDS", "frontier", frontier) in calls
        assert ("HSET", "finished_batches", (step, records[step])) in calls
        assert ("HSET", "frontier", ("folded", step)) in calls
