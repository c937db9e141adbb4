"""ReMax: sample 0 of each group is greedy, and the others are compared with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testkit import ZERO_VARIANCE, config, sealed
from testkit.planning import plan, ready
from testkit.runs.folds import DEADLINE, abandoned, died, fold, key, opened, samples, seals
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import GroupDropped, RefillWanted
from turnstream.batching.scoring.filters import is_compared, is_masked
from turnstream.errors import BatchingError
from turnstream.types import Denominators, Event, Status, TrajectoryState

REMAX = replace(config(), estimator="remax")
SHORT = replace(REMAX, deadline_policy="train_short", group_deadline_s=60)
REFILL = replace(REMAX, deadline_policy="refill", max_refills=2)
LEAVING_OUT = replace(REMAX, mask_truncated=True, masked_reward="leave_out")


def test_greedy_sample_is_compared_and_in_no_denominator() -> None:
    manifest = plan(ready("a", rewards=[0.5, 1.0, 0.0]), of=REMAX)

    planned = manifest.groups[0].trajectories
    assert [t.advantage for t in planned] == [0.0, 0.5, -0.5]
    assert [t.reward for t in planned] == [0.5, 1.0, 0.0]
    assert [t.is_masked for t in planned] == [True, False, False]
    assert [t.sequences[0].num_trained_tokens for t in planned] == [0, 3, 3]
    assert (planned[0].oldest_version, planned[0].newest_version) == (None, None)
    assert manifest.mini_batches[0].num_rows == 3
    assert manifest.mini_batches[0].denominators == Denominators(6, 2, 2, 1, 2.0, 0)


def test_only_sample_zero_of_a_run_with_remax_is_greedy() -> None:
    assert is_masked(sealed(), REMAX)
    assert is_masked(sealed(attempt=1), REMAX)
    assert not is_masked(sealed(sample=1), REMAX)
    assert not is_masked(sealed(), config())
    with pytest.raises(BatchingError, match="group 'a' has no greedy sample 0, with which"):
        plan(ready("a", sealed("a", sample=1), sealed("a", sample=2)), of=REMAX)


def test_group_waits_for_its_greedy_sample_and_one_to_compare() -> None:
    events = [opened(4, 2), *seals(1, 3)]
    of_one = [opened(3, 1), *seals(0)]

    decided = [fold([*events, *seals(0)], REMAX)[0], fold([*of_one, *seals(2)], REMAX)[0]]
    other, _ = fold(events)
    alone, [drop] = fold([opened(1), *seals(0)], REMAX)

    for waiting, _ in (fold(events, REMAX), fold(of_one, REMAX)):
        assert (samples(waiting), waiting.num_open_groups) == ([], 1)
    assert [samples(each) for each in decided] == [[[0, 1, 3]], [[0, 2]]]
    assert samples(other) == [[1, 3]]
    assert (alone.num_open_groups, drop.state) == (0, TrajectoryState.INCOMPLETE)
    assert drop.reason == "1 valid members, and 2 are needed to compare"


def test_complete_greedy_sample_is_compared_where_masked_ones_are_left_out() -> None:
    folded, _ = fold([opened(3), *seals(0, 1, 2)], LEAVING_OUT)

    assert is_compared(sealed(), LEAVING_OUT)
    assert samples(folded) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("events", "of"),
    [
        ([opened(3, 2), abandoned(0), *seals(1, 2)], REMAX),
        ([opened(3, 2), *seals(0, 1, 2), died(0)], replace(REMAX, surplus="keep")),
        ([opened(3, 2), *seals(1, 2), DEADLINE], SHORT),
        ([opened(3), *seals(1, 2), sealed(status=Status.TRUNCATED)], LEAVING_OUT),
    ],
    ids=["abandoned", "dead", "deadline", "left out"],
)
def test_group_without_a_greedy_sample_is_incomplete(
    events: list[Event], of: BatchingConfig
) -> None:
    folded, decided = fold(events, of)

    assert (folded.num_ready, folded.num_open_groups) == (0, 0)
    assert decided[-1].state == TrajectoryState.INCOMPLETE
    assert decided[-1].reason == "no valid greedy sample 0 to compare with"


def wanted(number: int, sample: int) -> RefillWanted:
    return RefillWanted(key=key(sample, 1), prompt_uid="uid of g0", number=number)


@pytest.mark.parametrize(
    ("events", "asked"),
    [
        ([opened(4, 2), *seals(1), abandoned(0)], [wanted(1, sample=0)]),
        ([opened(4, 2), *seals(1), abandoned(2)], []),
        ([opened(4, 3), *seals(1, 2, 3), DEADLINE], [wanted(1, sample=0)]),
        ([opened(4, 3), abandoned(3), *seals(1, 2), DEADLINE], [wanted(1, sample=0)]),
        ([opened(4, 4), abandoned(3), *seals(1, 2), DEADLINE], [wanted(1, 3), wanted(2, 0)]),
        ([opened(4, 2), *seals(0, 1), DEADLINE], []),
    ],
    ids=["lost", "spared", "hangs", "before an ended one", "both", "decided"],
)
def test_greedy_sample_is_refilled_and_never_spared(
    events: list[Event], asked: list[RefillWanted]
) -> None:
    _, decided = fold(events, REFILL)

    assert [each for each in decided if isinstance(each, RefillWanted)] == asked


@pytest.mark.parametrize(("rewards", "num_ready"), [((1.0, 1.0), 0), ((1.0, 0.0), 1)])
def test_one_trained_member_is_enough_for_the_filter_of_equal_rewards(
    rewards: tuple[float, float], num_ready: int
) -> None:
    members = [sealed(sample=sample, reward=reward) for sample, reward in enumerate(rewards)]

    folded, _ = fold([opened(), *members], replace(REMAX, group_filters=ZERO_VARIANCE))

    assert folded.num_ready == num_ready


def test_ready_group_without_a_greedy_sample_ends_when_the_run_is_revised() -> None:
    folded, _ = fold([opened(3, 2), *seals(1, 2)])

    (drop,) = folded.revise("9-0", REMAX)

    assert isinstance(drop, GroupDropped)
    assert (folded.num_ready, drop.reason) == (0, "no valid greedy sample 0 to compare with")
