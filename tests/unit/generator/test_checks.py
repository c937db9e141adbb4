from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from testkit import group, trajectory
from turnstream.errors import InvalidTurnError
from turnstream.generator.encode import checks, group_checks
from turnstream.store.run import groups
from turnstream.types import Status, TrajectoryKey, Turn
from turnstream.types.names import named_numbers


def check(prompt: Any = (1, 2), response: Any = (3, 4), **fields: Any) -> Turn:
    return checks.checked_turn(prompt, response, **fields)


ARRAYS_OF_ONE_AND_TWO = [
    pytest.param([1, 2], id="list"),
    pytest.param((1, 2), id="tuple"),
    pytest.param(range(1, 3), id="range"),
    *[pytest.param(np.array([1, 2], kind), id=kind) for kind in ("u1", "i2", "i4", "u4", "i8")],
    pytest.param(np.array([1, 2], ">i8"), id="big-endian"),
    pytest.param(np.array([1, 9, 2, 9], np.int32)[::2], id="every second"),
    pytest.param(torch.tensor([1, 2]), id="torch int64"),
    pytest.param(torch.tensor([1, 2], dtype=torch.int32), id="torch int32"),
]


@pytest.mark.parametrize("ids", ARRAYS_OF_ONE_AND_TWO)
def test_token_ids_of_every_integer_kind_become_int32(ids: Any) -> None:
    turn = check(ids, ids)

    for array in (turn.prompt_ids, turn.response_ids):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert array.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.0, 2.0], r"are whole numbers, not float64: .*1\.0.* at 0"),
        (np.array([1, 2], np.float32), "are whole numbers, not float32"),
        (torch.tensor([1.0]), "are whole numbers, not float32"),
        ([True, False], "are whole numbers, not bool"),
        ("ab", "has the shape"),
        (["a", "b"], "are whole numbers, not <U1"),
        ([1, None], "are whole numbers, not object"),
        ([1, -1], "-1 at position 1 is not a token id"),
        (np.array([5, 2**31], np.int64), "2147483648 at position 1 is not a token id"),
        (np.array([2**32 - 1], np.uint32), "4294967295 at position 0 is not a token id"),
        ([2**64], "are whole numbers, not object|is no array"),
        ([[1, 2]], r"has the shape \(1, 2\), not one dimension"),
        ([[1], [1, 2]], "is no array of numbers"),
        (3, "has the shape"),
    ],
)
def test_invalid_token_id_is_refused_with_its_value(ids: Any, message: str) -> None:
    for field in ("prompt", "response"):
        with pytest.raises(InvalidTurnError, match=message) as refusal:
            check(**{field: ids})
        assert refusal.value.field == f"{field}_ids"


@given(
    nps.arrays(
        st.sampled_from(["i8", "i4", "u8", "u4", "i1", "i2", ">i4", ">i8"]), st.integers(1, 20)
    )
)
def test_token_ids_from_0_to_2_31_are_accepted(ids: np.ndarray) -> None:
    fits = all(0 <= token < 2**31 for token in ids.tolist())
    try:
        accepted = check(ids).prompt_ids.tolist()
    except InvalidTurnError:
        accepted = None

    assert accepted == (ids.tolist() if fits else None)


def test_an_empty_response_is_refused_unless_it_is_meant() -> None:
    with pytest.raises(InvalidTurnError, match="response_ids: is empty"):
        check(response=[])

    turn = check(
        response=[], logprobs=[], loss_mask=[], rewards=[], policy_version=3, allow_empty=True
    )

    assert len(turn.response_ids) == 0
    assert turn.response_ids.dtype == np.int32
    assert turn.version_runs == ()


def test_log_probability_may_be_rounded_above_zero() -> None:
    assert check(logprobs=[1e-6, -2.0]).logprobs is not None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 7.0])
