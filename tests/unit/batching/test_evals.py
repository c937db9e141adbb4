from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed, shape
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.evals import MAX_OPEN_RESULTS
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.scoring.rewards import MAX_REWARD
from turnstream.types import (
    DeadlineFired,
    EvalGroup,
    Event,
    GroupOpened,
    Purpose,
    RewardPosted,
    Spread,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)

CONFIG = config()
GDPO = dataclasses.replace(
    CONFIG, estimator="gdpo", component_weights=(("format", 1.0), ("result", 2.0))
)
REFILLED = BatchingConfig(
    batch_groups=1,
    mini_batch_groups=1,
    group_deadline_s=9.0,
    deadline_policy="refill",
    max_refills=3,
)


def opened(group_id: str = "e", num_samples: int = 2, purpose: Purpose = Purpose.EVAL) -> Event:
    return GroupOpened(
        group_id=group_id, prompt_uid=f"uid {group_id}", num_samples=num_samples, purpose=purpose
    )


def abandoned(sample: int) -> Event:
    return TrajectoryAbandoned(key=TrajectoryKey("e", sample), reason="lease")


def fold(events: Iterable[Event], of: BatchingConfig = CONFIG) -> tuple[RunFold, list[Any]]:
    state = RunFold(of)
    decided = [each for i, event in enumerate(events) for each in state.apply(f"{i}-0", event)]
    return state, decided


def awaiting(sample: int) -> Event:
    return dataclasses.replace(sealed("e", sample=sample, reward=None), awaits_reward=True)


def test_a_group_ends_when_each_sample_is_sealed_and_is_never_ready() -> None:
    events = [opened(), sealed("e", sample=1, reward=0.0, version=7), sealed("e", version=7)]

    state, (ended,) = fold(events)

    assert ended.keys == (TrajectoryKey("e", 0), TrajectoryKey("e", 1))
    assert ended.result == EvalGroup(
        group_id="e",
        prompt_uid="uid e",
        version=7,
        num_trajectories=2,
        num_lost=0,
        reward=Spread(num=2, mean=0.5, squares=0.5),
        best=1.0,
    )
    assert (state.num_ready, state.num_open_groups, list(state.waiting())) == (0, 0, [])


@pytest.mark.parametrize(
    "end",
    [
        abandoned(1),
        TrajectoryDied(key=TrajectoryKey("e", 1), reason="checksum"),
        DeadlineFired(group_id="e"),
    ],
)
def test_a_sample_that_ends_otherwise_is_lost_and_never_refilled(end: Event) -> None:
    _, (ended,) = fold([opened(), sealed("e", reward=0.5), end], REFILLED)

    assert (ended.result.num_trajectories, ended.result.num_lost) == (1, 1)
    assert ended.result.best == 0.5


def test_a_group_of_which_nothing_was_sealed_ends_without_a_result() -> None:
    _, (ended,) = fold([opened(), abandoned(0), abandoned(1)])

    assert (ended.keys, ended.result, ended.total) == ((), None, None)


def test_a_member_that_proves_dead_is_lost() -> None:
    dead = TrajectoryDied(key=TrajectoryKey("e", 0), reason="checksum")

    _, (ended,) = fold([opened(), sealed("e"), dead, sealed("e", sample=1)])

    assert ended.keys == (TrajectoryKey("e", 1),)


def test_a_group_counts_for_the_oldest_version_that_sampled_any_of_it() -> None:
    mixed = sealed("e", sample=1, turn_versions=[[(5, 1), (8, 2)]])

    _, (ended,) = fold([opened(), sealed("e", version=6), mixed])

    assert (ended.result.version, ended.total.version) == (5, 5)


