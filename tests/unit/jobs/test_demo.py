from __future__ import annotations

import pytest

from testkit import sealed
from turnstream_server.jobs.demo import judge
from turnstream_server.jobs.summary import Summary, summarise


def summary(*rewards: float) -> Summary:
    return summarise(
        num_groups=1,
        sealed=[sealed(reward=reward) for reward in rewards],
        batches=[],
        planned=1,
        stepped=1,
        ledger={},
        elapsed_s=1,
    )


@pytest.mark.parametrize(
    ("first", "last", "has_learned"),
    [
        (0.2, 0.60, True),
        (0.2, 0.59, False),  # doubled, but not 0.6 of the best
        (0.4, 0.80, True),
        (0.4, 0.79, False),  # 0.6 of the best, but not doubled
        (0.0, 0.60, True),
    ],
)
def test_goal_is_double_the_reward_and_a_share_of_the_best(
    first: float, last: float, has_learned: bool
) -> None:
    assert judge(summary(first, *[0.5] * 8, last))[0] is has_learned


def test_verdict_names_the_rewards_and_the_goal() -> None:
    _, words = judge(summary(0.2, *[0.5] * 9))

    assert "0.500 in the last tenth, 0.200 in the first" in words
    assert "wanted: 0.600" in words
    assert judge(summary()) == (False, "no game was finished")