def test_values_at_masked_positions_become_zero_unread(wrong: float) -> None:
    given_logprobs = np.array([wrong, -2.0], np.float32)

    turn = check(logprobs=given_logprobs, loss_mask=[0, 1])

    assert turn.logprobs is not None
    assert turn.logprobs.tolist() == [0.0, -2.0]
    assert given_logprobs[0] != 0.0  # the caller's own array is untouched


@pytest.mark.parametrize(
    "mask",
    [[0, 1], [False, True], np.array([0, 1], np.int64), np.array([0.0, 1.0]), torch.tensor([0, 1])],
)
def test_masks_of_every_kind_become_uint8_without_weights(mask: Any) -> None:
    turn = check(loss_mask=mask)

    assert turn.loss_mask is not None
    assert (turn.loss_mask.tolist(), turn.loss_mask.dtype) == ([0, 1], np.uint8)
    assert turn.token_weights is None


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    "rewards",
    [
        *(torch.tensor([1, 0.5], dtype=dtype, requires_grad=True) for dtype in FLOATS),
        *(torch.tensor([1, 0.5]), [1, 0.5], [True, 0.5]),
    ],
)
def test_case_8_rewards_become_float32_and_leave_their_graph(rewards: Any) -> None:
    # So do those of the reference, though the text of its pull request says otherwise.
    turn = check(rewards=rewards)

    assert turn.rewards is not None
    assert (turn.rewards.tolist(), turn.rewards.dtype) == ([1.0, 0.5], np.float32)
    assert group_checks.checked_reward(rewards[1]) == 0.5


@pytest.mark.parametrize("rewards", [0.5, np.array(0.5), torch.tensor(0.5), [[1.0, 0.0]]])
def test_case_8_a_single_reward_is_no_reward_per_token(rewards: Any) -> None:
    # The reference raises ValueError for rewards of no or two dimensions.
    with pytest.raises(InvalidTurnError, match=r"rewards: has the shape .* not one dimension"):
        check(rewards=rewards)


@pytest.mark.parametrize("reward", [0.5, np.float32(0.5), torch.tensor(0.5, requires_grad=True)])
def test_case_34_reward_of_a_turn_is_on_its_last_token(reward: Any) -> None:
    # As in the reference, also where the last token is masked. A turn without a token has none: the
    # reference raises IndexError.
    turn = check(response=[3, 4, 5], reward=reward, loss_mask=[1, 1, 0])

    assert turn.rewards is not None
    assert (turn.rewards.tolist(), turn.rewards.dtype) == ([0, 0, 0.5], np.float32)
    with pytest.raises(
        InvalidTurnError, match=r"^reward: 0\.5 has no token: response_ids is empty"
    ):
        check(response=[], reward=reward, allow_empty=True)


def test_case_7_empty_list_of_logprobs_is_not_none() -> None:
    # The reference reads [] as none given; a list of another length than its response is refused.
    assert check().logprobs is None
    with pytest.raises(InvalidTurnError, match="logprobs: has 0 values, response_ids has 2"):
        check(logprobs=[])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, np.float16])
def test_case_8_a_fractional_mask_is_a_mask_and_weights(kind: Any) -> None:
    # As in the reference, which keeps [.25, 1] as its loss mask. A mask of ours says what is
    # trained, and a fraction is the weight of a token.
    turn = check(response=[3, 4, 5], logprobs=[-1, -2, -3], loss_mask=kind([0.25, 1.0, 0.0]))

    assert turn.loss_mask is not None
    assert turn.token_weights is not None
    assert turn.logprobs is not None
    assert (turn.loss_mask.tolist(), turn.loss_mask.dtype) == ([1, 1, 0], np.uint8)
    assert (turn.token_weights.tolist(), turn.token_weights.dtype) == ([0.25, 1, 0], np.float32)
    assert turn.logprobs.tolist() == [-1, -2, 0]


