"""Denominators of the tokens that remain, over rows of one trajectory, micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import testkit
from testkit.training import pulled
from turnstream.batching.rows.assemble import take_rows
from turnstream.types import Denominators, Rows
from turnstream.worker.layouts import packed_to_torch
from turnstream.worker.tensors import RowTensors, to_torch
from turnstream_server.trainer.objectives.recount import recounted

# Trajectory "t0" has two rows, "t1" and "t2" one each; the last row is inert. Trained tokens: 2, 2,
# 1, 3 and 0.
ROWS = replace(
    testkit.rows(
        *("a|BC", "aBCd|EF", "x|Y", "h|IjKL", "a|b"),
        group_ids=["g0", "g0", "g0", "g1", "g1"],
        is_padding=[False] * 4 + [True],
    ),
    trajectory_id=["t0", "t0", "t1", "t2", ""],
    weight=np.array([0.5, 0.5, 1.0, 1.0, 0.0], np.float32),
)
KEPT = {0: [1, 0], 1: [1, 1], 2: [0], 3: [0, 1, 1]}
EXPECTED = Denominators(
    num_tokens=5,
    num_sequences=3,
    num_trajectories=2,
    num_groups=2,
    weight_sum=2.0,
    length_constant=7,
)
TOTALS = {0: (3, 3), 1: (3, 3), 2: (0, 3), 3: (2, 2)}
"""Row id to the kept tokens of its trajectory and group."""


def _parts(rows: Rows, cut: Any, layout: Callable[..., Any]) -> list[RowTensors]:
    denominators = Denominators(8, 4, 3, 2, 3.0, 7)
    mini_batch = pulled(rows, denominators=denominators, micro_batches=cut)
    made = layout(mini_batch)
    return [*made] if isinstance(made, list) else [*made.micro_batches()]


def _kept(part: RowTensors) -> Tensor:
    kept_BR = torch.zeros_like(part.trained_tokens)
    values = [v for row_id in part.row_id_B.tolist() for v in KEPT.get(row_id, [])]
    kept_BR[part.trained_tokens] = torch.tensor(values, dtype=torch.bool)
    return kept_BR


def _check(parts: Sequence[RowTensors], kept: Sequence[Tensor]) -> None:
    for part, kept_BR in zip(parts, kept, strict=True):
        assert part.denominators == EXPECTED
        for row_id, trajectory, group in zip(
            part.row_id_B.tolist(),
            part.trajectory_num_tokens_B.tolist(),
            part.group_num_tokens_B.tolist(),
            strict=True,
        ):
            assert row_id < 0 or (trajectory, group) == TOTALS[row_id]
        assert torch.equal(part.trained_tokens, kept_BR)


@pytest.mark.parametrize("layout", [to_torch, packed_to_torch])
@pytest.mark.parametrize("cut", [((0, 1, 2, 3, 4),), ((3, 0), (4, 1), (2,))], ids=str)
def test_recount_covers_all_micro_batches(layout: Callable[..., Any], cut: Any) -> None:
    parts = _parts(ROWS, cut, layout)

    kept = [_kept(part) for part in parts]

    _check(recounted(parts, kept, rows=ROWS, gather=lambda value: [value]), kept)


def test_recount_adds_the_rows_of_one_trajectory_on_two_ranks() -> None:
    shares = [take_rows(ROWS, picked) for picked in ([0, 2, 4], [1, 3])]
    parts = [_parts(share, (tuple(range(len(share))),), to_torch) for share in shares]
    sent: list[Any] = []

    def send(value: Any) -> list[Any]:
        sent.append(value)
        return [value]

    for share, own in zip(shares, parts, strict=True):
        recounted(own, [_kept(p) for p in own], rows=share, gather=send)
    counted = [
        recounted(own, [_kept(p) for p in own], rows=share, gather=lambda _: sent)
        for share, own in zip(shares, parts, strict=True)
    ]

    for own, before in zip(counted, parts, strict=True):
        _check(own, [_kept(part) for part in before])
