from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.config.values import Estimator
from turnstream.batching.scoring.advantages import GroupOutcomes, gigpo, trajectory_advantages
from turnstream.errors import BatchingError, UnsupportedEstimatorError

WITHIN_A_GROUP: tuple[Estimator, ...] = (
    "grpo",
    "grpo_population",
    "grpo_leave_one_out",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "pass_at_k",
    "remax",
)


def outcomes(rewards: Sequence[Any], num_tokens: Sequence[int] | None = None) -> GroupOutcomes:
    counts = [3] * len(rewards) if num_tokens is None else num_tokens
    return GroupOutcomes(np.array(rewards, np.float64), np.array(counts, np.int64))


def estimate(estimator: Estimator, rewards: Sequence[float], **options: Any) -> list[float]:
    options = {"pass_k": 2, **options}
    (group,) = trajectory_advantages([outcomes(rewards)], estimator=estimator, **options)
    return group.tolist()


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ("grpo_population", [1, 0, 0, 1], [0.999998, -0.999998, -0.999998, 0.999998]),
        ("dr_grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [1, 0, 0, 1], [0.666667, -0.666667, -0.666667, 0.666667]),
        ("grpo_leave_one_out", [1, 0, 0, 1], [1.154699, -1.154699, -1.154699, 1.154699]),
        ("grpo", [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ("rloo", [1, 0, 0, 0], [1, -0.333333, -0.333333, -0.333333]),
        ("grpo_leave_one_out", [1, 0, 0, 0], [1, -0.577349, -0.577349, -0.577349]),
        # Squares that cancel badly: the others' std must be 0, not 1e-9.
        ("grpo_leave_one_out", [1, 0.1, 0.1, 0.1], [0.9, -0.577349, -0.577349, -0.577349]),
        ("grpo_leave_one_out", [3, 1, 0], [3.535529, -0.235702, -1.414213]),
        ("gigpo", [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ("grpo", [1, 0], [0.707106, -0.707106]),
        ("rloo", [1, 0], [1, -1]),
        ("rloo", [1, 0, 0], [1, -0.5, -0.5]),
        ("maxrl", [1, 0], [1, -1]),
        ("opo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("pass_at_k", [1, 0, 0, 1], [1.333333, 0, 0, 1.333333]),
        ("pass_at_k", [1, 0, 0, 0], [2, 0, 0, 0]),
        ("pass_at_k", [3, 1, 2], [3, 0, 1]),
        ("pass_at_k", [1, 0], [2, 0]),
        ("remax", [0.5, 1, 0, 0.5], [0, 0.5, -0.5, 0]),
    ],
)
def test_golden_vectors(estimator: Estimator, rewards: list[float], expected: list[float]) -> None:
    assert estimate(estimator, rewards) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("estimator", WITHIN_A_GROUP)
@pytest.mark.parametrize("reward", [2.0, 0.1, 0.0])
@pytest.mark.parametrize("num_members", [2, 3, 4, 7, 8])
def test_equal_rewards_give_exactly_zero(
    estimator: Estimator, reward: float, num_members: int
) -> None:
    # The mean of three times 0.1 is rounded: divided by almost 0, the difference would be no zero.
    assert estimate(estimator, [reward] * num_members) == [0.0] * num_members


@pytest.mark.parametrize("estimator", WITHIN_A_GROUP)
def test_case_37_only_member_of_a_group_gets_zero_or_its_reward(
    estimator: Estimator,
) -> None:
    # The reference gives the raw score for GRPO (.999999) and MaxRL, and 0 for RLOO.
    assert estimate(estimator, [1.0]) == [0.0]
    assert estimate(estimator, [1.0], singleton="raw") == [1.0]


def test_rewards_and_anchors_that_an_estimator_cannot_use_are_refused() -> None:
    with pytest.raises(UnsupportedEstimatorError, match=r"maxrl .* -0\.5"):
        estimate("maxrl", [1.0, -0.5])
    with pytest.raises(BatchingError, match="pass_at_k with pass_k=1: it must be at least 2"):
        estimate("pass_at_k", [1.0, 0.0], pass_k=1)
    with pytest.raises(BatchingError, match="trajectory 0 has 1 anchors for 2 turns"):
        gigpo(np.array([1.0]), turn_rewards=[np.zeros(2)], anchors=[["s"]])


def slow_pass_at_k(rewards: Sequence[float], k: int) -> list[float]:
    """Visit every subset (arXiv:2505.15201, eq. 33), times n."""
    n, k = len(rewards), min(k, len(rewards))
    gains = [0.0] * n
    for subset in itertools.combinations(range(n), k):
        for i in subset:
            others = [rewards[j] for j in subset if j != i]
            gains[i] += max(*others, rewards[i]) - max(others)
    return [n * gain / math.comb(n, k) for gain in gains]


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=9), st.integers(2, 9))
def test_pass_at_k_agrees_with_a_walk_over_all_subsets(eighths: list[int], k: int) -> None:
    rewards = [each / 8 for each in eighths]

    found = estimate("pass_at_k", rewards, pass_k=k)

    assert found == pytest.approx(slow_pass_at_k(rewards, k), rel=1e-12, abs=1e-12)


def test_pass_at_k_of_a_large_group_does_not_overflow() -> None:
    rewards = np.arange(8192) / 8192

    (found,) = trajectory_advantages(
        [outcomes(rewards.tolist())], estimator="pass_at_k", pass_k=4096
    )

    assert np.isfinite(found).all()
    assert (np.diff(found) >= 0).all()
    # k / n / C(n - 1, k - 1) times the sum of C(m, k - 1) for m below n, which is C(n, k)
    assert found[-1] == pytest.approx(1.0, rel=1e-12)


@given(
    st.sampled_from([*WITHIN_A_GROUP, "gigpo", "reinforce_pp", "reinforce_pp_baseline"]),
    st.lists(
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
)
def test_normalised_advantages_are_whitened_over_all_tokens_of_the_batch(
    estimator: Estimator, members: list[list[tuple[int, int]]]
) -> None:
    groups = [outcomes([r / 8 for r, _ in own], [count for _, count in own]) for own in members]

    raw = [group.rewards for group in groups]
    if estimator != "reinforce_pp":
        alike: Estimator = "dr_grpo" if estimator == "reinforce_pp_baseline" else estimator
        raw = trajectory_advantages(groups, estimator=alike, pass_k=2)
    found = trajectory_advantages(groups, estimator=estimator, pass_k=2, normalize="batch")

    counts = [count for own in members for _, count in own]
    flat = np.concatenate(raw).tolist()
    tokens = [x for x, count in zip(flat, counts, strict=True) for _ in range(count)]
    if tokens:
        mean = math.fsum(tokens) / len(tokens)
        scale = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / len(tokens) + 1e-8)
        flat = [(x - mean) / scale for x in flat]
    assert np.concatenate(found).tolist() == pytest.approx(flat, rel=1e-9, abs=1e-9)
    assert [len(part) for part in found] == [len(own) for own in members]
    if estimator.startswith("reinforce_pp"):
        by_definition = trajectory_advantages(groups, estimator=estimator)
        assert np.concatenate(by_definition).tolist() == np.concatenate(found).tolist()


def test_gdpo_compares_each_component_then_the_weighted_sums_over_the_batch() -> None:
    rewards = [[1, 0], [0, 0], [0, 1], [1, 1]], [[3, 1], [1, 2]]
    groups = [outcomes(group) for group in rewards]

    found = trajectory_advantages(groups, estimator="gdpo", component_weights=[1.0, 0.5])

    sums: list[float] = []
    for group in rewards:
        columns = [estimate("grpo", column) for column in zip(*group, strict=True)]
        sums += [a + 0.5 * b for a, b in zip(*columns, strict=True)]
    expected = (np.array(sums) - np.mean(sums)) / (np.std(sums, ddof=1) + 1e-6)
    assert np.concatenate(found).tolist() == pytest.approx(expected.tolist())


def test_gdpo_of_single_members_has_zero_or_their_whitened_rewards() -> None:
    weights: dict[str, Any] = {"component_weights": [1.0, 0.5]}
    groups = [outcomes([[1, 0]]), outcomes([[3, 4]])]

    (zero,) = trajectory_advantages(groups[:1], estimator="gdpo", **weights)
    raw = trajectory_advantages(groups, estimator="gdpo", singleton="raw", **weights)

    assert zero.tolist() == [0.0]
    assert np.concatenate(raw).tolist() == pytest.approx([-0.707107, 0.707107], abs=1e-6)


def test_empty_groups_have_no_advantages() -> None:
    groups = [outcomes([]), outcomes([[1, 0], [0, 2]])]

    nothing, some = trajectory_advantages(groups, estimator="gdpo", component_weights=[1.0, 2.0])

    assert (len(nothing), len(some)) == (0, 2)
    assert gigpo(np.zeros(0), turn_rewards=[], anchors=[]) == []


def loop_advantages(estimator: Estimator, rewards: list[float], counts: list[int]) -> list[float]:
    """By the table of definitions, with lists."""
    n = len(rewards)
    mean = math.fsum(rewards) / n
    squares = math.fsum((r - mean) ** 2 for r in rewards)
    result: list[float] = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        of_others = math.fsum(others) / (n - 1)
        match estimator:
            case "grpo":
                result.append((reward - mean) / (math.sqrt(squares / (n - 1)) + 1e-6))
            case "grpo_population":
                result.append((reward - mean) / (math.sqrt(squares / n) + 1e-6))
            case "grpo_leave_one_out":
                std = 0.0
                if n > 2:
                    std = math.sqrt(math.fsum((r - of_others) ** 2 for r in others) / (n - 2))
                result.append((reward - of_others) / (std + 1e-6 if std else 1.0))
            case "rloo":
                result.append(reward - of_others)
            case "maxrl":
                result.append((reward - mean) / (mean + 1e-6))
            case "opo":
                weights = counts if any(counts) else [1] * n
                weighed = [r * c for r, c in zip(rewards, weights, strict=True)]
                result.append(reward - math.fsum(weighed) / sum(weights))
            case "remax":
                result.append(reward - rewards[0])
            case _:
                result.append(reward - mean)
    return result


@given(
    st.sampled_from([each for each in WITHIN_A_GROUP if each != "pass_at_k"]),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), min_size=2, max_size=7),
)
def test_every_estimator_agrees_with_its_definition(
    estimator: Estimator, members: list[tuple[int, int]]
) -> None:
    rewards = [eighths / 8 for eighths, _ in members]  # sums of these are exact
    counts = [count for _, count in members]

    (found,) = trajectory_advantages([outcomes(rewards, counts)], estimator=estimator)

    assert found.dtype == np.float64
    expected = loop_advantages(estimator, rewards, counts)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
