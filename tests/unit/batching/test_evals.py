from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed, shape
from testkit.runs.folds import (
    DEADLINE,
    abandoned,
    apply,
    awaiting,
    died,
    fold,
    key,
    missed,
    opened,
    posted,
)
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.evals import MAX_OPEN_RESULTS
from turnstream.batching.scoring.rewards import MAX_REWARD
from turnstream.types import (
    EvalGroup,
    Event,
    GroupOpened,
    Purpose,
    SealedTrajectory,
    Spread,
    Status,
    TrajectoryState,
)

CONFIG = config()
GDPO = dataclasses.replace(
    CONFIG, estimator="gdpo", component_weights=(("format", 1.0), ("result", 2.0))
)
REFILLED = dataclasses.replace(
    CONFIG, group_deadline_s=9.0, deadline_policy="refill", max_refills=3
)


def evaluation(num_samples: int = 2, *, group_id: str = "g0") -> GroupOpened:
    return opened(num_samples, group_id=group_id, purpose=Purpose.EVAL)


def test_evaluation_ends_when_each_sample_is_sealed_and_is_never_ready() -> None:
    events = [evaluation(), sealed(sample=1, reward=0.0, version=7), sealed(version=7)]

    folded, (ended,) = fold(events)

    assert ended.keys == (key(0), key(1))
    assert ended.result == EvalGroup(
        group_id="g0",
        prompt_uid="uid of g0",
        version=7,
        num_trajectories=2,
        num_lost=0,
        reward=Spread(num=2, mean=0.5, squares=0.5),
        best=1.0,
    )
    assert (folded.num_ready, folded.num_open_groups, folded.state.undecided) == (0, 0, [])


@pytest.mark.parametrize("of", [CONFIG, GDPO], ids=lambda each: each.estimator)
def test_evaluation_counts_failed_samples_with_a_reward_of_zero(of: BatchingConfig) -> None:
    failed = [
        dataclasses.replace(
            sealed(sample=sample, reward=None), status=Status.ERROR, tags={"task": "a"}
        )
        for sample in (2, 3)
    ]
    events = [evaluation(4), sealed(reward=1.0), sealed(sample=1, reward=1.0), *failed]

    _, (ended,) = fold(events, of)

    assert (ended.result.num_trajectories, ended.result.num_lost) == (4, 0)
    assert (ended.result.reward.num, ended.result.reward.mean) == (4, 0.5)
    assert ended.total.figures.tags["task"].values["a"].reward_mean == 0.0


@pytest.mark.parametrize(
    ("events", "members", "num_lost"),
    [
        *[([sealed(), end], (key(0),), 1) for end in (abandoned(1), died(1), DEADLINE)],
        ([sealed(), died(0), sealed(sample=1)], (key(1),), 1),
        ([sealed(), died(0, 1), sealed(sample=1)], (key(0), key(1)), 0),  # another attempt died
        ([abandoned(0), abandoned(1)], (), None),
    ],
)
def test_evaluation_loses_dead_and_abandoned_members_and_never_refills_one(
    events: list[Event], members: Any, num_lost: int | None
) -> None:
    _, (ended,) = fold([evaluation(), *events], REFILLED)

    assert (ended.keys, ended.result and ended.result.num_lost) == (members, num_lost)
    assert (ended.result is None) == (ended.total is None) == (not members)


def test_evaluation_has_the_oldest_version_and_labels_of_samples_without_a_usable_reward() -> None:
    missing = sealed(reward=None, version=6, metrics={"turns": 2})
    mixed = sealed(sample=1, reward=2 * MAX_REWARD, turn_versions=[[(5, 1), (8, 2)]])

    _, (ended,) = fold([evaluation(), missing, mixed])

    result = ended.result
    assert (result.version, ended.total.version) == (5, 5)
    assert (result.num_trajectories, result.reward, result.best) == (2, Spread(), None)
    assert ended.total.figures.metrics["turns"].total == 2


def test_version_sums_up_its_groups() -> None:
    first = [sealed(reward=1.0, version=3, metrics={"turns": 2}), abandoned(1)]
    second = [
        sealed("f", reward=0.0, version=3, metrics={"turns": 4}),
        sealed("f", sample=1, reward=0.5, version=3, tags={"env": "maze"}),
    ]

    _, decided = fold([evaluation(), evaluation(group_id="f"), *first, *second])

    total = decided[-1].total
    assert (total.num_groups, total.num_trajectories, total.num_lost) == (2, 3, 1)
    assert (total.reward.mean, total.reward.std) == (0.5, pytest.approx(0.5))
    assert (total.best.num, total.best.mean) == (2, 0.75)
    assert total.figures.metrics["turns"].mean == 3.0
    assert total.figures.tags["env"].values["maze"].reward_mean == 0.5


