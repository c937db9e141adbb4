"""The metrics of a step with several mini-batches, against all their rows together."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import testkit
from testkit.training import pulled
from turnstream.worker import PulledMiniBatch
from turnstream.worker.steps import Step
from turnstream.worker.tensors import to_torch


class Row(NamedTuple):
    """A row of one trajectory, and the tokens of its turns sent one by one."""

    num_tokens: int
    num_turn_tokens: int


_rows = st.integers(2, 9).flatmap(lambda n: st.builds(Row, st.just(n), st.integers(n, 4 * n)))


# Both means were weighted by the positions of all rows, inert ones included: the merge ratio of
# this step was 1.0297 instead of 1.0063. An unweighted mean would be 2.5.
@example([[Row(2, 8)], [Row(100, 100)] * 9 + [Row(50, 50)]], 7)
@given(st.lists(st.lists(_rows, min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 4))
def test_step_metrics_equal_those_of_all_rows_together(
    shapes: list[list[Row]], num_inert: int
) -> None:
    mini_batches = _pulled(shapes, num_inert=num_inert)

    metrics = _metrics(mini_batches)

    assert {type(value) for value in metrics.values()} <= {int, float}
    assert metrics["padding_share"] == pytest.approx(_padding_share(mini_batches))
    rows = [row for own in shapes for row in own]
    num_tokens = sum(row.num_tokens for row in rows)
    num_turn_tokens = sum(row.num_turn_tokens for row in rows)
    assert metrics["merge_ratio"] == pytest.approx(num_turn_tokens / num_tokens)
    assert (metrics["num_rows"], metrics["num_tokens"]) == (len(rows), num_tokens)


def _pulled(shapes: Sequence[Sequence[Row]], *, num_inert: int) -> list[PulledMiniBatch]:
    """Return a step of mini-batches with these rows, each with so many inert ones."""
    mini_batches: list[PulledMiniBatch] = []
    for index, rows in enumerate(shapes):
        texts = ["a" + "B" * (row.num_tokens - 1) for row in rows] + ["a|b"] * num_inert
        built = testkit.rows(*texts, is_padding=[n >= len(rows) for n in range(len(texts))])
        num_turn_tokens = sum(row.num_turn_tokens for row in rows)
        info: dict[str, Any] = {"mini_batch": index, "num_mini_batches": len(shapes)}
        info["merge_ratio"] = num_turn_tokens / sum(row.num_tokens for row in rows)
        mini_batches.append(pulled(built, **info))
    return mini_batches


class _Stream:
    newest_version = -1

    def __init__(self, mini_batches: Sequence[PulledMiniBatch]) -> None:
        self._mini_batches = iter(mini_batches)

    def __next__(self) -> PulledMiniBatch:
        return next(self._mini_batches)

    def statistics(self) -> Any:
        return SimpleNamespace(wait_s=0.0)


def _metrics(mini_batches: Sequence[PulledMiniBatch]) -> dict[str, float]:
    stream: Any = _Stream(mini_batches)
    step = Step(stream, next(stream), waited_s=0.0)
    assert len(list(step)) == len(mini_batches)
    return step.metrics


def _padding_share(mini_batches: Sequence[PulledMiniBatch]) -> float:
    """Return the padding among the positions of all real rows, counted in the padded layout."""
    tensors = [to_torch(each) for each in mini_batches]
    real = [each.attention_mask_BT[~each.is_padding_B] for each in tensors]
    return sum(int((~mask_BT).sum()) for mask_BT in real) / sum(mask_BT.numel() for mask_BT in real)
