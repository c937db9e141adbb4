"""Denominators of a loss, and the check that every rank runs on its share.

Each rank and micro-batch divides its own token losses by these *global* numbers, and the parts are
added. So the loss does not depend on how the rows were cut, packed, padded or ordered. Here w is a
row's weight, l its token losses and T its trained tokens. Sums are over rows::

    token_mean             w * sum(l) / num_tokens
    seq_mean_token_sum     w * sum(l) / weight_sum
    seq_mean_token_mean    w * sum(l) / T / weight_sum
    constant               w * sum(l) / (weight_sum * length_constant)
    rollout_mean           w * sum(l) / tokens of the trajectory / num_trajectories
    prompt_mean            w * sum(l) / tokens of the group / num_groups

The `weight_sum` adds the weights of the counted rows. The aggregations without it take weights of 1
only: see BatchingConfig.row_weights. Inert rows and rows without a trained token are not counted.

Weights of tokens are factors of their losses, so they are part of l. All counts are those of the
loss mask: a token of weight 0.25 counts once, and so does one of weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.values import Aggregation, RowWeights
from turnstream.batching.merge.buffers import row_sums
from turnstream.batching.merge.plan import GroupPlan
from turnstream.errors import BatchingError, InvalidConfigError
from turnstream.types import Denominators, Rows


def plan_denominators(groups: Iterable[GroupPlan], *, length_constant: int) -> Denominators:
    """Return the denominators of a mini-batch that trains these groups."""
    num_tokens = num_sequences = num_trajectories = num_groups = 0
    weights: list[float] = []
    for group in groups:
        sequences_before = num_sequences
        for trajectory in group.trajectories:
            trained = [row.num_trained_tokens for row in trajectory.sequences]
            live = [w for w, count in zip(trajectory.weights, trained, strict=True) if count]
            num_tokens += sum(trained)
            num_sequences += len(live)
            num_trajectories += bool(live)
            weights += live
        num_groups += num_sequences > sequences_before
    return Denominators(
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_trajectories=num_trajectories,
        num_groups=num_groups,
        weight_sum=math.fsum(weights),
        length_constant=length_constant,
    )


class ShareCounts(NamedTuple):
    """Counts of one rank's rows; their sum over all ranks gives the denominators.

    Rows of a trajectory may be on several ranks. It counts on each in proportion to its trained
    tokens there, and a group likewise, so these parts are fractions.
    """

    num_tokens: int
    num_sequences: int
    num_trajectories: float
    num_groups: float
    weight_sum: float

    @classmethod
    def of(cls, rows: Rows, trained_B: NDArray[np.int64]) -> ShareCounts:
        """Count these rows; `trained_B` is their `num_trained`."""
        live_B = trained_B > 0
        trained = trained_B[live_B]
        return cls(
            num_tokens=int(trained.sum()),
            num_sequences=int(live_B.sum()),
            num_trajectories=math.fsum(trained / rows.trajectory_num_tokens[live_B]),
            num_groups=math.fsum(trained / rows.group_num_tokens[live_B]),
            weight_sum=math.fsum(rows.weight[live_B].tolist()),
        )


def num_trained(rows: Rows) -> NDArray[np.int64]:
    """int64 (B,), trained tokens of every row: 0 in inert rows."""
    return row_sums(rows.loss_mask, np.int64)


def require_denominator(denominators: Denominators, *, aggregation: Aggregation) -> None:
    """Refuse an aggregation for which a run ships no denominator.

    A count may be 0 only in a mini-batch without a trained token. A `weight_sum` of 0 is accepted.
    """
    if aggregation == "constant" and not denominators.length_constant:
        others = ", ".join(name for name in get_args(Aggregation) if name != "constant")
        raise InvalidConfigError(
            "length_constant",
            "it is 0, so aggregation='constant' has no denominator: this run aggregates by one of "
            f"{others}. Take the mode from BatchStream.config.aggregation, or create the run with "
            "aggregation='constant' and a length_constant",
        )
    name = _COUNTS.get(aggregation)
    if name and denominators.num_tokens and not getattr(denominators, name):
        raise InvalidConfigError(
            name,
            f"it is 0 in a mini-batch of {denominators.num_tokens} trained tokens, so "
            f"aggregation={aggregation!r} has no denominator. Pass the denominators as shipped",
        )


_COUNTS: dict[str, str] = {"rollout_mean": "num_trajectories", "prompt_mean": "num_groups"}
"""Aggregations that divide by a count other than that of tokens."""


def check_share(
    rows: Rows,
    denominators: Denominators,
    *,
    dp_world_size: int,
    row_weights: RowWeights | None = None,
) -> ShareCounts:
    """Return the counts of a share; refuse one that contradicts these denominators.

    A rank sees its own rows only: none of its counts may exceed the global ones, and the only rank
    must have equal counts. With `row_weights` None, any weights are accepted.
    """
    trained_B = num_trained(rows)
    _check_rows(rows, trained_B)
    if row_weights is not None:
        _check_weights(rows, trained_B, row_weights)
    counts = ShareCounts.of(rows, trained_B)
    for name, own in counts._asdict().items():
        whole = getattr(denominators, name)
        # Sums of float32 weights and of fractions are rounded; token counts are exact.
        is_exact = isinstance(whole, int) and isinstance(own, int)
        tolerance = 0.0 if is_exact else 1e-6 * max(1.0, abs(whole))
        is_wrong = abs(own - whole) > tolerance if dp_world_size == 1 else own > whole + tolerance
        if is_wrong:
            raise BatchingError(
                f"{name}: the share of one of {dp_world_size} ranks has {own:g}, "
                f"the mini-batch {whole:g}"
            )
    return counts


def _check_rows(rows: Rows, trained_B: NDArray[np.int64]) -> None:
    live_inert = np.flatnonzero(rows.is_padding & ((trained_B > 0) | (rows.weight != 0)))
    if len(live_inert):
        row = int(live_inert[0])
        raise BatchingError(
            f"inert row {rows.row_id[row]} has {trained_B[row]} trained tokens and a weight of "
            f"{rows.weight[row]:g}"
        )
    is_too_many = (trained_B > rows.trajectory_num_tokens) | (
        rows.trajectory_num_tokens > rows.group_num_tokens
    )
    wrong = np.flatnonzero(is_too_many & ~rows.is_padding)
    if len(wrong):
        row = int(wrong[0])
        raise BatchingError(
            f"row {rows.row_id[row]} has {trained_B[row]} trained tokens, its trajectory "
            f"{rows.trajectory_num_tokens[row]}, its group {rows.group_num_tokens[row]}"
        )


def _check_weights(rows: Rows, trained_B: NDArray[np.int64], row_weights: RowWeights) -> None:
    """Refuse a live row with another weight; the number of its trajectory's rows is unknown."""
    live = np.flatnonzero(trained_B > 0)
    match row_weights:
        case "per_row":
            expected = np.ones(len(live))
        case "per_trajectory":
            expected = 1 / np.maximum(np.rint(1 / np.maximum(rows.weight[live], 1e-9)), 1)
        case "rollout_mean":
            expected = trained_B[live] / rows.trajectory_num_tokens[live]
    wrong = live[~np.isclose(rows.weight[live], expected, rtol=1e-5, atol=0)]
    if len(wrong):
        row = int(wrong[0])
        raise BatchingError(
            f"row {rows.row_id[row]} of {trained_B[row]} of the {rows.trajectory_num_tokens[row]} "
            f"trained tokens of its trajectory has a weight of {rows.weight[row]:g}, which is not "
            f"{row_weights}"
        )
