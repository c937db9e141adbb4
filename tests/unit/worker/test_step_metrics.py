"""The metrics of a step with several mini-batches, against all their rows together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import testkit
from turnstream.batching.merge.plan import MiniBatchPlan, SequenceShape
from turnstream.records.batches import decode_mini_batch
from turnstream.types import MiniBatch
from turnstream.worker import PulledMiniBatch
from turnstream.worker.steps import Step
from turnstream.worker.tensors import to_torch
from turnstream_server.batcher.assembly.shares import PlannedBatch, cut_mini_batch, encode_share


class Row(NamedTuple):
    """A row of one trajectory, and the tokens of its turns sent one by one."""

    num_tokens: int
    num_turn_tokens: int


SMALL_AND_LARGE = [[Row(2, 8)], [Row(100, 100)] * 9 + [Row(50, 50)]]
"""Mini-batches of 2 and 950 tokens: the first was merged 4 to 1, the second not at all."""

_rows = st.integers(2, 9).flatmap(lambda n: st.builds(Row, st.just(n), st.integers(n, 4 * n)))


@given(
    st.lists(st.lists(_rows, min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_step_metrics_equal_those_of_all_rows_together(
    shapes: list[list[Row]], rows_multiple_of: int
) -> None:
    mini_batches = _pulled(shapes, rows_multiple_of=rows_multiple_of)

    metrics = _metrics(mini_batches)

    assert metrics["padding_share"] == pytest.approx(_padding_share(mini_batches))
    assert metrics["merge_ratio"] == pytest.approx(_merge_ratio(shapes))


def test_step_metrics_weigh_a_small_mini_batch_by_its_size() -> None:
    # Both were weighted by the positions of all rows, inert ones included: the merge ratio of this
    # step was 1.0297 instead of 1.0063. An unweighted mean would be 2.5.
    mini_batches = _pulled(SMALL_AND_LARGE, rows_multiple_of=8)

    metrics = _metrics(mini_batches)

    assert metrics["merge_ratio"] == pytest.approx(958 / 952)
    assert metrics["padding_share"] == pytest.approx(50 / 1002)


def _pulled(shapes: Sequence[Sequence[Row]], *, rows_multiple_of: int) -> list[PulledMiniBatch]:
    """Return the mini-batches of a batch, as one rank gets them; a group each."""
    config = replace(testkit.config(len(shapes), 1), rows_multiple_of=rows_multiple_of)
    plan = testkit.manifest(*(f"g{index}" for index in range(len(shapes))))
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(
                    testkit.trajectory_plan(group.group_id, sample=sample),
                    num_turn_tokens=row.num_turn_tokens,
                    sequences=(SequenceShape((0,), 1, row.num_tokens, row.num_tokens - 1),),
                )
                for sample, row in enumerate(own)
            ),
        )
        for group, own in zip(plan.groups, shapes, strict=True)
    ]
    rows = [testkit.rows(*("a" + "B" * (row.num_tokens - 1) for row in own)) for own in shapes]
    cuts = [
        MiniBatchPlan(
            first_group=index,
            num_groups=1,
            first_row_id=0,
            num_rows=len(own),
            width=max(row.num_tokens for row in own),
            response_width=max(row.num_tokens for row in own) - 1,
            denominators=testkit.mini_batch_info(rows[index]).denominators,
        )
        for index, own in enumerate(shapes)
    ]
    batch = PlannedBatch(
        manifest=replace(plan, groups=tuple(groups), mini_batches=tuple(cuts)),
        manifest_hash="ab",
        config=config,
    )
    encoded = [
        encode_share(
            batch, each, cut_mini_batch(batch, each, dp_world_size=1), mini_batch=index, dp_rank=0
        )
        for index, each in enumerate(rows)
    ]
    decoded = [decode_mini_batch(each.data) for each in encoded]
    return [
        PulledMiniBatch(rows=each.rows, info=each.info, content_hash="", num_bytes=0)
        for each in decoded
    ]


class _Stream:
    """The mini-batches of a step after its first."""

    newest_version = -1

    def __init__(self, mini_batches: Sequence[PulledMiniBatch]) -> None:
        self._rest = iter(mini_batches)

    def __next__(self) -> PulledMiniBatch:
        return next(self._rest)

    def statistics(self) -> Any:
        return SimpleNamespace(wait_s=0.0)


def _metrics(mini_batches: Sequence[PulledMiniBatch]) -> dict[str, float]:
    first, *others = mini_batches
    step = Step(cast("Any", _Stream(others)), first, waited_s=0.0)
    assert len(list(step)) == len(mini_batches)
    return step.metrics


def _padding_share(mini_batches: Sequence[MiniBatch]) -> float:
    """Return the padding among the positions of all real rows, counted in the padded layout."""
    tensors = [to_torch(each) for each in mini_batches]
    real = [each.attention_mask_BT[~each.is_padding_B] for each in tensors]
    return sum(int((~mask_BT).sum()) for mask_BT in real) / sum(mask_BT.numel() for mask_BT in real)


def _merge_ratio(shapes: Sequence[Sequence[Row]]) -> float:
    rows = [row for own in shapes for row in own]
    return sum(row.num_turn_tokens for row in rows) / sum(row.num_tokens for row in rows)
