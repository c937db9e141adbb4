"""Laws of the writes of a plan, without a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.plans import manifest, trajectory_plan
from testkit.runs.changes import sums
from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.store.client.stored_values import StoredHash
from turnstream_server.ledger.planning import plan_writes
from turnstream_server.ledger.planning.plan_writes import StepFacts
from turnstream_server.ledger.planning.settling import Attempt, GroupState


def facts_of(**fields: bytes) -> StepFacts:
    stored = {b"lineage": b"main", **{name.encode(): value for name, value in fields.items()}}
    frontier = StoredHash("frontier", stored)
    return StepFacts(frontier=frontier, before=None, of_step=None, revision=1, now_ms=5)


def group_of(name: str, *, num_sealed: int, state: str = "open") -> GroupState:
    attempts = [Attempt(f"{name}/{s}/0", b"sealed:1", b"10") for s in range(num_sealed)]
    return GroupState(name, f"{num_sealed}:{state}".encode(), None, None, attempts)


def plan_of(sizes: Iterable[int]) -> Manifest:
    groups = tuple(
        GroupPlan(
            group_id=f"g{i}",
            prompt_uid="",
            trajectories=tuple(
                trajectory_plan(f"g{i}", sample=s, reward=1.0, advantage=0.0) for s in range(size)
            ),
        )
        for i, size in enumerate(sizes)
    )
    return dataclasses.replace(manifest(), groups=groups)


@given(st.lists(st.integers(1, 3_500), min_size=1, max_size=12))
def test_slices_have_all_groups_in_order_below_the_limit(sizes: list[int]) -> None:
    plan = plan_of(sizes)

    slices = plan_writes.slices_of(plan)

    assert [group for some in slices for group in some] == [*plan.groups]
    for some in slices:
        weight = sum(len(each.trajectories) + plan_writes.GROUP_WEIGHT for each in some)
        assert some
        assert len(some) == 1 or weight <= plan_writes.SLICE


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.lists(st.sampled_from(["open", "decided", "planned"]), min_size=9, max_size=9),
)
def test_marked_groups_move_all_their_sums_once(sizes: list[int], states: list[str]) -> None:
    groups = [group_of(f"g{i}", num_sealed=size, state=states[i]) for i, size in enumerate(sizes)]
    new = [each for each in groups if not plan_writes.is_marked(each)]

    changes = plan_writes.mark(groups, step=3)

    if not new:
        assert changes is None
        return
    assert changes is not None
    num = sum(len(each.attempts) for each in new)
    found = sums(changes)
    assert (found["counts", "sealed"], found["counts", "planned"]) == (-num, num)
    assert (found["budget", "stored"], found["budget", "planned"]) == (-10 * num, 10 * num)
    assert found["frontier", "open_groups"] == -sum(each.state == "open" for each in new)
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


@pytest.mark.parametrize(
    ("num_samples", "members", "state", "leaves_out"),
    [
        (2, None, "open", False),
        (3, None, "open", True),
        (2, b"2:1:1:p", "open", True),
        (3, b"2:1:1:p", "decided", False),
    ],
)
def test_open_group_with_other_attempts_is_decided_before_its_plan(
    num_samples: int, members: bytes | None, state: str, leaves_out: bool
) -> None:
    group = group_of("g", num_sealed=2, state=state)
    entry = f"{num_samples}:{state}".encode()

    assert plan_writes.leaves_out(group._replace(entry=entry, members=members)) is leaves_out
