"""Laws of the compact record of untrained trajectories, without a store."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.errors import ConflictError
from turnstream_server.ledger.release.release_writes import (
    DROPPED,
    MOST_REASONS,
    OVER,
    EndedFacts,
    replace_ended,
)

REASONS = ("lease", "too low (0.25)", "too low (0.5)", "crashed")
ENTRIES = st.builds(
    lambda state, reason: f"{state}:{reason}".encode(),
    st.sampled_from([*DROPPED, "dead:discarded: by hand"]),
    st.sampled_from(REASONS),
)
GROUP_ENTRIES = st.none() | st.sampled_from([b"9:" + state for state in sorted(OVER)])


@st.composite
def ended(draw: st.DrawFn) -> EndedFacts:
    """Trajectories of up to four groups that can all be folded."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    entries = {
        f"g{i}/{sample}/0": draw(ENTRIES) for i, size in enumerate(sizes) for sample in range(size)
    }
    groups = {f"g{i}": draw(GROUP_ENTRIES) for i in range(len(sizes))}
    known = draw(st.sets(st.sampled_from(["surplus:lease", "filtered:too low"])))
    num_reasons = draw(st.sampled_from([len(known), MOST_REASONS - 1, MOST_REASONS]))
    return EndedFacts(b"6", entries, groups, known, num_reasons)


@given(ended())
def test_record_replaces_each_trajectory_and_counts_it_once(facts: EndedFacts) -> None:
    changes = replace_ended(facts, number=7, record=b"r")

    assert changes is not None
    calls = [*changes.calls()]
    counts = Counter[str]()
    for name, key, words in calls:
        if (name, key) == ("HINCRBY", "reasons"):
            reason, number = words
            counts[str(reason)] += int(number)
    by_state = Counter[str]()
    for reason, number in counts.items():
        by_state[reason.partition(":")[0]] += number
    entries = [entry.decode() for entry in facts.entries.values() if entry is not None]
    assert by_state == Counter(entry.partition(":")[0] for entry in entries)
    assert not any("(" in reason for reason in counts if reason.startswith("filtered"))
    new = [each for each in counts if not each.endswith(":another reason")]
    assert facts.num_reasons + len({*new} - {*facts.reasons}) <= MOST_REASONS
    for key in ("rewards", "ledger"):
        assert ("HDEL", key, (*facts.entries,)) in calls
    assert ("HSET", "untrained", (7, b"r")) in calls
    facts_words = {key: words for name, key, words in calls if name == "FIELDS"}
    assert facts_words["frontier"] == ("ends", b"=6")
    assert {*facts_words["ledger"][::2]} == {*facts.entries}
    assert {*facts_words["groups"][::2]} == {*facts.groups}


@given(ended())
def test_group_that_is_folded_before_or_planned_leaves_no_second_fingerprint(
    facts: EndedFacts,
) -> None:
    changes = replace_ended(facts, number=7, record=b"r")

    assert changes is not None
    dropped = [name for name, entry in facts.groups.items() if entry not in {None, b"9:planned"}]
    calls = [(name, key, words) for name, key, words in changes.calls() if name != "FIELDS"]
    assert [words for name, key, words in calls if (name, key) == ("HDEL", "groups")] == [
        (*dropped,)
    ] * bool(dropped)
    packed: list[Any] = [
        word for name, _, words in calls if name == "EXTEND" for word in words[1::2]
    ]
    assert len(b"".join(packed)) == 8 * len(dropped)


@pytest.mark.parametrize(
    ("entry", "group", "number", "why"),
    [
        (b"sealed:1", b"1:filtered", 7, "a b/0/0 is sealed:1, not at its end"),
        (b"dead:checksum", b"1:filtered", 7, "a b/0/0 is dead:checksum, not at its end"),
        (None, None, 7, "a b/0/0 is unknown, not at its end"),
        (b"abandoned:lease", b"1:open", 7, "group a b of a b/0/0 is open"),
        (b"abandoned:lease", b"1:decided", 7, "group a b of a b/0/0 is decided"),
        (b"abandoned:lease", b"1:filtered", 8, "record 8 does not follow 6"),
    ],
)
def test_what_may_still_change_is_not_folded(
    entry: bytes | None, group: bytes | None, number: int, why: str
) -> None:
    facts = EndedFacts(b"6", {"a%20b/0/0": entry}, {"a%20b": group}, (), 0)

    with pytest.raises(ConflictError, match=f"^{why}$"):
        replace_ended(facts, number=number, record=b"r")


def test_record_that_is_written_changes_nothing() -> None:
    facts = EndedFacts(b"6", {"g/0/0": None}, {"g": None}, (), 0)

    assert replace_ended(facts, number=6, record=b"r") is None