def test_a_version_sums_up_its_groups() -> None:
    first = [sealed("e", reward=1.0, version=3, metrics={"turns": 2}), abandoned(1)]
    second = [
        sealed("f", reward=0.0, version=3, metrics={"turns": 4}),
        sealed("f", sample=1, reward=0.5, version=3, tags={"env": "maze"}),
    ]

    _, decided = fold([opened(), opened("f"), *first, *second])

    total = decided[-1].total
    assert (total.num_groups, total.num_trajectories, total.num_lost) == (2, 3, 1)
    assert (total.reward.mean, total.reward.std) == (0.5, pytest.approx(0.5))
    assert (total.best.num, total.best.mean) == (2, 0.75)
    assert total.figures.metrics["turns"].mean == 3.0
    assert total.figures.tags["env"].values["maze"].reward_mean == 0.5


def test_a_trajectory_without_a_reward_counts_with_its_labels_alone() -> None:
    _, (ended,) = fold([opened("e", 1), sealed("e", reward=None, metrics={"turns": 2})])

    assert (ended.result.num_trajectories, ended.result.reward, ended.result.best) == (
        *(1, Spread()),
        None,
    )
    assert ended.total.figures.metrics["turns"].total == 2


def test_a_reward_may_come_later_or_not_at_all() -> None:
    posted = RewardPosted(key=TrajectoryKey("e", 0), reward=0.25)
    missed = DeadlineFired(group_id="e", awaited=TrajectoryKey("e", 1))

    _, (ended,) = fold([opened(), awaiting(0), awaiting(1), posted, missed])

    assert (ended.result.num_trajectories, ended.result.best) == (2, 0.25)


def test_a_reward_that_no_seal_awaits_changes_nothing() -> None:
    posted = [RewardPosted(key=TrajectoryKey("e", sample), reward=9.0) for sample in (0, 1)]

    _, (ended,) = fold([opened(), sealed("e", reward=0.5), *posted, abandoned(1)])

    assert (ended.result.num_trajectories, ended.result.best) == (1, 0.5)


def test_posted_reward_is_added_to_the_sealed_one() -> None:
    said = dataclasses.replace(
        sealed("e", reward=0.75), awaits_reward=True, reward_components={"format": 0.5}
    )
    posted = RewardPosted(key=said.key, reward=None, reward_components={"result": 0.25})

    _, (by_outcome,) = fold([opened("e", 1), said, posted])
    _, (by_components,) = fold([opened("e", 1), said, posted], GDPO)

    assert by_outcome.result.best == 0.75
    assert by_components.result.best == 0.5 + 2 * 0.25


def test_seal_after_the_end_is_surplus_and_changes_nothing() -> None:
    end, late = DeadlineFired(group_id="e"), sealed("e", sample=1)
    rest = [RewardPosted(key=TrajectoryKey("e", 1), reward=1.0), abandoned(1), end]

    state, (ended, dropped) = fold([opened(), sealed("e"), end, late, late, *rest])

    assert ended.result.num_trajectories == 1
    assert (dropped.key, dropped.state) == (TrajectoryKey("e", 1), TrajectoryState.SURPLUS)
    assert state.decided == ("e",)
    state.forget(["e"])
    assert state.decided == ()


def test_another_attempt_of_a_sealed_sample_is_surplus() -> None:
    _, decided = fold([opened(), sealed("e"), sealed("e", attempt=1), sealed("e", sample=7)])

    assert [each.state for each in decided] == [TrajectoryState.SURPLUS] * 2


def test_the_end_of_another_attempt_loses_no_member() -> None:
    other = TrajectoryDied(key=TrajectoryKey("e", 0, 1), reason="checksum")

    _, (ended,) = fold([opened(), sealed("e"), other, sealed("e", sample=1)])

    assert (len(ended.keys), ended.result.num_lost) == (2, 0)


def test_unrequested_sample_is_surplus_even_if_abandoned_before() -> None:
    stranger = sealed("e", sample=7)

    _, (dropped,) = fold([opened(), abandoned(7), stranger])

    assert (dropped.key, dropped.state) == (stranger.key, TrajectoryState.SURPLUS)


