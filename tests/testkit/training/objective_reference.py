"""Loss of an objective by loops over tokens, in float64: slow, and without code of the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MIS = {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.9999, 1.0001)}


@dataclass(kw_only=True)
class Token:
    """One trained token. `current` and `entropy` are float64 scalars with a gradient."""

    row: int
    trajectory: str
    group: str
    row_weight: float
    weight: float
    current: Tensor
    entropy: Tensor
    old: float
    behaviour: float
    reference: float
    advantage: float


def reference_loss(
    config: Any, tokens: Sequence[Token], *, aggregation: str, length_constant: int
) -> Tensor:
    """Return the loss of a mini-batch, a float64 scalar with a gradient.

    `config` is an ObjectiveConfig. Clip-Cov must select all of its candidates: their order is not
    reproduced here.
    """
    kl = config.kl
    advantages = [each.advantage for each in tokens]
    if kl is not None and kl.place == "advantage":
        advantages = [
            a - kl.coefficient * _kl(kl.name, _number(each.old), each.reference).item()
            for a, each in zip(advantages, tokens, strict=True)
        ]
    names = [each for each in config.corrections if each.name != "rescaled"]
    by_correction = [_weights(each, tokens, advantages) for each in names]
    weights = [math.prod(column) for column in zip(*by_correction, strict=True)] or [1.0] * len(
        tokens
    )
    if len(names) < len(config.corrections):
        total = sum(weights)
        weights = [weight * len(tokens) / total if total else 0.0 for weight in weights]
    losses = _PolicyLoss(config.loss, tokens, advantages).all()
    policy = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
    counted = [config.denominators == "shipped" or weight != 0 for weight in weights]
    result = _average(policy, tokens, counted, mode=aggregation, constant=length_constant)
    others = [-config.entropy_bonus * each.entropy for each in tokens]
    if kl is not None and kl.place == "loss":
        penalties = [kl.coefficient * _kl(kl.name, each.current, each.reference) for each in tokens]
        others = [a + b for a, b in zip(others, penalties, strict=True)]
    everything = [True] * len(tokens)
    return result + _average(others, tokens, everything, mode=aggregation, constant=length_constant)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _exp(exponent: Any) -> Any:
    if isinstance(exponent, Tensor):
        return exponent.clamp(-20, 20).exp()
    return math.exp(max(-20.0, min(20.0, exponent)))


def _kl(name: str, policy: Tensor, reference: float) -> Tensor:
    x = policy - reference
    return {"k1": x, "k2": x * x / 2, "k3": _exp(-x) - 1 + x}[name]


def _of_row(tokens: Sequence[Token], values: Sequence[Any], row: int) -> list[Any]:
    return [value for each, value in zip(tokens, values, strict=True) if each.row == row]


def _mean(values: Sequence[Any]) -> Any:
    return sum(values) / len(values)


def _weights(settings: Any, tokens: Sequence[Token], advantages: Sequence[float]) -> list[float]:
    """Return the weight of each token by one correction."""
    gaps = [each.old - each.behaviour for each in tokens]
    moves = [each.old - each.current.item() for each in tokens]

    def ratio(index: int, level: str) -> float:
        own = _of_row(tokens, gaps, tokens[index].row)
        by_level = {"token": gaps[index], "sequence": sum(own), "geometric": _mean(own)}
        return _exp(by_level[level])

    def row_ratios(index: int) -> list[float]:
        return [_exp(gap) for gap in _of_row(tokens, gaps, tokens[index].row)]

    def weight(i: int) -> float:
        s = settings
        match s.name:
            case "tis":
                return max(s.floor, min(s.cap, ratio(i, s.level)))
            case "icepop":
                return ratio(i, "token") if s.low <= ratio(i, "token") <= s.high else 0.0
            case "mis":
                low, high = _MIS[s.level]
                low, high = low if s.low is None else s.low, high if s.high is None else s.high
                is_inside = low <= ratio(i, s.level) <= high
                return float(is_inside and min(row_ratios(i)) >= s.veto_below)
            case "row_veto":
                return float(all(s.low <= each <= s.high for each in row_ratios(i)))
            case "seq_mask_tis":
                is_inside = s.low <= ratio(i, "geometric") <= s.high
                return ratio(i, "token") if is_inside else 0.0
            case _:
                moved = _mean(_of_row(tokens, moves, tokens[i].row))
                return float(not (advantages[i] < 0 and moved > s.delta))

    return [weight(index) for index in range(len(tokens))]


@dataclass
class _PolicyLoss:
    """The policy loss of each token, by the name of the loss."""

    s: Any
    tokens: Sequence[Token]
    advantages: Sequence[float]

    def all(self) -> list[Tensor]:
        return [getattr(self, self.s.name)(index) for index in range(len(self.tokens))]

    def _x(self, i: int) -> Tensor:
        return self.tokens[i].current - self.tokens[i].old

    def _of_row(self, i: int, value: Callable[[int], Tensor]) -> list[Tensor]:
        row = self.tokens[i].row
        return [value(j) for j, each in enumerate(self.tokens) if each.row == row]

    def _clipped(self, u: Tensor, a: float) -> Tensor:
        held = u.clamp(1 - self.s.clip_low, 1 + self.s.clip_high)
        return -torch.minimum(u * a, held * a)

    def ppo_clip(self, i: int) -> Tensor:
        a, dual = self.advantages[i], getattr(self.s, "dual_clip", None)
        loss = self._clipped(_exp(self._x(i)), a)
        return torch.minimum(loss, _number(-dual * a)) if dual is not None and a < 0 else loss

    def gspo(self, i: int) -> Tensor:
        return self._clipped(_exp(_mean(self._of_row(i, self._x))), self.advantages[i])

    def cispo(self, i: int) -> Tensor:
        held = _exp(self._x(i)).clamp(1 - self.s.clip_low, 1 + self.s.clip_high).item()
        return -held * self.advantages[i] * self.tokens[i].current

    def decoupled_ppo(self, i: int) -> Tensor:
        weight = _exp(self.tokens[i].old - self.tokens[i].behaviour)
        return self.ppo_clip(i) * (weight if weight <= self.s.behaviour_cap else 0.0)

    def dppo(self, i: int) -> Tensor:
        before, a = self.tokens[i].behaviour, self.advantages[i]
        moved = self.tokens[i].current - before
        p, q = math.exp(before), math.exp(min(0.0, before + moved.item()))
        divergence, limit = abs(p - q), 0.15
        if self.s.divergence == "kl":
            p, q, limit = min(p, 1 - 1e-7), min(q, 1 - 1e-7), 0.05
            divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        limit = limit if self.s.threshold is None else self.s.threshold
        return 0.0 * moved if a * moved.item() > 0 and divergence > limit else -_exp(moved) * a

    def sapo(self, i: int) -> Tensor:
        a = self.advantages[i]
        t = self.s.temperature_positive if a > 0 else self.s.temperature_negative
        return -4 / t * torch.sigmoid(t * (_exp(self._x(i)) - 1)) * a

    def gmpo(self, i: int) -> Tensor:
        def held(j: int) -> Tensor:
            x, a = self._x(j), self.advantages[j]
            return x.clamp(min=-self.s.clip_low) if a < 0 else x.clamp(max=self.s.clip_high)

        return -_exp(_mean(self._of_row(i, held))) * self.advantages[i]

    def clip_cov(self, i: int) -> Tensor:
        s, u, a = self.s, _exp(self._x(i)).item(), self.advantages[i]
        is_clipped = u > 1 + s.clip_high if a > 0 else u < 1 - s.clip_low
        is_selected = s.low < self._covariances()[i] < s.high and not is_clipped
        return 0.0 * self._x(i) if is_selected else self.ppo_clip(i)

    def kl_cov(self, i: int) -> Tensor:
        covariances = self._covariances()
        least = sorted(covariances)[-max(1, int(self.s.share * len(self.tokens)))]
        penalty = self.s.coefficient * self._x(i).abs() if covariances[i] >= least else 0.0
        return -_exp(self._x(i)) * self.advantages[i] + penalty

    def cross_entropy(self, i: int) -> Tensor:
        return -self.tokens[i].current

    def _covariances(self) -> list[float]:
        logprobs = [each.current.item() for each in self.tokens]
        pairs = zip(logprobs, self.advantages, strict=True)
        mean_logprob, mean = _mean(logprobs), _mean(self.advantages)
        return [(p - mean_logprob) * (a - mean) for p, a in pairs]


def _average(
    losses: Sequence[Any],
    tokens: Sequence[Token],
    counted: Sequence[bool],
    *,
    mode: str,
    constant: int,
) -> Tensor:
    """Return the average over the counted tokens; the others have a loss of 0."""
    kept = [each for each, is_counted in zip(tokens, counted, strict=True) if is_counted]

    def number_of(field: str, each: Token) -> int:
        return sum(getattr(other, field) == getattr(each, field) for other in kept)

    rows = {each.row: each.row_weight for each in kept}
    unit = {"seq_mean_token_mean": "row", "rollout_mean": "trajectory", "prompt_mean": "group"}
    divisor: float = {
        "token_mean": len(kept),
        "constant": sum(rows.values()) * constant,
        "rollout_mean": len({each.trajectory for each in kept}),
        "prompt_mean": len({each.group for each in kept}),
    }.get(mode, sum(rows.values()))
    total = _number(0.0)
    for loss, each, is_counted in zip(losses, tokens, counted, strict=True):
        if is_counted:
            share = number_of(unit[mode], each) if mode in unit else 1
            total = total + each.row_weight * each.weight * loss / share
    return total / (divisor or 1)
