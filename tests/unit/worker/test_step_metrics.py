"""The metrics of a step against all its rows together, and iteration after late data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import testkit
from testkit.training.training import make_mini_batch, pulled
from turnstream.errors import NotReadyError
from turnstream.types import MiniBatchTotals
from turnstream.worker.steps import PulledMiniBatch, Step
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
    assert (metrics["num_rows"], metrics["num_tokens"]) == (2 * len(rows), 2 * num_tokens)
    assert metrics["num_trajectories"] == 2 * len(rows)
    assert metrics["reward_mean"] == pytest.approx(0.25)


def test_step_of_an_older_release_has_no_totals() -> None:
    mini_batches = _pulled([[Row(4, 8)], [Row(3, 3)]], num_inert=1)
    older = replace(mini_batches[1], info=replace(mini_batches[1].info, totals=None))

    metrics = _metrics([mini_batches[0], older])

    assert metrics["merge_ratio"] == pytest.approx(11 / 7)
    assert not metrics.keys() & {"num_rows", "num_tokens", "num_trajectories", "reward_mean"}


def test_positions_are_those_of_the_forward_passes_of_each_layout() -> None:
    built = testkit.rows("aB", "aBCDE", "aBC", "a|b", is_padding=[False] * 3 + [True])
    mini_batch = pulled(built, micro_batches=((0, 2), (1, 3)), alignment=4)

    parts = [*to_torch(mini_batch).micro_batches()]
    padded = sum(part.input_ids_BT[~part.is_padding_B].numel() for part in parts)
    bounds = [part.cu_seqlens for part in mini_batch.to_torch_packed()]
    packed = int(bounds[0][-1]) + int(bounds[1][1])  # without the inert row

    assert mini_batch.num_positions(layout="padded") == padded == 2 * 3 + 5
    assert mini_batch.num_positions(layout="packed") == packed == 4 + 8 + 4


def _pulled(shapes: Sequence[Sequence[Row]], *, num_inert: int) -> list[PulledMiniBatch]:
    """Return a step of mini-batches with these rows, each with so many inert ones."""
    mini_batches: list[PulledMiniBatch] = []
    for index, rows in enumerate(shapes):
        texts = ["a" + "B" * (row.num_tokens - 1) for row in rows] + ["a|b"] * num_inert
        built = testkit.rows(*texts, is_padding=[n >= len(rows) for n in range(len(texts))])
        num_turn_tokens = sum(row.num_turn_tokens for row in rows)
        info: dict[str, Any] = {"mini_batch": index, "num_mini_batches": len(shapes)}
        num_tokens = sum(row.num_tokens for row in rows)
        info["merge_ratio"] = num_turn_tokens / num_tokens
        # Another rank has as many rows, without a reward.
        info["totals"] = MiniBatchTotals(
            num_rows=2 * len(rows),
            num_tokens=2 * num_tokens,
            num_turn_tokens=2 * num_turn_tokens,
            num_trajectories=2 * len(rows),
            reward_sum=0.5 * len(rows),
        )
        info["micro_batches"] = tuple(tuple(range(n, len(texts), 2)) for n in range(2))
        mini_batches.append(pulled(built, **info))
    return mini_batches


class _Stream:
    announced_version = -1

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
    """Return the padding among the positions of all real rows, counted in the forward passes."""
    tensors = [part for each in mini_batches for part in to_torch(each).micro_batches()]
    real = [each.attention_mask_BT[~each.is_padding_B] for each in tensors]
    return sum(int((~mask_BT).sum()) for mask_BT in real) / sum(mask_BT.numel() for mask_BT in real)


NUM_MINI_BATCHES = 3


class LateStream:
    """Yields the mini-batches after the first; each is late once."""

    def __init__(self) -> None:
        self._next = 1
        self._is_late = True

    def __iter__(self) -> Iterator[PulledMiniBatch]:
        return self

    def __next__(self) -> PulledMiniBatch:
        self._is_late = not self._is_late
        if not self._is_late:
            raise NotReadyError(f"mini-batch {self._next} did not come")
        self._next += 1
        return _mini_batch(self._next - 1)


def _mini_batch(index: int) -> PulledMiniBatch:
    return make_mini_batch(mini_batch=index, num_mini_batches=NUM_MINI_BATCHES)


@pytest.mark.parametrize("epochs", [1, 2])
def test_loop_over_a_step_resumes_where_data_was_late(epochs: int) -> None:
    # A generator ended at the error, and the next loop had no mini-batch.
    stream: Any = LateStream()
    step = Step(stream, _mini_batch(0), waited_s=0.0)
    mini_batches = step if epochs == 1 else step.mini_batches(epochs=epochs)
    seen: list[tuple[int, int]] = []
    num_errors = 0
    while len(seen) < epochs * NUM_MINI_BATCHES:
        try:
            for mini_batch in mini_batches:
                seen += [(mini_batch.epoch, mini_batch.info.mini_batch)]
        except NotReadyError:
            num_errors += 1

    assert seen == [(epoch, index) for epoch in range(epochs) for index in range(3)]
    assert num_errors == 2
    assert list(mini_batches) == []
