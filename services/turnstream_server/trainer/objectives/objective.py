"""The objective of a trainer: loss and statistics of a micro-batch, from log-probabilities.

    loss = aggregate(policy loss * weights of the corrections)
         + aggregate(KL coefficient * KL - entropy bonus * entropy)

A sum over micro-batches and ranks is the loss of the mini-batch, independent of its cuts. Where a
quantity depends on the whole mini-batch, `prepare` computes it before the first loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnstream.batching.config.values import Aggregation
from turnstream.types import Rows
from turnstream.worker import corrections, losses, policy_losses
from turnstream.worker.losses import aggregate, masked
from turnstream.worker.tensors import RowTensors
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.named_settings import NamedSettings
from turnstream_server.trainer.objectives.parameters import ClipCov, KlCov, KlPenalty
from turnstream_server.trainer.objectives.scores import (
    Gather,
    PreparedPart,
    TokenScores,
    one_rank,
    selected_tokens,
)
from turnstream_server.trainer.objectives.statistics import Statistics, recounted

LOSS_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": losses.ppo_clip,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "decoupled_ppo": losses.decoupled_ppo,
    "dppo": policy_losses.dppo,
    "sapo": policy_losses.sapo,
    "gmpo": policy_losses.gmpo,
    "clip_cov": policy_losses.clip_cov,
    "kl_cov": policy_losses.kl_cov,
    "cross_entropy": losses.cross_entropy,
}
CORRECTION_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "tis": corrections.tis,
    "icepop": corrections.icepop,
    "mis": corrections.mis,
    "row_veto": corrections.row_veto,
    "seq_mask_tis": corrections.seq_mask_tis,
    "opsm": corrections.opsm,
}
KL_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "k1": losses.kl_k1,
    "k2": losses.kl_k2,
    "k3": losses.kl_k3,
}

_MAX_CHANGE = 0.2
"""Largest relative change of an adaptive coefficient within `horizon` trajectories."""


class Objective:
    """Loss and statistics of an objective.

    Args:
        config: the settings.
        gather: returns the values of all ranks. An engine with one rank passes nothing.

    Attributes:
        kl_coefficient: factor of the KL in the next update; 0 without a KL.
        needs_reference: whether `TokenScores.reference_BR` is read.
        penalises_rewards: whether `token_penalty` is subtracted from rewards.
        needs_entropies: whether `TokenScores.entropies_BR` is read.
        needs_preparation: whether `prepare` must see all micro-batches before the first loss.
        prepares_with_current: whether it reads `TokenScores.current_BR`.
    """

    def __init__(self, config: ObjectiveConfig, *, gather: Gather = one_rank) -> None:
        self.config = config
        self.kl_coefficient = 0.0 if config.kl is None else config.kl.coefficient
        self.needs_reference = config.kl is not None
        self.penalises_rewards = config.kl is not None and config.kl.place == "reward"
        self.needs_entropies = config.entropy_bonus > 0
        names = [each.name for each in config.corrections]
        self._selects = isinstance(config.loss, ClipCov | KlCov)
        self._rescales = "rescaled" in names
        self._recounts = config.denominators == "recount"
        self.needs_preparation = self._selects or self._rescales or self._recounts
        self.prepares_with_current = self._selects or "opsm" in names
        self._gather = gather
        self._statistics = Statistics(config)

    def prepare(
        self,
        parts: Sequence[RowTensors],
        scores: Sequence[TokenScores],
        *,
        rows: Rows,
        seed: int,
    ) -> list[PreparedPart]:
        """Return all micro-batches of a rank's share, with what depends on the whole mini-batch.

        Every rank calls it, also one of inert rows alone. No gradient is kept.

        Args:
            parts: the micro-batches.
            scores: one for each, without a gradient.
            rows: the share.
            seed: decides random choices. It is the number of the update: a restart repeats them.
        """
        with torch.no_grad():
            prepared = [self.prepare_alone(p, s) for p, s in zip(parts, scores, strict=True)]
            if self._rescales:
                prepared = self._rescaled(prepared)
            if self._recounts:
                kept = [_kept_tokens(each) for each in prepared]
                counted = recounted(parts, kept, rows=rows, gather=self._gather)
                prepared = [replace(p, counted=c) for p, c in zip(prepared, counted, strict=True)]
            if isinstance(self.config.loss, ClipCov | KlCov):
                chosen = selected_tokens(
                    self.config.loss, prepared, scores, seed=seed, gather=self._gather
                )
                prepared = [
                    replace(p, selected_BR=c) for p, c in zip(prepared, chosen, strict=True)
                ]
        return prepared

    def prepare_alone(self, part: RowTensors, scores: TokenScores) -> PreparedPart:
        """Return one micro-batch; enough where `needs_preparation` is False."""
        with torch.no_grad():
            advantages_BR = self._advantages(part, scores)
            columns = {
                **scores.columns(),
                "advantages_BR": advantages_BR,
                "mask_BR": part.trained_tokens,
                "row_of": part.row_of,
            }
            weights = tuple(
                _call(CORRECTION_FUNCTIONS[each.name], each, columns)
                for each in self.config.corrections
                if each.name in CORRECTION_FUNCTIONS
            )
        return PreparedPart(part=part, counted=part, advantages_BR=advantages_BR, weights=weights)

    def loss(
        self, prepared: PreparedPart, scores: TokenScores, *, aggregation: Aggregation
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of one micro-batch, with a gradient, and its row for `report`."""
        part = prepared.part
        columns = {
            **scores.columns(),
            "advantages_BR": prepared.advantages_BR,
            "mask_BR": part.trained_tokens,
            "row_of": part.row_of,
            "selected_BR": prepared.selected_BR,
        }
        policy_BR = _call(LOSS_FUNCTIONS[self.config.loss.name], self.config.loss, columns)
        if prepared.weight_BR is not None:
            policy_BR = policy_BR * masked(prepared.weight_BR, mask_BR=part.trained_tokens)
        counted = prepared.counted
        total = aggregate(policy_BR, counted, mode=aggregation, denominators=counted.denominators)
        kl_BR = self._reference_kl(part, scores)
        penalty_BR = self._penalty(part, scores, kl_BR)
        if penalty_BR is not None:
            total = total + aggregate(
                penalty_BR, part, mode=aggregation, denominators=part.denominators
            )
        with torch.no_grad():
            row = self._statistics.measure(prepared, scores, kl_BR=kl_BR, loss=total.detach())
        return total, row

    def token_penalty(self, part: RowTensors, scores: TokenScores) -> Tensor:
        """Return coefficient * KL(old || reference) of each token, (B, R)."""
        kl = self.config.kl
        assert kl is not None
        return self.kl_coefficient * _estimate(kl, scores.old_BR, scores.reference_BR, part)

    def report(self, rows: Sequence[Tensor], *, num_tokens: int) -> dict[str, float]:
        """Return the statistics of a mini-batch of so many trained tokens, over all ranks.

        `rows` are those of `loss`, for each micro-batch of this rank.
        """
        found = self._statistics.combine(self._gather(self._statistics.total(rows)), num_tokens)
        if self.config.kl is not None:
            found["kl_coefficient"] = self.kl_coefficient
        return found

    def adapt(self, statistics: Mapping[str, float], *, num_trajectories: int) -> None:
        """Change the KL coefficient after an update, by the statistics that `report` returned."""
        kl = self.config.kl
        if kl is not None and kl.target is not None:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient,
                kl=statistics["kl_reference"],
                target=kl.target,
                share=min(1.0, num_trajectories / kl.horizon),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; empty if nothing adapts."""
        kl = self.config.kl
        return {} if kl is None or kl.target is None else {"kl_coefficient": self.kl_coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`; a fixed KL keeps the coefficient of the settings."""
        if self.state_dict() and state:
            self.kl_coefficient = state["kl_coefficient"]

    def _advantages(self, part: RowTensors, scores: TokenScores) -> Tensor:
        """Return the advantages, minus coefficient * KL(old || reference) if it is placed there."""
        kl = self.config.kl
        if kl is None or kl.place != "advantage":
            return part.advantages
        return part.advantages - self.token_penalty(part, scores)

    def _reference_kl(self, part: RowTensors, scores: TokenScores) -> Tensor | None:
        kl = self.config.kl
        if kl is None:
            return None
        policy_BR = scores.current_BR if kl.place == "loss" else scores.old_BR
        return _estimate(kl, policy_BR, scores.reference_BR, part)

    def _penalty(
        self, part: RowTensors, scores: TokenScores, kl_BR: Tensor | None
    ) -> Tensor | None:
        """Return KL and entropy bonus of every token, (B, R); None without both."""
        kl, penalty_BR = self.config.kl, None
        if kl_BR is not None and kl is not None and kl.place == "loss":
            penalty_BR = self.kl_coefficient * kl_BR
        if scores.entropies_BR is not None and self.needs_entropies:
            bonus_BR = losses.entropy_bonus(
                scores.entropies_BR,
                mask_BR=part.trained_tokens,
                coefficient=self.config.entropy_bonus,
            )
            penalty_BR = bonus_BR if penalty_BR is None else penalty_BR + bonus_BR
        return penalty_BR

    def _rescaled(self, prepared: Sequence[PreparedPart]) -> list[PreparedPart]:
        """Return the micro-batches with a further weight: their mean weight over all ranks is 1."""
        weights = [masked(_weight(each), mask_BR=each.part.trained_tokens) for each in prepared]
        own = sum(each.sum(dtype=torch.float64).item() for each in weights)
        weight_sum = sum(self._gather(own))
        return [
            replace(
                each,
                weights=(
                    *each.weights,
                    corrections.rescaled(
                        torch.ones_like(weight_BR),
                        weight_sum=weight_sum,
                        num_tokens=each.part.denominators.num_tokens,
                    ),
                ),
            )
            for each, weight_BR in zip(prepared, weights, strict=True)
        ]


