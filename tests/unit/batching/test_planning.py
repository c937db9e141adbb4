from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from testkit import config, sealed, shape, turn
from testkit.planning import plan, ready, rows_of, stored_group
from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.layouts.padded import left_padded
from turnstream.batching.merge.plan import PLAIN_ASSEMBLY_VERSION, SequenceShape
from turnstream.batching.planning.plan_batch import num_groups_to_plan
from turnstream.batching.rows.assemble import concatenate_rows
from turnstream.errors import BatchingError
from turnstream.types import Denominators, Status


def test_a_manifest_says_which_batch_it_is() -> None:
    manifest = plan(ready("a", rewards=[1, 0]), revision=1)

    assert (manifest.run, manifest.step, manifest.revision) == ("run", 3, 1)
    assert (manifest.lineage, manifest.previous_hash) == ("main", "ab")
    assert (manifest.config_revision, manifest.assembly_version) == (2, PLAIN_ASSEMBLY_VERSION)
    assert [(group.group_id, group.prompt_uid) for group in manifest.groups] == [("a", "uid")]
    assert [t.status for t in manifest.groups[0].trajectories] == [Status.COMPLETED] * 2


def test_last_event_is_the_latest_or_that_of_the_choice() -> None:
    events = ["99-0", "100-0", "100-10", "100-9"]

    groups = [ready(str(i), rewards=[1, 0], event=e) for i, e in enumerate(events)]

    assert plan(*groups).last_event_id == "100-10"
    assert plan(*groups, chosen_at="101-0").last_event_id == "101-0"


def test_a_trajectory_is_planned_with_its_rows_and_its_advantage() -> None:
    turns = [shape(2, 3), shape(1, 2, parent=0, shared=5, trained=1), shape(4, 1)]
    member = sealed("a", reward=1.0, turns=turns, version=7, has_logprobs=True)

    manifest = plan(ready("a", member, sealed("a", sample=1, reward=0.0)))

    planned = manifest.groups[0].trajectories[0]
    assert planned.sequences == (SequenceShape((0, 1), 2, 8, 4), SequenceShape((2,), 4, 5, 1))
    assert (planned.reward, planned.weights, planned.num_turn_tokens) == (1.0, (1, 1), 18)
    assert (planned.oldest_version, planned.newest_version) == (7, 7)
    assert (planned.has_logprobs, planned.payload_crcs) == (True, (1, 2, 3))
    assert planned.advantage == float(np.float32(planned.advantage))
    assert planned.advantage == pytest.approx(0.707106, abs=2e-6)
    apart = plan(ready("a", member), of=replace(config(), merge=False))
    assert [row.turns for row in apart.groups[0].trajectories[0].sequences] == [(0,), (1,), (2,)]


def test_case_30_mini_batches_are_cut_by_group_with_any_rows() -> None:
    # Groups of 4, 2, 3 and 2 rows, two groups each: rows (0, 6) and (6, 11), here from row 3 on.
    groups = [ready(f"p{i}", rewards=[1.0] * n) for i, n in enumerate([4, 2, 3, 2])]

    manifest = plan(*groups, of=config(4, 2), first_row_id=3)

    cuts = [(m.first_row_id, m.first_row_id + m.num_rows) for m in manifest.mini_batches]
    assert cuts == [(3, 9), (9, 14)]
    assert [(m.first_group, m.num_groups) for m in manifest.mini_batches] == [(0, 2), (2, 2)]
    assert manifest.end_row_id == 14


@pytest.mark.parametrize(
    ("num_ready", "is_final", "expected"),
    [(4, False, 4), (9, False, 4), (3, False, 0), (3, True, 3), (9, True, 4), (0, True, 0)],
)
def test_takes_a_whole_batch_or_at_the_end_what_is_left(
    num_ready: int, is_final: bool, expected: int
) -> None:
    assert num_groups_to_plan(num_ready, config(4), is_final=is_final) == expected


def test_denominators_count_what_is_trained_and_nothing_else() -> None:
    nothing = shape(2, 3, trained=0)
    members = [
        sealed("a", reward=1.0, turns=[shape(2, 3), nothing]),
        sealed("a", sample=1, reward=0.0, turns=[nothing]),
    ]
    masked = [sealed("b", sample=s, reward=float(s), turns=[nothing]) for s in (0, 1)]
    of = replace(config(2), aggregation="constant", length_constant=8)

    manifest = plan(ready("a", *members), ready("b", *masked), of=of)

    assert manifest.mini_batches[0].denominators == Denominators(3, 1, 1, 1, 1.0, 8)


