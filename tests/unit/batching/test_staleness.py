from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import sealed, shape
from turnstream.batching.fold.capacity import admitting_step, capacity, most_live_groups
from turnstream.batching.fold.staleness import VersionSteps
from turnstream.batching.merge.columns import TokenColumns, masked_columns
from turnstream.types import Ragged, VersionAnnounced


def announced(*steps: int, lineage: str = "main", into: VersionSteps | None = None) -> VersionSteps:
    """Versions counted on from those before, made after these steps."""
    versions = into or VersionSteps()
    for step in steps:
        versions.announce(VersionAnnounced(version=len(versions.steps), step=step, lineage=lineage))
    return versions


def test_unannounced_version_is_as_old_as_the_oldest_above() -> None:
    versions = VersionSteps({10: 1, 20: 2, 30: 3})

    def old(max_age: int) -> frozenset[int]:
        return versions.older_than(max_age, train_step=4, among=[0, 10, 15, 25, 30, 35])

    assert old(2) == set()
    assert old(1) == {0, 10}
    assert old(0) == {0, 10, 15}
    assert versions.older_than(0, train_step=99, among=[31, 35]) == set()


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 9), max_size=6),
    st.integers(0, 3),
    st.sets(st.integers(0, 40)),
)
def test_ages_are_those_of_a_loop_over_all_versions(
    steps: dict[int, int], max_age: int, asked: set[int]
) -> None:
    old = VersionSteps(steps).older_than(max_age, train_step=8, among=asked)

    def made_by(version: int) -> int:
        return min((step for above, step in steps.items() if above > version), default=99)

    expected = {v for v in asked if 7 - steps.get(v, made_by(v)) > max_age}
    assert old == expected


def test_version_of_undone_steps_ages_from_the_fork_or_rollback() -> None:
    # Steps 2 and 3 were undone: tokens of the weights of step 3 are as old as those of step 1.
    forked = announced(1, 2, lineage="main-1", into=announced(0, 1, 2, 3))
    # The trainer went back to step 5 and announced again after step 10: the version of the undone
    # step 10 was one step old in step 12.
    rolled_back = announced(0, 5, 10)
    rolled_back.roll_back(5)
    announced(10, lineage="main-1", into=rolled_back)

    assert forked.steps == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2}
    assert forked.older_than(0, train_step=3, among=range(6)) == {0, 1, 2, 3, 4}
    assert rolled_back.steps == {0: 0, 1: 5, 2: 5, 3: 10}
    assert rolled_back.older_than(5, train_step=12, among=range(4)) == {0, 1, 2}


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab")), max_size=12))
def test_no_token_ever_grows_younger(history: list[tuple[int, str]]) -> None:
    versions, before = VersionSteps(), frozenset[int]()

    for train_step, (step, lineage) in enumerate(history, start=1):
        announced(step, lineage=lineage, into=versions)
        newest = len(versions.steps) - 1
        old = versions.older_than(2, train_step=train_step, among=versions.steps)
        assert before <= old | {newest}
        before = old


MIXED = sealed(
    turns=[shape(2, 3), shape(2, 4)],
    turn_versions=[[(None, 1), (3, 2)], [(3, 1), (5, 3)]],
)


@given(
    st.lists(
        st.tuples(st.none() | st.integers(0, 3), st.integers(0, 4), st.integers(0, 1)), max_size=6
    ),
    st.sets(st.integers(0, 3)),
)
def test_masks_what_a_loop_over_tokens_masks(
    runs: list[tuple[int | None, int, int]], old: set[int]
) -> None:
    mask = [m for _, count, m in runs for _ in range(count)]
    versions = [version for version, count, _ in runs for _ in range(count)]
    given_columns = TokenColumns(
        input_ids=Ragged.from_rows([mask], np.int32),
        loss_mask=Ragged.from_rows([mask], np.uint8),
        logprobs=None,
        rewards=Ragged.from_rows([mask], np.float32),
        run_versions=Ragged.from_rows([[-1 if v is None else v for v, _, _ in runs]], np.int64),
        run_counts=Ragged.from_rows([[count for _, count, _ in runs]], np.int32),
    )

    kept = masked_columns(given_columns, is_masked=[False], masked_versions=old)

    expected = [m * (version not in old) for version, m in zip(versions, mask, strict=True)]
    assert (kept.loss_mask.values.tolist(), kept.loss_mask.values.dtype) == (expected, np.uint8)
    assert given_columns.loss_mask.values.tolist() == mask
    assert kept.num_trained() == [sum(expected)]


def admitted(
    *, step: int, running: int, accepted: int, most: int = 100, b: int = 8, eta: int = 2
) -> int:
    most_live = most_live_groups(step, batch_groups=b, max_staleness=eta)
    return capacity(most_live, num_decided=accepted, num_open=running, max_open=most)


SMALL = {"most": 6, "b": 2}
"""The asynchronous trainer of case 45. It counts steps from 1, and its formula has no + 1."""


@pytest.mark.parametrize(
    ("step", "running", "accepted", "fields", "expected"),
    [
        (0, 0, 0, {}, 24),
        (0, 10, 14, {}, 0),
        (3, 5, 27, {}, 16),
        (3, 5, 27, {"most": 6}, 1),
        (0, 20, 0, {"most": 0}, 4),  # no limit of open groups
        (0, 7, 0, {"most": 6}, 0),  # above a bound
        (0, 0, 25, {}, 0),
        (0, 20, 9, {}, 0),
        (0, 0, 0, SMALL, 6),
        (0, 6, 0, SMALL, 0),
        (0, 0, 6, SMALL, 0),
        (1, 0, 6, SMALL, 2),
        (1, 0, 6 - 1, SMALL, 3),  # a dropped group is subtracted from the accepted ones
        (4, 0, 8, SMALL, 4 + 2),  # after a resume at step 5 with 8 accepted
        (0, 0, 0, {"most": 2, "b": 2, "eta": 0}, 2),
    ],
)
def test_capacity_has_the_golden_values(
    step: int, running: int, accepted: int, fields: dict[str, int], expected: int
) -> None:
    assert admitted(step=step, running=running, accepted=accepted, **fields) == expected


@given(step=st.integers(0, 50), eta=st.integers(0, 5), b=st.integers(1, 16))
def test_trainer_without_groups_always_gets_a_batch_of_admissions(
    step: int, eta: int, b: int
) -> None:
    # Everything trained so far, nothing running, however many were filtered before.
    assert admitted(step=step, running=0, accepted=step * b, most=10_000, b=b, eta=eta) >= b


@given(step=st.integers(0, 50), eta=st.integers(1, 5), announced=st.integers(0, 60))
def test_missing_announcements_never_stop_a_trainer_that_allows_staleness(
    step: int, eta: int, announced: int
) -> None:
    newest = admitting_step(step, announced, max_staleness=eta)

    assert admitted(step=newest, running=0, accepted=step * 8, most=10_000, eta=eta) >= 8
    assert step - newest <= max(0, step - announced)


def test_steps_before_a_revision_count_with_their_own_groups() -> None:
    # Two steps of 4 groups are planned and trained, then a step has 8.
    most_live = most_live_groups(2, batch_groups=8, max_staleness=0, num_revised=2 * (4 - 8))

    assert capacity(most_live, num_decided=8, num_open=0, max_open=0) == 8
