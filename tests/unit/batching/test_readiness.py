from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import pytest

from testkit import ZERO_VARIANCE, config, sealed, shape
from testkit.runs.folds import abandoned, apply, died, fold, key, opened, samples, seals
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.readiness import RunFold
from turnstream.errors import InvalidTurnError
from turnstream.records.events import decode_event, encode_event
from turnstream.types import (
    Event,
    Purpose,
    RunClosed,
    SealedTrajectory,
    Status,
    TrajectoryKey,
    TrajectoryState,
)

CONFIG = config()
FILTER = replace(CONFIG, group_filters=ZERO_VARIANCE)
GDPO = replace(CONFIG, estimator="gdpo", component_weights=(("a", 1.0), ("b", 1.0)))
INCOMPLETE, FILTERED = TrajectoryState.INCOMPLETE, TrajectoryState.FILTERED
SURPLUS = TrajectoryState.SURPLUS


def of_components(sample: int, *, group_id: str = "g0", **components: float) -> SealedTrajectory:
    return replace(sealed(group_id, sample=sample), reward_components=components)


@pytest.mark.parametrize(
    ("events", "members", "completed_by"),
    [
        ([opened(), *seals(1, 0)], [key(0), key(1)], "2-0"),
        ([opened(3), *seals(0), abandoned(1), *seals(2)], [key(0), key(2)], "3-0"),
        ([opened(3), *seals(0, 1, 2), died(1)], [key(0), key(2)], "4-0"),
        ([opened(), *seals(0), died(0), sealed(attempt=1), *seals(1)], [key(0, 1), key(1)], "4-0"),
    ],
    ids=["every sample", "one abandoned", "a member dies later", "another attempt after a death"],
)
def test_group_is_ready_when_no_sample_is_missing(
    events: list[Event], members: list[TrajectoryKey], completed_by: str
) -> None:
    before, _ = fold(events[:-1])
    folded, decided = fold(events)

    (group,) = folded.ready
    assert decided == []
    assert (group.group_id, group.prompt_uid, group.completed_by) == (
        "g0",
        "uid of g0",
        completed_by,
    )
    assert [member.key for member in group.members] == members
    assert before.ready != folded.ready


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([*seals(0), abandoned(1)], [0]),
        ([abandoned(0), abandoned(1)], []),
        ([*seals(0, 1), died(1)], [0]),
        ([*seals(0), died(0), *seals(1)], [1]),
    ],
)
def test_group_with_too_few_members_is_incomplete(events: list[Event], left: list[int]) -> None:
    folded, (drop,) = fold([opened(), *events])

    assert folded.ready == ()
    assert (drop.group_id, drop.state, drop.keys) == ("g0", INCOMPLETE, tuple(map(key, left)))
    assert drop.reason == f"{len(left)} valid members, and 2 are needed to compare"


@pytest.mark.parametrize(
    ("before", "late", "reason"),
    [
        (seals(0, 1), sealed(attempt=1), "its group was decided before it was sealed"),
        (seals(0, 1), sealed(sample=9), "its group was decided before it was sealed"),
        (seals(0), sealed(attempt=1), "sample 0 was sealed by another attempt before"),
        (seals(0), sealed(sample=2), "sample 2 of 2"),
    ],
)
def test_seal_without_a_place_is_surplus(
    before: list[Event], late: SealedTrajectory, reason: str
) -> None:
    _, (drop,) = fold([opened(), *before, late])

    assert (drop.state, drop.key, drop.reason) == (SURPLUS, late.key, reason)
    _, (drop,) = fold([sealed("nowhere")])
    assert (drop.state, drop.reason) == (INCOMPLETE, "its group was never opened")