@pytest.mark.parametrize(
    ("row_weights", "weights", "weight_sum"),
    [
        ("per_row", [(1, 1, 1), (1,)], 3.0),
        ("per_trajectory", [(0.5, 0.5, 0), (1,)], 2.0),
        ("rollout_mean", [(0.75, 0.25, 0), (1,)], 2.0),
    ],
)
def test_the_run_says_what_the_rows_of_a_trajectory_weigh(
    row_weights: Any, weights: list[Any], weight_sum: float
) -> None:
    turns = [shape(2, 3), shape(2, 1), shape(2, 2, trained=0)]
    members = [sealed("a", turns=turns), sealed("a", sample=1, reward=0.0)]
    of = replace(config(), aggregation="seq_mean_token_mean", row_weights=row_weights)

    manifest = plan(ready("a", *members), of=of)

    assert [t.weights for t in manifest.groups[0].trajectories] == weights
    assert manifest.mini_batches[0].denominators.weight_sum == weight_sum
    thirds = [sealed("a", sample=s, reward=float(s), turns=turns[1:2] * 3) for s in (0, 1)]
    manifest = plan(ready("a", *thirds), of=replace(of, row_weights="per_trajectory"))
    third = float(np.float32(1 / 3))  # as a column of float32 has it
    assert manifest.groups[0].trajectories[0].weights == (third,) * 3
    assert manifest.mini_batches[0].denominators.weight_sum == math.fsum([third] * 6)


def test_case_35_a_split_trajectory_is_compared_once_and_its_advantage_broadcast() -> None:
    # Rows of trajectory 1 with masks 111 and 001 and a last reward of 1; trajectory 2, 011, 0.
    episodes = [turn("a", "BCD"), turn("x", "yzU")], [turn("a", "bCD")]
    group, payload = stored_group(*episodes, rewards=[1.0, 0.0])
    expected = np.array([[0.5, 0.5, 0.5], [0, 0, 0.5], [0, -0.5, -0.5]])

    for estimator, scale in (("dr_grpo", 1.0), ("grpo", 1.4142)):
        manifest = plan(group, of=replace(config(), estimator=estimator))
        batch = rows_of(manifest.groups, payload)
        padded = left_padded(batch, width=4, response_width=3, pad_token_id=0)
        np.testing.assert_allclose(padded.advantages_BR, expected * scale, atol=2e-5)
        # Row by row the baseline would be 2/3: the reference takes the last rows alone.
        assert manifest.mini_batches[0].denominators == Denominators(6, 3, 2, 1, 3.0, 0)


def test_every_mini_batch_has_its_own_widths_rows_and_denominators() -> None:
    # The reference sends the lists of the whole batch along with each part.
    groups = [
        ready("a", sealed("a", turns=[shape(2, 3)]), sealed("a", sample=1, turns=[shape(1, 1)])),
        ready("b", sealed("b", turns=[shape(4, 9)]), sealed("b", sample=1, turns=[shape(9, 1)])),
    ]

    first, second = plan(*groups, of=config(2, 1)).mini_batches

    assert (first.width, first.response_width, first.num_rows) == (5, 3, 2)
    assert (second.width, second.response_width, second.num_rows) == (13, 9, 2)
    assert first.denominators == Denominators(4, 2, 2, 1, 2.0, 0)
    assert second.denominators == Denominators(10, 2, 2, 1, 2.0, 0)


def test_case_10_no_rows_are_no_batch() -> None:
    with pytest.raises(BatchingError, match="a batch of no groups"):
        plan(of=config())
    with pytest.raises(BatchingError, match="no rows to concatenate"):
        concatenate_rows([])


MASKING = replace(config(), mask_truncated=True)
CUT_OFF = [
    sealed("a", reward=1.0),
    sealed("a", sample=1, reward=0.0),
    sealed("a", sample=2, reward=-1.0, status=Status.TRUNCATED, version=4),
]


@pytest.mark.parametrize(
    ("masked_reward", "advantages"),
    [("keep", [1.0, 0.0, -1.0]), ("leave_out", [0.707106, -0.707106, 0.0])],
)
def test_masked_trajectory_is_in_no_denominator_and_in_the_baseline_only_if_configured(
    masked_reward: Any, advantages: list[float]
) -> None:
    manifest = plan(ready("a", *CUT_OFF), of=replace(MASKING, masked_reward=masked_reward))

    planned = manifest.groups[0].trajectories
    assert [t.advantage for t in planned] == pytest.approx(advantages, abs=2e-6)
    assert [t.reward for t in planned] == [1.0, 0.0, -1.0]
    assert [t.is_masked for t in planned] == [False, False, True]
    assert [t.sequences[0].num_trained_tokens for t in planned] == [3, 3, 0]
    assert (planned[2].oldest_version, planned[2].newest_version) == (None, None)
    assert manifest.mini_batches[0].num_rows == 3
    assert manifest.mini_batches[0].denominators == Denominators(6, 2, 2, 1, 2.0, 0)


def compared(*rewards: float, lengths: Sequence[int] = (), **fields: Any) -> ReadyGroup:
    """Return a group of these rewards; the response of its last member was truncated."""
    statuses = [Status.COMPLETED] * (len(rewards) - 1) + [Status.TRUNCATED]
    members = [
        sealed("a", sample=s, reward=r, turns=[shape(2, n)], status=status, **fields)
        for s, (r, n, status) in enumerate(
            zip(rewards, lengths or [3] * len(rewards), statuses, strict=True)
        )
    ]
    return ready("a", *members)


