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