@pytest.mark.parametrize(
    ("weights", "mask", "expected"),
    [
        ([0.5, 2], None, [0.5, 2]),
        ([True, 3], [1, 1], [1, 3]),
        (torch.tensor([0.5, 7.0], dtype=torch.bfloat16, requires_grad=True), None, [0.5, 7]),
        ([math.nan, 2], [0, 1], [0, 2]),  # not read where masked
        ([0, 0], None, [0, 0]),  # trained, and counted in the denominators
    ],
)
def test_weights_become_float32_and_zero_where_masked(
    weights: Any, mask: Any, expected: list[float]
) -> None:
    turn = check(token_weights=weights, loss_mask=mask)

    assert turn.token_weights is not None
    assert (turn.token_weights.tolist(), turn.token_weights.dtype) == (expected, np.float32)
    assert (None if turn.loss_mask is None else turn.loss_mask.tolist()) == mask


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt_ids: is empty"),
        *[
            ({field: values}, f"{field}: has {len(values)} values, response_ids has 2")
            for field in ("logprobs", "loss_mask", "rewards", "token_weights")
            for values in ([0], [0, 0, 0], [])
        ],
        *[
            ({"logprobs": [-1.0, wrong]}, "logprobs: .* at position 1 is not a finite")
            for wrong in (math.nan, math.inf, -math.inf, 0.5, -1e300)
        ],
        ({"logprobs": torch.tensor([-1.0, -2.0], requires_grad=True)}, "is no array of numbers"),
        *[
            ({"loss_mask": [1, wrong]}, "loss_mask: .* at position 1 is neither 0 nor 1")
            for wrong in (2, -1, 1.5, -0.5, math.nan)
        ],
        *[
            ({"token_weights": [1.0, wrong]}, "token_weights: .* at position 1 is not a finite")
            for wrong in (-0.5, math.nan, math.inf, 1e300)
        ],
        ({"token_weights": [1, 1], "loss_mask": [0.5, 1]}, r"are present, and loss_mask has fract"),
        ({"token_weights": ["a", "b"]}, "token_weights: are numbers, not <U1"),
        ({"loss_mask": np.array([2, 1], np.uint8)}, "loss_mask: 2 at position 0 is neither"),
        *[
            ({"rewards": [wrong, 1.0]}, "rewards: .* at position 0 is not a finite")
            for wrong in (math.nan, math.inf, 1e300)
        ],
        ({"reward": 0.5, "rewards": [0, 1]}, r"^reward: 0\.5 and rewards are both present"),
        ({"reward": math.nan}, "^reward: nan is not finite"),
        ({"reward": 1e39}, r"^reward: 1e\+39 is more than a float32 can hold"),
        ({"reward": [0.5, 0.5]}, r"^reward: \[0\.5, 0\.5\] is not a number"),
        ({"reward": "1"}, "^reward: '1' is not a number"),
        ({"policy_version": -1}, "policy_version: -1 is not a whole number"),
        ({"policy_version": 1.5}, r"policy_version: 1\.5 is not a whole number"),
        ({"policy_version": True}, "policy_version: True is not a whole number"),
        ({"policy_version": 2**63}, "policy_version: 9223372036854775808 is not a whole number"),
        ({"policy_version": 2, "version_runs": [(1, 2)]}, "2 and version_runs are both present"),
        ({"version_runs": [(1, 1)]}, "version_runs: cover 1 tokens, response_ids has 2"),
        ({"version_runs": [(1, 3)]}, "version_runs: cover 3 tokens, response_ids has 2"),
        ({"version_runs": [(1, 2), (2, 0)]}, r"version_runs\[1\]\.num_tokens: 0 is not"),
        ({"version_runs": [(-2, 2)]}, r"version_runs\[0\]\.version: -2 is not"),
    ],
)
def test_invalid_field_is_refused_with_value_and_position(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        check(**fields)


def test_one_version_covers_the_whole_response() -> None:
    assert check(policy_version=7).version_runs == ((7, 2),)
    assert check(policy_version=np.int64(7)).version_runs == ((7, 2),)
    assert check().version_runs == ()
    assert check(version_runs=[(None, 1), (4, 1)]).version_runs == ((None, 1), (4, 1))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (TrajectoryKey("g", 4), "sample: 4 in a group of 4, from 0"),
        (TrajectoryKey("g", -1), "sample: -1 is not"),
        (TrajectoryKey("g", 0, -1), "attempt: -1 is not"),
        (TrajectoryKey("g", 0, groups.ATTEMPT_LIMIT), "attempt: 1000 is not"),
        (TrajectoryKey("", 0), "group_id: a name of 0 characters"),
    ],
)
def test_a_key_that_cannot_be_a_member_is_refused(key: TrajectoryKey, message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        group_checks.checked_key(key, num_samples=4)


def test_the_samples_of_a_whole_group_are_numbered_without_holes() -> None:
    with pytest.raises(InvalidTurnError, match=r"sample: \[0, 2\] are not 0 to 1, each once"):
        group_checks.checked_group(group("g", trajectory(sample=0), trajectory(sample=2)))

    _, members = group_checks.checked_group(group("g", trajectory(sample=1), trajectory(sample=0)))

    assert [member.sample for member in members] == [0, 1]


def test_labels_come_out_sorted_with_numbers_as_floats() -> None:
    numbers = named_numbers({"b": np.float32(1), "a": 2}, field="metrics")

    assert list(group_checks.checked_tags({"b": "x", "a": "y"})) == ["a", "b"]

    assert list(numbers.items()) == [("a", 2.0), ("b", 1.0)]


def test_a_status_is_one_of_four() -> None:
    assert group_checks.checked_status("truncated") is Status.TRUNCATED
    with pytest.raises(InvalidTurnError, match="status: 'gone' is not one of completed, truncated"):
        group_checks.checked_status("gone")


@pytest.mark.parametrize("wrong", [0, 5, 2.5])
def test_num_needed_is_between_one_and_all_samples(wrong: Any) -> None:
    with pytest.raises(InvalidTurnError, match=r"^num_needed: "):
        group_checks.checked_opening("g", 4, "", num_needed=wrong)


def test_reward_cannot_be_both_present_and_awaited() -> None:
    with pytest.raises(InvalidTurnError, match=r"^reward: 1.0 is given, but awaits_reward says"):
        group_checks.checked_reward(1.0, awaits_reward=True)


def label(metrics: Any = None, tags: Any = None) -> None:
    group_checks.checked_metrics(metrics)
    group_checks.checked_tags(tags)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"metrics": {"m": math.nan}}, r"metrics\['m'\]: nan is not finite"),
        ({"metrics": {"m": 1e31}}, r"metrics\['m'\]: 1e\+31 is beyond 1e\+30"),
        ({"metrics": {"m": "much"}}, r"metrics\['m'\]: 'much' is not a number"),
        ({"metrics": {"": 1.0}}, "metrics: has an empty name, of 1.0"),
        ({"metrics": {"é" * 65: 1.0}}, "metrics: 'é+'... has 130 bytes, more than 128"),
        ({"metrics": {str(n): n for n in range(65)}}, "metrics: has 65 names, more than 64"),
        ({"tags": {"env": 3}}, r"tags\['env'\]: 3 is not a text"),
        ({"tags": {"env": "x" * 257}}, r"tags\['env'\]: 'x+'... has 257 bytes, more than 256"),
        ({"tags": {"": "x"}}, "tags: has an empty name, of 'x'"),
        ({"tags": {"x" * 129: ""}}, "tags: 'x+'... has 129 bytes, more than 128"),
        ({"tags": {str(n): "" for n in range(65)}}, "tags: has 65 names, more than 64"),
    ],
)
def test_label_that_cannot_be_summed_is_refused(labels: Any, message: str) -> None:
    with pytest.raises(InvalidTurnError, match=message):
        label(**labels)


def test_labels_at_their_limits_are_taken() -> None:
    label(
        metrics={"m" * 128: -1e30, **{str(n): n for n in range(63)}},
        tags={"t" * 128: "x" * 256, **{str(n): "" for n in range(63)}},
    )
