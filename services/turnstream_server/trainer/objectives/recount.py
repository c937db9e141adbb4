"""Denominators of the tokens that remain after corrections have dropped others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from turnstream.types import Denominators, Rows
from turnstream.worker.tensors import RowTensors
from turnstream_server.trainer.objectives.scores import Gather


class _Tally(NamedTuple):
    """Counts of the kept tokens of some rows, by trajectory and by group."""

    num_sequences: int
    weight_sum: float
    trajectories: Counter[str]
    groups: Counter[str]


def recounted(
    parts: Sequence[RowTensors], kept: Sequence[Tensor], *, rows: Rows, gather: Gather
) -> list[RowTensors]:
    """Return the rows with the kept tokens as their loss mask, and with their numbers.

    Denominators and the totals of trajectories and groups are recounted over all micro-batches and
    ranks. A row, trajectory or group without a kept token does not count. The weights of rows and
    tokens do not change. `kept` is bool (B, R) for each micro-batch of this rank's share.
    """
    own_names = zip(rows.trajectory_id, rows.group_id, strict=True)
    names = dict(zip(rows.row_id.tolist(), own_names, strict=True))
    named = [[names[row_id] for row_id in part.row_id_B.tolist()] for part in parts]
    tallies = gather(_tally(parts, kept, named))
    trajectories = sum((each.trajectories for each in tallies), Counter[str]())
    groups = sum((each.groups for each in tallies), Counter[str]())
    denominators = Denominators(
        num_tokens=trajectories.total(),
        num_sequences=sum(each.num_sequences for each in tallies),
        num_trajectories=len(trajectories),
        num_groups=len(groups),
        weight_sum=sum(each.weight_sum for each in tallies),
        length_constant=parts[0].denominators.length_constant if parts else 0,
    )
    return [
        replace(
            part.with_trained_tokens(kept_BR),
            trajectory_num_tokens_B=_totals(part, [trajectories[name] for name, _ in own]),
            group_num_tokens_B=_totals(part, [groups[name] for _, name in own]),
            denominators=denominators,
        )
        for part, kept_BR, own in zip(parts, kept, named, strict=True)
    ]


def _tally(
    parts: Sequence[RowTensors], kept: Sequence[Tensor], named: Sequence[list[tuple[str, str]]]
) -> _Tally:
    trajectories, groups = Counter[str](), Counter[str]()
    weights: list[float] = []
    for part, kept_BR, own in zip(parts, kept, named, strict=True):
        counts = part.row_sums(kept_BR.long()).tolist()
        for (trajectory, group), count, weight in zip(
            own, counts, part.weight_B.tolist(), strict=True
        ):
            if count:
                trajectories[trajectory] += count
                groups[group] += count
                weights.append(weight)
    return _Tally(len(weights), sum(weights), trajectories, groups)


def _totals(part: RowTensors, totals: list[int]) -> Tensor:
    return torch.tensor(totals, dtype=torch.int64, device=part.row_id_B.device)
