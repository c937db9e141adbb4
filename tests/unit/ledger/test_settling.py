"""Laws of the end of a group, without a store."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.runs.changes import sums
from turnstream.batching.fold.decisions import GroupCut, GroupDropped, GroupEvaluated
from turnstream.errors import ConflictError
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.ledger.planning import settling
from turnstream_server.ledger.planning.settling import (
    Attempt,
    GroupState,
    settle,
    settle_evaluation,
)

ENTRIES = [
    (b"open:1:w", b"r30"),
    (b"awaiting_reward:1", b"40"),
    (b"sealed:1", b"50"),
    (b"abandoned:lease", b"r60"),
    (None, b"r70"),
    (None, None),
]
ATTEMPTS = st.lists(st.sampled_from(ENTRIES), min_size=1, max_size=20)


def group_of(entries: list[Any], state: str = "open", task: bytes | None = None) -> GroupState:
    attempts = [Attempt(f"g/{sample}/0", *each) for sample, each in enumerate(entries)]
    return GroupState("g", f"{len(entries)}:{state}".encode(), None, task, attempts)


def keys_of(group: GroupState, *states: str) -> tuple[TrajectoryKey, ...]:
    return tuple(
        TrajectoryKey("g", sample)
        for sample, each in enumerate(group.attempts)
        if each.state in states
    )


def dropped(group: GroupState, state: TrajectoryState) -> GroupDropped:
    return GroupDropped(group_id="g", state=state, reason="why", keys=keys_of(group, "sealed"))


CUT = GroupCut(group_id="g", reason="why")


@given(ATTEMPTS, st.sampled_from(["filtered", "expired", "decided"]))
def test_end_of_a_group_keeps_the_sums(entries: list[Any], into: str) -> None:
    group = group_of(entries)
    number = Counter(each.state for each in group.attempts)
    is_cut = into == "decided"
    decision = CUT if is_cut else dropped(group, TrajectoryState(into))

    changes = settle(group, decision, limits_open=False)

    found = sums(changes)
    assert sum(count for (key, _), count in found.items() if key == "counts") == 0
    assert found["counts", "open"] == -number["open"]
    assert found["counts", "awaiting_reward"] == -number["awaiting_reward"]
    assert found["counts", "sealed"] == (0 if is_cut else -number["sealed"])
    assert found["budget", "reserved"] == -70 * entries.count(ENTRIES[4])
    assert found["frontier", "open_groups"] == -1
    assert found["frontier", "live_groups"] == (0 if is_cut else -1)
    assert changes is not None
    assert ("HSET", "groups", ("g", f"{len(entries)}:{into}")) in changes.calls()


@given(ATTEMPTS)
def test_evaluated_group_counts_named_members_only(entries: list[Any]) -> None:
    group = group_of(entries, "evaluating")
    counted = keys_of(group, "awaiting_reward")
    ended = GroupEvaluated(group_id="g", keys=counted, result=None, total=None)

    found = sums(settle_evaluation(group, ended, versions=()))

    number = Counter(each.state for each in group.attempts)
    assert found["counts", "evaluated"] == number["awaiting_reward"]
    assert found["counts", "surplus"] == number["open"] + number["sealed"]


def test_large_group_is_ended_in_slices_and_then_decided() -> None:
    group = group_of([ENTRIES[0]] * (settling.SLICE + 1))

    first = settle(group, CUT, limits_open=False)
    left = group._replace(attempts=group.attempts[settling.SLICE :])
    second = settle(left, CUT, limits_open=False)

    assert sums(first) == {("counts", "open"): -1_000, ("counts", "surplus"): 1_000}
    assert first is not None
    assert second is not None
    assert (first.is_part, second.is_part) == (True, False)
    assert sums(second)["frontier", "open_groups"] == -1


@pytest.mark.parametrize(
    ("into", "number"), [("filtered", {"done": 1, "filtered": 1}), ("expired", {})]
)
def test_prompt_of_a_dropped_group_is_done_or_sampled_again(
    into: str, number: dict[str, int]
) -> None:
    group = group_of([ENTRIES[2]], task=b"7")

    changes = settle(group, dropped(group, TrajectoryState(into)), limits_open=False)

    found = sums(changes)
    assert {field: n for (key, field), n in found.items() if key == "prompts"} == number
    assert changes is not None
    again = ("ZADD", "retry", (b"7", b"7")) in changes.calls()
    assert again is not bool(number)


@pytest.mark.parametrize("state", ["decided", "planned", "filtered"])
def test_cut_of_a_group_that_is_decided_changes_nothing(state: str) -> None:
    assert settle(group_of([ENTRIES[2]], state), CUT, limits_open=False) is None


def test_cut_before_a_later_refill_changes_nothing() -> None:
    group = group_of([ENTRIES[2]])._replace(members=b"1:1:1:p")

    assert settle(group, CUT, limits_open=False) is None
    later = GroupCut(group_id="g", reason="why", num_granted=1)
    assert settle(group, later, limits_open=False) is not None


@pytest.mark.parametrize("state", ["planned", "expired"])
def test_planned_or_otherwise_dropped_group_is_not_dropped(state: str) -> None:
    group = group_of([ENTRIES[2]], state)

    with pytest.raises(ConflictError, match=f"group g is {state}"):
        settle(group, dropped(group, TrajectoryState.FILTERED), limits_open=False)


def test_lowest_versions_leave_above_the_limit_of_results() -> None:
    versions = {"unknown", *map(str, range(1_000))}

    assert settling._versions_to_drop(versions) == ["unknown"]  # pyright: ignore[reportPrivateUsage]