@pytest.mark.parametrize(
    ("of", "unusable", "reason"),
    [
        *[
            (CONFIG, sealed(sample=2, reward=number), f"has a reward of {number}")
            for number in (math.nan, math.inf, -math.inf, 1e31)
        ],
        (CONFIG, sealed(sample=2, turns=[]), "has no turn"),
        (
            replace(CONFIG, error_trajectories="keep"),
            replace(sealed(sample=2, turns=[]), status=Status.ERROR, awaits_reward=True),
            "has no turn",
        ),
        (
            CONFIG,
            sealed(sample=2, reward=None),
            "has no reward, which reward_source='outcome' needs",
        ),
        (
            replace(CONFIG, estimator="maxrl"),
            sealed(sample=2, reward=-1.0),
            "has a reward of -1.0, and maxrl divides by the mean reward",
        ),
        (GDPO, of_components(2, a=1.0), "has no reward component 'b'"),
        (
            replace(CONFIG, estimator="gae"),
            sealed(sample=2, turns=[shape(), shape(4, 2, parent=0, shared=3)]),
            "has 2 rows, and estimator='gae' needs all its turns in one",
        ),
    ],
)
def test_member_that_cannot_be_compared_is_incomplete_with_the_reason(
    of: BatchingConfig, unusable: SealedTrajectory, reason: str
) -> None:
    members = [of_components(sample, a=1.0, b=0.0) for sample in (0, 1)]

    folded, (drop,) = fold([opened(3), *members, unusable], of)

    assert samples(folded) == [[0, 1]]
    assert (drop.state, drop.key) == (INCOMPLETE, key(2))
    assert drop.reason == f"sample 2 {reason}"


@pytest.mark.parametrize(
    ("trained", "rewards", "is_kept"),
    [
        ([3, 3], [1, 1], False),
        ([3, 0], [1, 1], True),
        ([0, 0], [1, 0], False),  # no token is trained
        ([3, 3, 0], [1, 1, 1], False),
        ([3, 3, 0], [1, 1, 0], True),
    ],
)
def test_case_40_equal_rewards_are_filtered_with_two_live_members(
    trained: list[int], rewards: list[float], is_kept: bool
) -> None:
    members = [
        sealed(sample=s, reward=reward, turns=[shape(trained=0), shape(trained=count)])
        for s, (count, reward) in enumerate(zip(trained, rewards, strict=True))
    ]

    folded, _ = fold([opened(len(members)), *members], FILTER)
    plain, drops = fold([opened(len(members)), *members], replace(FILTER, group_filters=()))

    assert folded.num_ready == is_kept
    assert plain.num_ready == any(trained)
    assert [drop.reason for drop in drops] == ["none of its tokens is trained"] * (not any(trained))


def test_closed_run_is_final_once_no_group_is_open() -> None:
    folded, _ = fold([opened(group_id="a"), opened(group_id="b"), *seals(0, 1, group_id="a")])
    apply(folded, RunClosed(), first=9)
    before = folded.is_final

    apply(folded, abandoned(0, group_id="b"), abandoned(1, group_id="b"), first=10)

    assert (before, folded.is_final) == (False, True)


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("num_samples", [1025, 2**32 - 1])
def test_fold_refuses_groups_above_max_samples(purpose: Purpose, num_samples: int) -> None:
    # A raw event with 2^32 - 1 samples was taken in, and at the first sample that ended the list of
    # pending samples grew to 23 GB.
    folded = RunFold(CONFIG)
    event = decode_event(encode_event(opened(num_samples, purpose=purpose)))
    tracemalloc.start()

    with pytest.raises(InvalidTurnError) as refused:
        folded.apply("1-0", event)
    folded.apply("2-0", abandoned(0))

    assert str(refused.value) == (
        f"num_samples: group 'g0' has {num_samples} samples, above max_samples=1024 of the run"
    )
    assert folded.state.groups == {}
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_fold_keeps_open_groups_above_a_lowered_limit() -> None:
    folded, _ = fold([opened(1024)])

    folded.revise("2-0", replace(CONFIG, max_samples=4))
    folded.apply("1-0", opened(1024))

    assert list(folded.state.groups) == ["g0"]
