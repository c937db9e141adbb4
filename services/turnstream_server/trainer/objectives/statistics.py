"""Statistics of an objective over the trained tokens of a mini-batch, and their denominators.

- `ratio`: mean of current / old probability. `logprob`: mean current log-probability, in nats.
- `kl`: KL(behaviour || current), estimate k3, in nats.
- `clipped_share`: tokens with a ratio outside the range of the loss, `clipped_low_share` below it
  and `clipped_high_share` above. With `dppo`: masked tokens, of negative and positive advantage.
- `selected_share`: tokens that `clip_cov` or `kl_cov` selected.
- `kl_reference`: KL to the reference, by the chosen estimate; `kl_coefficient`: its factor.
- `entropy`: mean entropy of the policy, in nats, with an entropy bonus.
- `logprob_gap`, `logprob_gap_max`: mean and maximum of |old - behaviour|, in nats, if recomputed.
- `weight_tis`, `masked_share_tis` and others: mean weight, and share of the weight 0, of each
  correction. A second `tis` is `tis_2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnstream.types import Denominators, Rows
from turnstream.worker.corrections import importance_ratio
from turnstream.worker.losses import clipped_exp, kl_k3, log_ratio, masked
from turnstream.worker.policy_losses import dppo_masked
from turnstream.worker.tensors import RowTensors
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.scores import Gather, PreparedPart, TokenScores

_MAXIMUM = "logprob_gap_max"


class Statistics:
    """Measures micro-batches and combines their numbers. The columns depend on the objective."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self._config = config
        self._corrections = list(_numbered([each.name for each in config.corrections]))
        self._columns: list[str] = []

    def measure(
        self, prepared: PreparedPart, scores: TokenScores, *, kl_BR: Tensor | None, loss: Tensor
    ) -> Tensor:
        """Return the numbers of one micro-batch, float64 (K,), on its device."""
        mask_BR = prepared.part.trained_tokens
        values = self._token_values(prepared, scores)
        if kl_BR is not None:
            values["kl_reference"] = kl_BR.detach()
        if scores.entropies_BR is not None:
            values["entropy"] = scores.entropies_BR.detach()
        sums = {
            name: masked(value.double(), mask_BR=mask_BR).sum() for name, value in values.items()
        }
        found = {"loss": loss.double(), **sums}
        if self._config.proximal == "recompute":
            gap_BR = log_ratio(scores.old_BR, scores.behaviour_BR, mask_BR=mask_BR).abs().double()
            found["logprob_gap"] = gap_BR.sum()
            found[_MAXIMUM] = gap_BR.max() if gap_BR.numel() else gap_BR.sum()
        self._columns = list(found)
        return torch.stack(list(found.values()))

    def total(self, rows: Sequence[Tensor]) -> dict[str, float]:
        """Return the numbers of the micro-batches of one rank: sums, and the maximum."""
        stacked = torch.stack(list(rows))
        sums, maxima = torch.stack([stacked.sum(dim=0), stacked.amax(dim=0)]).tolist()
        found = dict(zip(self._columns, sums, strict=True))
        if _MAXIMUM in found:
            found[_MAXIMUM] = maxima[self._columns.index(_MAXIMUM)]
        return found

    def combine(self, totals: Sequence[dict[str, float]], num_tokens: int) -> dict[str, float]:
        """Return the statistics over all ranks: means per trained token, loss and maximum."""
        found = {
            name: sum(total[name] for total in totals) / max(1, num_tokens) for name in totals[0]
        }
        found["loss"] = sum(total["loss"] for total in totals)
        if _MAXIMUM in found:
            found[_MAXIMUM] = max(total[_MAXIMUM] for total in totals)
        return found

    def _token_values(self, prepared: PreparedPart, scores: TokenScores) -> dict[str, Tensor]:
        """Return the values (B, R) whose means over the trained tokens are reported."""
        mask_BR = prepared.part.trained_tokens
        current_BR = scores.current_BR.detach()
        below_BR, above_BR = self._clipped(prepared, scores)
        values = {
            "ratio": clipped_exp(log_ratio(current_BR, scores.old_BR, mask_BR=mask_BR)),
            "kl": kl_k3(scores.behaviour_BR, reference_BR=current_BR, mask_BR=mask_BR),
            "clipped_share": below_BR | above_BR,
            "clipped_low_share": below_BR,
            "clipped_high_share": above_BR,
            "logprob": current_BR,
        }
        if prepared.selected_BR is not None:
            values["selected_share"] = prepared.selected_BR
        for name, weight_BR in zip(self._corrections, prepared.weights, strict=True):
            values[f"weight_{name}"] = weight_BR
            values[f"masked_share_{name}"] = weight_BR == 0
        return values

    def _clipped(self, prepared: PreparedPart, scores: TokenScores) -> tuple[Tensor, Tensor]:
        """Return the tokens that the loss clips below and above, bool (B, R)."""
        loss = self._config.loss
        find = _CLIPPED.get(loss.name)
        if find is None:
            none_BR = torch.zeros_like(prepared.part.trained_tokens)
            return none_BR, none_BR
        return find(prepared, scores, loss)


def _numbered(names: Sequence[str]) -> Iterator[str]:
    """Yield the names; the second "tis" is "tis_2".

    >>> list(_numbered(["tis", "mis", "tis"]))
    ['tis', 'mis', 'tis_2']
    """
    seen = Counter[str]()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}"


def _by_token(prepared: PreparedPart, scores: TokenScores, loss: Any) -> tuple[Tensor, Tensor]:
    mask_BR = prepared.part.trained_tokens
    ratio_BR = clipped_exp(log_ratio(scores.current_BR.detach(), scores.old_BR, mask_BR=mask_BR))
    return ratio_BR < 1 - loss.clip_low, ratio_BR > 1 + loss.clip_high


def _by_row(prepared: PreparedPart, scores: TokenScores, loss: Any) -> tuple[Tensor, Tensor]:
    ratio_BR = importance_ratio(
        scores.current_BR,
        behaviour_BR=scores.old_BR,
        mask_BR=prepared.part.trained_tokens,
        level="geometric",
        row_of=prepared.part.row_of,
    )
    return ratio_BR < 1 - loss.clip_low, ratio_BR > 1 + loss.clip_high


def _by_exponent(prepared: PreparedPart, scores: TokenScores, loss: Any) -> tuple[Tensor, Tensor]:
    mask_BR = prepared.part.trained_tokens
    exponent_BR = log_ratio(scores.current_BR.detach(), scores.old_BR, mask_BR=mask_BR)
    return exponent_BR < -loss.clip_low, exponent_BR > loss.clip_high


def _by_divergence(prepared: PreparedPart, scores: TokenScores, loss: Any) -> tuple[Tensor, Tensor]:
    is_masked_BR = dppo_masked(
        scores.current_BR,
        behaviour_BR=scores.behaviour_BR,
        advantages_BR=prepared.advantages_BR,
        mask_BR=prepared.part.trained_tokens,
        divergence=loss.divergence,
        threshold=loss.threshold,
    )
    rises_BR = prepared.advantages_BR > 0
    return is_masked_BR & ~rises_BR, is_masked_BR & rises_BR


_Clipped = Callable[[PreparedPart, TokenScores, Any], tuple[Tensor, Tensor]]
_CLIPPED: dict[str, _Clipped] = {
    "ppo_clip": _by_token,
    "decoupled_ppo": _by_token,
    "cispo": _by_token,
    "clip_cov": _by_token,
    "gspo": _by_row,
    "gmpo": _by_exponent,
    "dppo": _by_divergence,
}


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
