"""Laws of the writes of a plan, without a store."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.plans import manifest, trajectory_plan
from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.errors import ConflictError
from turnstream.store.client.stored_values import StoredHash
from turnstream_server.bus.leadership.writes import Changes
from turnstream_server.bus.planning import plan_writes
from turnstream_server.bus.planning.ending import Attempt
from turnstream_server.bus.planning.plan_writes import GroupFacts, StepFacts

_REST = st.sampled_from(
    [
        (b"open:1:w", b"r30"),
        (b"awaiting_reward:1", b"40"),
        (b"sealed:1", b"50"),
        (b"abandoned:lease", b"r60"),
        (None, b"r70"),
        (None, None),
    ]
)


def facts_of(**fields: bytes) -> StepFacts:
    stored = {b"lineage": b"main", **{name.encode(): value for name, value in fields.items()}}
    frontier = StoredHash("frontier", stored)
    return StepFacts(frontier=frontier, before=None, of_step=None, revision=1, now_ms=5)


def group_of(name: str, *, num_sealed: int, rest: Iterable[Any] = (), state: str = "open") -> Any:
    plans = [trajectory_plan(name, sample=s, reward=1.0, advantage=0.0) for s in range(num_sealed)]
    ids = [each.key.trajectory_id for each in plans]
    others = [Attempt(f"{name}/{num_sealed + i}/0", *each) for i, each in enumerate(rest)]
    return GroupFacts(
        plan=GroupPlan(group_id=name, prompt_uid="", trajectories=tuple(plans)),
        state=f"{num_sealed + len(others)}:{state}".encode(),
        members=None,
        task=None,
        attempts=[Attempt(each, b"sealed:1", b"10") for each in ids],
        rest=others,
    )


def plan_of(sizes: Iterable[int]) -> Manifest:
    groups = tuple(group_of(f"g{i}", num_sealed=size).plan for i, size in enumerate(sizes))
    return dataclasses.replace(manifest(), groups=groups)


def sums(changes: Changes) -> Counter[tuple[str, Any]]:
    """The number that each counter changes by."""
    found: Counter[tuple[str, Any]] = Counter()
    for name, key, words in changes.calls():
        if name == "HINCRBY":
            field, number = words
            found[key, field] += int(number)
    return found


@given(st.lists(st.integers(1, 3_500), min_size=1, max_size=12))
def test_slices_have_all_groups_in_order_below_the_limit(sizes: list[int]) -> None:
    plan = plan_of(sizes)

    slices = plan_writes.slices_of(plan)

    assert [group for some in slices for group in some] == [*plan.groups]
    for some in slices:
        weight = sum(len(each.trajectories) + plan_writes.GROUP_WEIGHT for each in some)
        assert some
        assert len(some) == 1 or weight <= plan_writes.SLICE


@given(st.lists(_REST, min_size=1, max_size=20))
def test_decided_group_ends_what_is_open_and_keeps_the_sums(rest: list[Any]) -> None:
    group = group_of("g", num_sealed=2, rest=rest)

    changes = plan_writes.decide(group)

    assert changes is not None
    ended = [each for each in group.rest if each.state in {"open", "awaiting_reward"}]
    found = sums(changes)
    assert found["counts", "surplus"] == len(ended)
    assert sum(number for (key, _), number in found.items() if key == "counts") == 0
    unopened = [each.reserved_bytes for each in group.rest if each.entry is None]
    assert found["budget", "reserved"] == -sum(unopened)
    assert ("HSET", "groups", ("g", f"{2 + len(rest)}:decided")) in changes.calls()


def test_large_group_is_ended_in_slices_and_then_decided() -> None:
    rest = [(b"open:1:w", b"r1")] * (plan_writes.REST_SLICE + 1)
    group = group_of("g", num_sealed=1, rest=rest)

    first = plan_writes.decide(group)
    second = plan_writes.decide(group._replace(rest=group.rest[plan_writes.REST_SLICE :]))

    assert first is not None
    assert second is not None
    assert sums(first) == {("counts", "open"): -1_000, ("counts", "surplus"): 1_000}
    assert ("frontier", "open_groups") in sums(second)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.lists(st.sampled_from(["open", "decided", "planned"]), min_size=9, max_size=9),
)
def test_marked_groups_move_all_their_sums_once(sizes: list[int], states: list[str]) -> None:
    groups = [group_of(f"g{i}", num_sealed=size, state=states[i]) for i, size in enumerate(sizes)]
    new = [each for each in groups if not each.is_planned]

    changes = plan_writes.mark(groups, step=3)

    if not new:
        assert changes is None
        return
    assert changes is not None
    num = sum(len(each.attempts) for each in new)
    found = sums(changes)
    assert (found["counts", "sealed"], found["counts", "planned"]) == (-num, num)
    assert (found["budget", "stored"], found["budget", "planned"]) == (-10 * num, 10 * num)
    assert found["frontier", "open_groups"] == -sum(each.is_open for each in new)
    written = [words for name, key, words in changes.calls() if (name, key) == ("HSET", "groups")]
    assert [*written[0][::2]] == [each.name for each in new]


@pytest.mark.parametrize(
    ("fields", "can"),
    [
        ({}, True),
        ({"paused": b""}, False),
        ({"next_revision": b"1"}, False),
        ({"next_revision": b"2"}, True),
        ({"lineage": b"main-1"}, False),
    ],
)
def test_step_can_be_written_where_the_run_has_not_changed(
    fields: dict[str, bytes], can: bool
) -> None:
    assert plan_writes.check_step(facts_of(**fields), manifest(), manifest_hash="f") is can


def test_plan_in_slices_says_so_until_all_groups_are_marked() -> None:
    plan = plan_of([1, 1])
    groups = [group_of(f"g{i}", num_sealed=1) for i in range(2)]

    whole = plan_writes.commit(facts_of(), plan, groups, manifest_hash="f", record=b"r")
    first = plan_writes.commit(facts_of(), plan, groups[:1], manifest_hash="f", record=b"r")

    marking = ("HSET", "frontier", ("marking", "1"))
    assert marking in first.calls()
    assert marking not in whole.calls()
    assert sums(first)["frontier", "planned_groups"] == 2
    assert sums(first)["counts", "planned"] == 1


def test_trajectory_that_is_named_twice_is_refused() -> None:
    plan = plan_of([2])
    twice = dataclasses.replace(plan, groups=plan.groups * 2)

    with pytest.raises(ConflictError, match="g0/0/0 is named twice"):
        plan_writes.slices_of(twice)