SPLIT = [shape(2, 3), shape(4, 1), shape(3, 2)]


@pytest.mark.parametrize(
    ("settings", "groups", "expected"),
    [
        (
            {"estimator": "reinforce_pp"},
            [ready("a", rewards=[1]), ready("b", rewards=[0])],
            [1, -1],
        ),
        ({"estimator": "pass_at_k", "pass_k": 2}, [ready("a", rewards=[1, 0, 0])], [2, 0, 0]),
        (
            {"estimator": "gae", "singleton_advantage": "raw"},
            [ready("a", rewards=[0, 1]), ready("b", rewards=[5])],
            [0, 0, 0],
        ),
        (
            {"estimator": "dr_grpo", "normalize_advantages": "batch"},
            [ready("a", rewards=[1, 0]), ready("b", rewards=[4, 0])],
            [0.342997, -0.342997, 1.371989, -1.371989],  # over the standard deviation 1.457738
        ),
        (
            {"estimator": "remax", "normalize_advantages": "batch"},
            [
                ready(
                    "a",
                    sealed("a", reward=0.5, turns=[shape(2, 99)]),  # greedy, and in no mean
                    sealed("a", sample=1, reward=1.0),
                    sealed("a", sample=2, reward=0.0),
                )
            ],
            [0, 1, -1],
        ),
        # Row-wise the mean of a trajectory of three rows and one of one row would be 0.75.
        (
            {"estimator": "dr_grpo"},
            [ready("a", sealed("a", turns=SPLIT), sealed("a", sample=1, reward=0.0))],
            [0.5, -0.5],
        ),
        (
            {"estimator": "opo", "baseline_weight": "energy"},
            [
                ready(
                    "a",
                    sealed("a", metrics={"energy": 3.0}),
                    sealed("a", sample=1, reward=0.0, metrics={"energy": 1.0}),
                )
            ],
            [0.25, -0.75],
        ),
        # Whitening leaves masked tokens out; a baseline counts the length of a masked response.
        ({"estimator": "reinforce_pp"}, [compared(1, 0, -1)], [1, -1, -3]),
        ({"estimator": "opo"}, [compared(0, 1, lengths=[1, 3])], [-0.75, 0.25]),
        # Of the baseline 0.625 one token has -0.625, three 0.375: mean 0.125, variance 0.1875.
        (
            {"estimator": "opo", "normalize_advantages": "batch"},
            [compared(0, 1, 0.5, lengths=[1, 3, 4])],
            [-0.75 / 0.1875**0.5, 0.25 / 0.1875**0.5, -0.25 / 0.1875**0.5],
        ),
        # DAPO's vector: of 20,480 tokens the last 4,096 are punished, and 18,432 cost half a point.
        (
            {"estimator": "dr_grpo", "overlong_length": 20_480, "overlong_buffer": 4_096},
            [compared(1, 1, lengths=[18_432, 3])],
            [-0.25, 0.25],
        ),
    ],
)
def test_advantages_follow_the_settings_of_the_run(
    settings: dict[str, Any], groups: list[ReadyGroup], expected: list[float]
) -> None:
    of = replace(config(len(groups), 1), mask_truncated=True, **settings)

    manifest = plan(*groups, of=of)

    advantages = [t.advantage for group in manifest.groups for t in group.trajectories]
    assert advantages == pytest.approx(expected, abs=2e-6)
    assert all(x == float(np.float32(x)) for x in advantages)
    if of.overlong_buffer:
        assert [t.reward for t in manifest.groups[0].trajectories] == [0.5, 1.0]


def test_components_are_compared_one_by_one() -> None:
    of = replace(config(), estimator="gdpo", component_weights=(("a", 1.0), ("b", 1.0)))
    components = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"b": 1.0, "a": 1.0}]
    members = [
        replace(sealed("a", sample=s), reward_components=c) for s, c in enumerate(components)
    ]

    manifest = plan(ready("a", *members), of=of)

    first, second, third = [t.advantage for t in manifest.groups[0].trajectories]
    assert first == second < 0 < third


def test_tokens_of_masked_versions_leave_the_rows_and_the_denominators() -> None:
    turns = [shape(2, 3), shape(1, 2, parent=0, shared=5), shape(4, 1)]
    mixed = sealed("a", turns=turns, turn_versions=[[(1, 2), (3, 1)], [(3, 2)], [(1, 1)]])

    manifest = plan(
        ready("a", mixed, sealed("a", sample=1, reward=0.0, version=1)), masked_versions=(1,)
    )

    first, second = manifest.groups[0].trajectories
    assert manifest.masked_versions == (1,)
    assert [row.num_trained_tokens for row in first.sequences] == [3, 0]
    assert (first.is_masked, first.oldest_version, first.newest_version) == (False, 3, 3)
    assert (second.is_masked, second.sequences[0].num_trained_tokens) == (True, 0)
    assert manifest.mini_batches[0].denominators == Denominators(3, 1, 1, 1, 1.0, 0)
    assert [t.advantage for t in (first, second)] == pytest.approx([0.7071, -0.7071], abs=1e-4)
