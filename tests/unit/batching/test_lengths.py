from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from turnstream.batching.config import BatchingConfig
from turnstream.batching.lengths import length_problem
from turnstream.batching.readiness import RunFold
from turnstream.testing import config, sealed, shape
from turnstream.types import GroupOpened, TrajectoryKey, TrajectoryState

LONG = [shape(2, 3), shape(9, 1, parent=0, shared=5)]
"""Merged a row of 15 tokens, otherwise one of 5 and one of 15."""


def refusing(limit: int, **fields: Any) -> BatchingConfig:
    return replace(config(), over_long="refuse", max_tokens_per_micro_batch=limit, **fields)


@pytest.mark.parametrize(("limit", "is_refused"), [(15, False), (14, True)])
def test_a_trajectory_is_refused_for_its_longest_row(limit: int, is_refused: bool) -> None:
    problem = length_problem(sealed(turns=LONG), refusing(limit))

    assert problem == (
        "has a row of 15 tokens, which costs 15 of the 14 that a micro-batch may"
        if is_refused
        else ""
    )


def test_the_cost_of_a_row_is_the_one_that_the_run_counts() -> None:
    quadratic = refusing(100, micro_batch_cost="quadratic", cost_per_squared_token=1.0)

    assert "costs 240 of the 100" in length_problem(sealed(turns=LONG), quadratic)


def test_a_long_row_has_a_pass_alone_unless_the_run_refuses_it() -> None:
    alone = replace(config(), max_tokens_per_micro_batch=3)

    assert length_problem(sealed(turns=LONG), alone) == ""


def test_a_group_goes_on_without_the_member_that_is_too_long() -> None:
    fold = RunFold(refusing(14))
    fold.apply("1-0", GroupOpened(group_id="g", prompt_uid="", num_samples=3))
    fold.apply("2-0", sealed("g", sample=0))
    fold.apply("3-0", sealed("g", sample=1, turns=LONG))

    (drop,) = fold.apply("4-0", sealed("g", sample=2))

    assert (drop.state, drop.keys) == (TrajectoryState.INCOMPLETE, (TrajectoryKey("g", 1),))
    assert drop.reason.startswith("sample 1 has a row of 15 tokens")
    assert [member.key.sample for member in fold.ready[0].members] == [0, 2]
