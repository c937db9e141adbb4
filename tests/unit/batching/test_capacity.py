from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.fold.capacity import admitting_step, capacity, most_live_groups


def admitted(
    *, step: int, running: int, accepted: int, most: int = 100, b: int = 8, eta: int = 2
) -> int:
    most_live = most_live_groups(step, batch_groups=b, max_staleness=eta)
    return capacity(most_live, num_decided=accepted, num_open=running, max_open=most)


@pytest.mark.parametrize(
    ("step", "running", "accepted", "most", "expected"),
    [
        (0, 0, 0, 100, 24),
        (0, 10, 14, 100, 0),
        (3, 5, 27, 100, 16),
        (3, 5, 27, 6, 1),
        (0, 20, 0, 0, 4),  # no limit of open groups
        (0, 7, 0, 6, 0),  # above a bound
        (0, 0, 25, 100, 0),
        (0, 20, 9, 100, 0),
    ],
)
def test_capacity_has_the_golden_values(
    step: int, running: int, accepted: int, most: int, expected: int
) -> None:
    assert admitted(step=step, running=running, accepted=accepted, most=most) == expected


def test_case_45_capacity_of_the_asynchronous_trainer() -> None:
    # Its steps are counted from 1 and its formula has no + 1: g = version_step + 1.
    def of_trainer(g: int, running: int, accepted: int, eta: int = 2) -> int:
        return admitted(step=g - 1, running=running, accepted=accepted, most=6, b=2, eta=eta)

    assert of_trainer(1, 0, 0) == 6
    assert of_trainer(1, 6, 0) == 0
    assert of_trainer(1, 0, 6) == 0
    assert of_trainer(2, 0, 6) == 2
    assert of_trainer(2, 0, 6 - 1) == 3  # a dropped group is subtracted from the accepted ones
    assert of_trainer(5, 0, 8) == 4 + 2  # after a resume at step 5 with 8 accepted
    assert admitted(step=0, running=0, accepted=0, most=2, b=2, eta=0) == 2


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