def adapted_coefficient(coefficient: float, *, kl: float, target: float, share: float) -> float:
    """Return the coefficient changed by at most `share` * 20 %, up if the KL is above its target.

    The controller of arXiv:1909.08593, section 2.2. `share` is trajectories / horizon, at most 1.

    >>> adapted_coefficient(0.1, kl=0.3, target=0.1, share=0.5)
    0.11000000000000001
    """
    error = max(-_MAX_CHANGE, min(_MAX_CHANGE, kl / target - 1.0))
    return coefficient * (1.0 + error * share)


def _estimate(
    kl: KlPenalty, policy_BR: Tensor, reference_BR: Tensor | None, part: RowTensors
) -> Tensor:
    assert reference_BR is not None
    return KL_FUNCTIONS[kl.name](policy_BR, reference_BR=reference_BR, mask_BR=part.trained_tokens)


def _weight(prepared: PreparedPart) -> Tensor:
    assert prepared.weight_BR is not None
    return prepared.weight_BR


def _kept_tokens(prepared: PreparedPart) -> Tensor:
    return prepared.part.trained_tokens & (_weight(prepared) != 0)


def _call(
    function: Callable[..., Tensor], settings: NamedSettings, columns: dict[str, Any]
) -> Tensor:
    """Return the result for those parameters and columns that the function has."""
    known = inspect.signature(function).parameters
    given = {**columns, **settings.parameters()}
    return function(**{name: value for name, value in given.items() if name in known})
