from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.fold.capacity import capacity


def admit(
    *, step: int, running: int, accepted: int, most: int = 100, b: int = 8, eta: int = 2
) -> int:
    return capacity(
        version_step=step,
        batch_groups=b,
        max_staleness=eta,
        num_accepted=accepted,
        num_running=running,
        max_concurrent=most,
    )


@pytest.mark.parametrize(
    ("step", "running", "accepted", "most", "expected"),
    [(0, 0, 0, 100, 24), (0, 10, 14, 100, 0), (3, 5, 27, 100, 16), (3, 5, 27, 6, 1)],
)
def test_admits_the_golden_vectors(
    step: int, running: int, accepted: int, most: int, expected: int
) -> None:
    assert admit(step=step, running=running, accepted=accepted, most=most) == expected


def test_edge_case_45_capacity_of_the_asynchronous_trainer() -> None:
    # Its steps are counted from 1 and its formula has no + 1: g = version_step + 1.
    def room(g: int, running: int, accepted: int, eta: int = 2) -> int:
        return admit(step=g - 1, running=running, accepted=accepted, most=6, b=2, eta=eta)

    assert room(1, 0, 0) == 6
    assert room(1, 6, 0) == 0
    assert room(1, 0, 6) == 0
    assert room(2, 0, 6) == 2
    assert room(2, 0, 6 - 1) == 3  # a dropped group is taken out of what was accepted
    assert room(5, 0, 8) == 4 + 2  # after a resume at step 5 with 8 accepted
    assert admit(step=0, running=0, accepted=0, most=2, b=2, eta=0) == 2


@pytest.mark.parametrize(("running", "accepted", "most"), [(7, 0, 6), (0, 25, 100), (20, 9, 100)])
def test_a_run_above_its_bounds_admits_none(running: int, accepted: int, most: int) -> None:
    assert admit(step=0, running=running, accepted=accepted, most=most) == 0


@given(step=st.integers(0, 50), eta=st.integers(0, 5), b=st.integers(1, 16))
def test_a_trainer_out_of_groups_always_gets_a_batch_of_admissions(
    step: int, eta: int, b: int
) -> None:
    # Everything trained so far, nothing running, however many were filtered on the way.
    assert admit(step=step, running=0, accepted=step * b, most=10_000, b=b, eta=eta) >= b


def test_without_a_limit_only_staleness_bounds_what_is_under_way() -> None:
    assert admit(step=0, running=20, accepted=0, most=0) == 4


def test_edge_case_45_what_was_filtered_expired_or_dropped_makes_room_again() -> None:
    # AReaL only takes such groups out of `running`: with 24 of 24 accepted and all of them
    # filtered, its trainer would wait for ever.
    assert admit(step=0, running=0, accepted=24) == 0
    assert admit(step=0, running=0, accepted=24 - 24) == 24


def test_edge_case_45_accepted_and_version_are_restored_together() -> None:
    # A trainer that goes back from step 5 to 3 with the 48 groups of then would be let no group.
    assert admit(step=3, running=0, accepted=48) == 0
    assert admit(step=3, running=0, accepted=3 * 8) == 24


def test_steps_before_a_revision_count_as_the_groups_that_they_had() -> None:
    # Two steps of 4 groups are planned and trained, then a step has 8: as if all had had 8, but
    # for the 8 groups that the two had less.
    room = capacity(
        version_step=2,
        batch_groups=8,
        max_staleness=0,
        num_accepted=8,
        num_running=0,
        max_concurrent=0,
        num_revised=2 * (4 - 8),
    )

    assert room == 8