def test_repeated_event_changes_nothing() -> None:
    once = [opened(), sealed("e", reward=1.0), sealed("e", sample=1, reward=0.0)]
    twice = [each for event in once for each in (event, event)]

    assert fold(twice)[1] == fold(once)[1]


def test_repeated_opening_restarts_nothing() -> None:
    first, second = sealed("e", reward=1.0), sealed("e", sample=1, reward=0.0)

    state, (ended,) = fold([opened(), first, opened(), second, opened()])

    assert ended.keys == (first.key, second.key)
    assert state.num_open_groups == 0
    assert state.decided == ("e",)
    assert state.evaluating == ()


def test_versions_beyond_those_that_may_grow_are_final() -> None:
    newer = range(1, MAX_OPEN_RESULTS + 1)
    events = [opened("old", 1), sealed("old", version=0)]
    for version in newer:
        events += [opened(f"g{version}", 1), sealed(f"g{version}", version=version)]
    late = [opened("late", 1), sealed("late", version=0)]
    newest = [opened("new", 1), sealed("new", version=MAX_OPEN_RESULTS)]

    *_, ended, grown = fold([*events, *late, *newest])[1]

    assert ended.result.version == 0
    assert ended.total is None
    assert grown.total.num_groups == 2


def test_components_are_weighed_as_the_run_weighs_them() -> None:
    full = dataclasses.replace(
        sealed("e", reward=None), reward_components={"format": 0.5, "result": 0.25}
    )

    _, (ended,) = fold([opened(), full, sealed("e", sample=1, reward=9.0)], GDPO)

    assert ended.result.best == 9.0
    assert ended.result.reward.mean == 5.0


def test_where_a_component_is_missing_the_outcome_counts() -> None:
    half = dataclasses.replace(sealed("e", reward=3.0), reward_components={"format": 0.5})

    _, (ended,) = fold([opened("e", 1), half], GDPO)

    assert ended.result.best == 3.0


def test_the_reward_comes_from_the_source_of_the_run() -> None:
    of = dataclasses.replace(CONFIG, reward_source="sum_of_turns")
    turns = sealed("e", reward=None, turns=[shape(), shape()], turn_rewards=[0.25, 0.5])

    _, (ended,) = fold([opened("e", 1), turns], of)

    assert ended.result.best == 0.75


def test_a_reward_beyond_every_number_is_none() -> None:
    _, (ended,) = fold([opened("e", 1), sealed("e", reward=2 * MAX_REWARD)])

    assert (ended.result.num_trajectories, ended.result.best) == (1, None)


def test_training_events_decide_the_same_with_evaluations_in_between() -> None:
    training = [
        opened("a", purpose=Purpose.TRAIN),
        sealed("a"),
        opened("b", purpose=Purpose.TRAIN),
        sealed("a", sample=1, reward=0.0),
        sealed("b"),
    ]
    evaluation = [opened(), sealed("e"), abandoned(1), opened("f"), DeadlineFired(group_id="f")]

    alone, mixed = RunFold(CONFIG), RunFold(CONFIG)
    for number, (event, beside) in enumerate(zip(training, evaluation, strict=True)):
        alone.apply(f"{number}-0", event)
        mixed.apply(f"{number}-0", event)
        mixed.apply(f"{number}-1", beside)

    assert mixed.ready == alone.ready
    assert mixed.num_open_groups == alone.num_open_groups == 1


@given(st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_spread_has_mean_and_deviation_of_its_numbers(numbers: list[float]) -> None:
    spread = Spread()
    for number in numbers:
        spread = spread.with_number(number)

    n = len(numbers)
    mean = math.fsum(numbers) / n if n else 0.0
    squares = math.fsum((number - mean) ** 2 for number in numbers)
    assert spread.num == n
    assert spread.mean == pytest.approx(mean, abs=1e-6)
    assert spread.std == pytest.approx(math.sqrt(squares / (n - 1)) if n > 1 else 0.0, abs=1e-3)
