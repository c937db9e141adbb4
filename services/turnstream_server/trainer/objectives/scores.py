"""Numbers of one micro-batch that an objective reads: log-probabilities, weights and counts.

Tensors named `_BR` have the shape of the loss mask, in any layout. Log-probabilities are natural
and of the sampled token, float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnstream.worker.layouts import PackedTensors
from turnstream.worker.tensors import LeftPaddedTensors, RowTensors

Gather = Callable[[Any], list[Any]]
"""Returns the values that all ranks pass, in the order of the ranks. All ranks must call it."""


def one_rank(value: Any) -> list[Any]:
    """Return the values of all ranks where there is one rank."""
    return [value]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Log-probabilities of the tokens of a micro-batch; only those in the loss mask are read.

    Attributes:
        current_BR: under the weights in training, with a gradient.
        old_BR: under the weights at the start of the step, or the generator's.
        behaviour_BR: the generator's; without NaN inside the loss mask.
        reference_BR: under the reference policy; None without one.
        entropies_BR: entropy of the policy at each token in nats, with a gradient; None if the
            objective does not need it.
    """

    current_BR: Tensor
    old_BR: Tensor
    behaviour_BR: Tensor
    reference_BR: Tensor | None = None
    entropies_BR: Tensor | None = None

    def columns(self) -> Mapping[str, Tensor]:
        """Return the arguments of losses and corrections, by their names."""
        names = ("current_BR", "old_BR", "behaviour_BR")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedPart:
    """One micro-batch before its loss.

    Attributes:
        part: the rows as shipped.
        counted: rows and denominators that average the policy loss; other than `part` if the
            tokens that a correction drops are not counted.
        advantages_BR: with the KL penalty, if it is part of them.
        weights: one tensor (B, R) for each correction, in their order.
        selected_BR: bool, tokens that the loss treats in another way; None for most losses.
    """

    part: RowTensors
    counted: RowTensors
    advantages_BR: Tensor
    weights: tuple[Tensor, ...]
    selected_BR: Tensor | None = None

    @property
    def weight_BR(self) -> Tensor | None:
        """Product of the weights; None without a correction."""
        return reduce(torch.mul, self.weights) if self.weights else None


class KnownPart(NamedTuple):
    """A micro-batch, and its log-probabilities under weights that the update does not change."""

    part: LeftPaddedTensors | PackedTensors
    old_BR: Tensor | None
    reference_BR: Tensor | None


def token_scores(
    known: KnownPart, current_BR: Tensor, *, entropies_BR: Tensor | None = None
) -> tuple[TokenScores, Tensor]:
    """Return the numbers that an objective reads, and the rows without logprobs, bool (B,)."""
    fallback_BR = current_BR.detach() if known.old_BR is None else known.old_BR
    behaviour_BR, missing_B = filled_behaviour(known.part, fallback_BR)
    scores = TokenScores(
        current_BR=current_BR,
        old_BR=behaviour_BR if known.old_BR is None else known.old_BR,
        behaviour_BR=behaviour_BR,
        reference_BR=known.reference_BR,
        entropies_BR=entropies_BR,
    )
    return scores, missing_B


def lacks_logprobs(part: RowTensors) -> bool:
    """Return whether a trained token has no log-probability of the generator."""
    behaviour_BR = part.logprobs
    return behaviour_BR is None or bool((behaviour_BR.isnan() & part.trained_tokens).any())


def filled_behaviour(part: RowTensors, fallback_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Return the generator's log-probabilities, (B, R), and the rows without them, bool (B,).

    One trained token without is enough. Those rows have the values of `fallback_BR`, so that their
    ratio to it is 1.
    """
    mask_BR = part.trained_tokens
    behaviour_BR = part.logprobs
    if behaviour_BR is None:
        return fallback_BR, part.row_sums(mask_BR.long()) > 0
    missing_B = part.row_sums((behaviour_BR.isnan() & mask_BR).long()) > 0
    return torch.where(part.per_token(missing_B), fallback_BR, behaviour_BR), missing_B
