from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit import config, sealed, shape
from testkit.folds import fold, key, opened, samples, seals
from turnstream.batching.config import BatchingConfig
from turnstream.batching.scoring.filters import is_compared, is_masked, length_problem
from turnstream.types import Status, TrajectoryState

LONG = [shape(2, 3), shape(9, 1, parent=0, shared=5)]
"""Merged a row of 15 tokens, otherwise one of 5 and one of 15."""


def refusing(limit: int, **fields: Any) -> BatchingConfig:
    return replace(config(), over_long="refuse", max_tokens_per_micro_batch=limit, **fields)


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        (refusing(15), ""),
        (refusing(14), "has a row of 15 tokens, which costs 15 of the 14 that a micro-batch may"),
        (
            refusing(100, micro_batch_cost="quadratic", cost_per_squared_token=1.0),
            "has a row of 15 tokens, which costs 240 of the 100 that a micro-batch may",
        ),
        (replace(config(), max_tokens_per_micro_batch=3), ""),  # a pass alone
    ],
)
def test_trajectory_is_refused_for_the_cost_of_its_longest_row(
    of: BatchingConfig, problem: str
) -> None:
    assert length_problem(sealed(turns=LONG), of) == problem


MASKING = replace(config(), mask_truncated=True)


@pytest.mark.parametrize("status", Status)
def test_truncated_response_is_masked_if_configured(status: Status) -> None:
    trajectory = sealed(status=status)

    assert is_masked(trajectory, MASKING) == (status in (Status.TRUNCATED, Status.ABORTED))
    assert not is_masked(trajectory, config())


@pytest.mark.parametrize(("num_tokens", "expected"), [(9, False), (10, False), (11, True)])
def test_overlong_is_judged_by_response_tokens_of_all_turns(
    num_tokens: int, expected: bool
) -> None:
    of = replace(MASKING, overlong_length=10)
    trajectory = sealed(turns=[shape(50, 4), shape(50, num_tokens - 4, trained=0)])

    assert is_masked(trajectory, of) is expected


@pytest.mark.parametrize(("masked_reward", "expected"), [("keep", True), ("leave_out", False)])
def test_a_masked_trajectory_is_compared_if_the_run_keeps_its_reward(
    masked_reward: Any, expected: bool
) -> None:
    of = replace(MASKING, masked_reward=masked_reward)

    assert is_compared(sealed(status=Status.ABORTED), of) is expected
    assert is_compared(sealed(), of)


def test_group_continues_without_its_overlong_member() -> None:
    events = [opened(3), *seals(0), sealed(sample=1, turns=LONG), *seals(2)]

    decided, (drop,) = fold(events, refusing(14))

    assert (drop.state, drop.key) == (TrajectoryState.INCOMPLETE, key(1))
    assert drop.reason.startswith("sample 1 has a row of 15 tokens")
    assert samples(decided) == [[0, 2]]
