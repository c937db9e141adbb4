from __future__ import annotations

import pytest

from testkit.summaries import make_summary
from turnstream_server.launch.demo import judge


@pytest.mark.parametrize(
    ("first", "last", "has_learned"),
    [
        (0.2, 0.60, True),
        (0.2, 0.59, False),  # doubled, but not 0.6 of the best
        (0.4, 0.80, True),
        (0.4, 0.79, False),  # 0.6 of the best, but not doubled
        (0.0, 0.60, True),
        (0.7, 1.00, True),  # no policy can double it
    ],
)
def test_goal_is_double_the_reward_and_a_share_of_the_best(
    first: float, last: float, has_learned: bool
) -> None:
    assert judge(make_summary(first, *[0.5] * 8, last), least=0.6)[0] is has_learned


def test_verdict_names_the_rewards_and_the_goal() -> None:
    _, words = judge(make_summary(0.2, *[0.5] * 9), least=0.6)

    assert "0.500 in the last tenth, 0.200 in the first" in words
    assert "wanted: 0.600" in words
    assert judge(make_summary(), least=0.6) == (False, "no game was finished")
