from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from testkit import sealed, shape
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
