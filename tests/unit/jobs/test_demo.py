from __future__ import annotations

import pytest

from turnstream_server.jobs.demo import judge
from turnstream_server.jobs.summary import SealedFigures, Summary, summarise


def summary(*, first: float, last: float) -> Summary:
    games = [
        SealedFigures(reward=reward, num_turns=1, wire_bytes=1, resend_bytes=1)
        for reward in (first, *[0.5] * 8, last)
    ]
    return summarise(
        num_groups=1, sealed=games, batches={}, stepped=1, ledger={"committed": 10}, elapsed_s=1
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
    verdict = judge(summary(first=first, last=last), best_reward=1.0)

    assert verdict.has_learned is has_learned


def test_the_verdict_names_the_rewards_and_the_goal() -> None:
    verdict = judge(summary(first=0.2, last=0.5), best_reward=0.9)

    assert verdict.goal == pytest.approx(0.54)
    assert "0.500 in the last tenth, 0.200 in the first" in verdict.words
    assert "wanted: 0.540" in verdict.words


def test_a_run_without_games_has_not_learned() -> None:
    empty = summarise(num_groups=0, sealed=[], batches={}, stepped=0, ledger={}, elapsed_s=0)

    assert not judge(empty, best_reward=1.0).has_learned
