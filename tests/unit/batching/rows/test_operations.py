from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import testkit
from turnstream.batching.rows.operations import (
    Datum,
    Operation,
    check_operation,
    operation_rows,
    operations_by_pass,
    sums_by_request,
)
from turnstream.errors import BatchingError


def datum(num_tokens: int, *, num_targets: int | None = None, **inputs: Any) -> Datum:
    shape = (num_tokens,) if num_targets is None else (num_tokens, num_targets)
    return Datum(
        model_input=np.arange(num_tokens, dtype=np.int32),
        target_tokens=np.arange(np.prod(shape), dtype=np.int64).reshape(shape),
        **{name: np.array(values, np.float32) for name, values in inputs.items()},
    )


def scored(num_tokens: int) -> Datum:
    return datum(
        num_tokens,
        logprobs=[-0.5] * num_tokens,
        advantages=[2.0] * num_tokens,
        sequence_ratio_mask=[1.0] * num_tokens,
    )


def operation(request_id: str, *data: Datum, loss: str = "ppo", **settings: float) -> Operation:
    return Operation(request_id=request_id, loss=loss, data=data or [scored(2)], settings=settings)


def names(passes: list[list[Operation]]) -> list[list[str]]:
    return [[own.request_id for own in each] for each in passes]


def test_case_47_operations_of_different_losses_have_passes_of_their_own() -> None:
    # The reference computes all five with the loss and the settings of the first, "ppo", and where
    # those differ fails every one of them.
    text = datum(3)
    calls = [
        operation("a"),
        operation("b", text, loss="cross_entropy"),
        operation("c"),
        operation("d", clip_low_threshold=0.9),
        operation("e", datum(3, num_targets=2), loss="cross_entropy"),
    ]

    assert names(operations_by_pass(calls)) == [["a", "c"], ["b"], ["d"], ["e"]]


def test_case_47_operation_is_answered_with_its_own_sums() -> None:
    # The reference answers both with the sum of the pass, 7, which a client that sums its chunks
    # counts twice.
    shared = operation_rows([operation("a", scored(2), scored(1)), operation("b")], first_row_id=5)
    assert shared.operations is not None

    sums = sums_by_request(shared.operations, np.array([1.0, 2.0, 4.0]))

    assert sums == {"a": 3.0, "b": 4.0}


def test_inert_rows_are_in_no_sum() -> None:
    padded = testkit.operation_rows("aB", "c|d", request_id="a", is_padding=[False, True])
    assert padded.operations is not None

    assert sums_by_request(padded.operations, np.array([1.0, 8.0])) == {"a": 1.0}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (datum(2, logprobs=[-1, -1], advantages=[1]), "advantages of shape \\(1,\\)"),
        (datum(2, logprobs=[-1, -1]), "advantages is missing, which ppo needs"),
        (datum(2, advantages=[1, 1]), "logprobs is missing, which ppo needs"),
    ],
)
def test_case_48_only_the_operation_with_short_or_missing_advantages_is_refused(
    bad: Datum, problem: str
) -> None:
    # The reference fails all requests of the pass; ours are checked one by one.
    with pytest.raises(BatchingError, match=f"operation 'bad', datum 1: {problem}"):
        check_operation(operation("bad", scored(1), bad))


@pytest.mark.parametrize(
    ("wrong", "loss", "problem"),
    [
        (datum(0), "cross_entropy", "model_input is empty"),
        (datum(2, weights=[1]), "cross_entropy", r"weights of shape \(1,\)"),
        (datum(2, weights=[1, np.inf]), "cross_entropy", r"weights is inf at \[1\]"),
        (datum(2, num_targets=0), "cross_entropy", r"target_tokens of shape \(2, 0\)"),
        (datum(2, num_targets=2), "dro", "dro takes one target per position"),
        (
            Datum(model_input=np.zeros(2, np.int32), target_tokens=np.zeros(1, np.int64)),
            "cross_entropy",
            r"target_tokens of shape \(1,\) for 2 tokens of model_input",
        ),
        (
            datum(1, logprobs=[np.nan], advantages=[1]),
            "importance_sampling",
            r"logprobs is nan at \[0\]",
        ),
        (
            datum(1, logprobs=[-1], advantages=[1]),
            "gspo",
            "sequence_ratio_mask is missing, which gspo needs",
        ),
        (
            datum(2, logprobs=[-1, -1], advantages=[1, 1], sequence_ratio_mask=[1, 0.5]),
            "gspo",
            r"sequence_ratio_mask is 0.5 at \[1\], neither 0 nor 1",
        ),
        (scored(1), "unknown", "operation 'a': loss 'unknown' is not one of"),
    ],
)
def test_a_datum_that_cannot_be_scored_is_refused_by_field(
    wrong: Datum, loss: str, problem: str
) -> None:
    with pytest.raises(BatchingError, match=problem):
        check_operation(operation("a", wrong, loss=loss))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (Operation(request_id="", loss="ppo", data=[scored(1)]), "operation '' of 1 data"),
        (Operation(request_id="a", loss="ppo", data=[]), "operation 'a' of 0 data"),
        (
            operation("a", datum(2), datum(2, num_targets=3), loss="cross_entropy"),
            "datum 1: .* unlike those of datum 0",
        ),
        *[
            (operation("a", loss=loss, **settings), f"operation 'a': .*{problem}")
            for loss, settings, problem in [
                ("ppo", {"clip": 0.2}, "'clip' is unknown; ppo has: clip_low_threshold, clip_high"),
                (
                    "importance_sampling",
                    {"beta": 0.1},
                    "'beta' is unknown; .*_sampling has: none",
                ),
                ("dro", {"beta": -0.1}, "setting beta is -0.1, not a number from 0"),
                ("dro", {"beta": float("nan")}, "setting beta is nan, not a number from 0"),
                ("cispo", {"clip_low_threshold": 1.5}, "clip_low_threshold 1.5 is above .* 1.2"),
            ]
        ],
    ],
)
def test_operation_without_name_data_equal_targets_or_possible_settings_is_refused(
    wrong: Operation, problem: str
) -> None:
    with pytest.raises(BatchingError, match=problem):
        check_operation(wrong)


def test_missing_weights_are_one_and_zeros_make_no_row_inert() -> None:
    calls = [operation("a", datum(2), datum(1, weights=[0]), loss="cross_entropy")]

    made = operation_rows(calls, first_row_id=0)

    assert made.operations is not None
    assert [row.tolist() for row in made.operations.target_weights] == [[1, 1], [0]]
    assert not made.is_padding.any()
    assert made.logprobs is None
    assert made.advantages is None