def test_seal_after_the_evaluation_is_surplus_once() -> None:
    late = sealed(sample=1)

    folded, (ended, dropped) = fold(
        [evaluation(), sealed(), DEADLINE, late, late, posted(1), abandoned(1), DEADLINE]
    )

    assert ended.result.num_trajectories == 1
    assert (dropped.key, dropped.state) == (key(1), TrajectoryState.SURPLUS)
    folded.remove_decided(["g0"])
    assert folded.state.decided == {}


def test_repeated_events_of_an_evaluation_change_nothing() -> None:
    once = [evaluation(), sealed(reward=1.0), sealed(sample=1, reward=0.0)]
    twice = [each for event in once for each in (event, event)]

    folded, decided = fold([*twice, once[0]])

    assert decided == fold(once)[1]
    assert folded.state.groups == {}


def test_results_of_old_versions_are_final() -> None:
    def one(group_id: str, version: int) -> list[Event]:
        return [evaluation(1, group_id=group_id), sealed(group_id, version=version)]

    events = one("old", 0)
    for version in range(1, MAX_OPEN_RESULTS + 1):
        events += one(f"g{version}", version)

    *_, ended, grown = fold([*events, *one("late", 0), *one("new", MAX_OPEN_RESULTS)])[1]

    assert ended.result.version == 0
    assert ended.total is None
    assert grown.total.num_groups == 2


def components(reward: float | None, **named: float) -> SealedTrajectory:
    return dataclasses.replace(sealed(reward=reward), reward_components=named)


@pytest.mark.parametrize(
    ("of", "events", "best"),
    [
        (GDPO, [components(None, format=0.5, result=0.25)], 1.0),
        (GDPO, [components(3.0, format=0.5)], 3.0),
        (CONFIG, [components(0.75, format=0.5, result=9.0)], 0.75),
        (
            dataclasses.replace(CONFIG, reward_source="sum_of_turns"),
            [sealed(reward=None, turns=[shape(), shape()], turn_rewards=[0.25, 0.5])],
            0.75,
        ),
        (
            GDPO,
            [awaiting(0, reward_components={"format": 0.5}), posted(0, None, result=0.25)],
            1.0,
        ),
        (CONFIG, [dataclasses.replace(awaiting(0), reward=0.75), posted(0, None, b=9.0)], 0.75),
        (CONFIG, [evaluation(), awaiting(0), awaiting(1), posted(0, 0.25), missed(1)], 0.25),
        (CONFIG, [evaluation(), sealed(reward=0.5), posted(0, 9.0), posted(1), abandoned(1)], 0.5),
    ],
    ids=[
        *("weighted", "missing", "outcome", "turns", "posted", "posted beside an outcome"),
        *("one missed", "none awaited"),
    ],
)
def test_evaluated_reward_comes_from_the_source_of_the_run(
    of: BatchingConfig, events: list[Event], best: float
) -> None:
    opens = [] if isinstance(events[0], GroupOpened) else [evaluation(1)]

    _, (ended,) = fold([*opens, *events], of)

    assert ended.result.best == best
    assert ended.result.num_trajectories == sum(isinstance(e, SealedTrajectory) for e in events)


def test_revision_keeps_members_of_evaluations() -> None:
    folded, _ = fold([evaluation(), sealed(reward=-1.0)])

    assert folded.revise("5-0", dataclasses.replace(CONFIG, estimator="maxrl")) == []
    (ended,) = apply(folded, sealed(sample=1), first=6)
    assert ended.keys == (key(0), key(1))


@given(st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_spread_has_mean_and_deviation_of_its_numbers(numbers: list[float]) -> None:
    middle = len(numbers) // 2

    spread = Spread().with_numbers(numbers[:middle]).with_numbers(numbers[middle:])

    n = len(numbers)
    mean = math.fsum(numbers) / n if n else 0.0
    squares = math.fsum((number - mean) ** 2 for number in numbers)
    assert spread.num == n
    assert spread.mean == pytest.approx(mean, abs=1e-6)
    assert spread.std == pytest.approx(math.sqrt(squares / (n - 1)) if n > 1 else 0.0, abs=1e-3)
