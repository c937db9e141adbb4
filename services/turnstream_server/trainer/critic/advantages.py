"""Advantages of a step from the values of a critic, before the first update of the step.

All mini-batches of the step are scored under the weights at its start. Rewards, values and
generalised advantage estimation have no mini-batch in them. Whitening has all trained tokens of the
step on all ranks. Advantages, values and returns stay fixed in all epochs of the step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turnstream.batching.config.values import RewardSource
from turnstream.batching.layouts.outputs import ResponseValues, join_by_row_id
from turnstream.batching.merge.buffers import row_sums
from turnstream.batching.rows.assemble import joined_column
from turnstream.batching.scoring.token_advantages import (
    gae,
    token_rewards,
    vapo_lambda,
    whiten_tokens,
)
from turnstream.types import Ragged, Rows
from turnstream.worker import PulledMiniBatch
from turnstream_server.trainer.critic.config import GaeSettings
from turnstream_server.trainer.critic.critic import Critic, with_targets
from turnstream_server.trainer.ranks import Ranks

Scored = tuple[PulledMiniBatch, list[Tensor] | None]
"""A mini-batch, and its old log-probabilities if the objective needs them."""

_LEAST_VARIANCE: Final = 1e-8
"""Variance of returns below which no share of it is reported: they hardly differ."""


class _Estimate(NamedTuple):
    """Numbers of the response tokens of one mini-batch; 0 if untrained."""

    rows: Rows
    values: Ragged[Any]
    advantages: Ragged[np.float32]
    returns: Ragged[np.float32]


def with_advantages(
    scored: Iterable[Scored],
    *,
    critic: Critic,
    source: RewardSource,
    penalties: Callable[[PulledMiniBatch, list[Tensor] | None], ResponseValues | None],
    ranks: Ranks,
) -> Iterator[Scored]:
    """Yield the mini-batches of a step with advantages, and with what `Critic.update` reads.

    Every rank calls it. The mini-batches of all epochs are in memory together. The critic keeps
    the statistics of the step. `penalties` are subtracted from the rewards of tokens, by row id.
    """
    of_step = list(scored)
    first = {mini_batch.info.mini_batch: (mini_batch, old) for mini_batch, old in of_step}
    estimates: list[_Estimate] = []
    for mini_batch, old in first.values():
        rows = mini_batch.rows
        rewards = token_rewards(rows, source=source)
        subtracted = penalties(mini_batch, old)
        if subtracted is not None:
            penalty = join_by_row_id([subtracted], rows)
            rewards = Ragged(rewards.values - penalty.values, rewards.offsets)
        values = critic.values(mini_batch)
        estimates.append(_estimate(rows, rewards, values, settings=critic.settings))
    critic.step_statistics = _statistics(estimates, ranks=ranks)
    if critic.settings.whiten == "true":
        estimates = _whitened(estimates, ranks=ranks)
    ready = dict(zip(first, estimates, strict=True))
    for mini_batch, old in of_step:
        estimate = ready[mini_batch.info.mini_batch]
        rows = dataclasses.replace(estimate.rows, advantages=estimate.advantages)
        ready_batch = dataclasses.replace(mini_batch, rows=rows)
        yield with_targets(ready_batch, values=estimate.values, returns=estimate.returns), old


def _estimate(
    rows: Rows, rewards: Ragged[np.float32], values: Ragged[Any], *, settings: GaeSettings
) -> _Estimate:
    """Return the estimates of a mini-batch, before whitening."""
    lam: float | NDArray[np.float64] = settings.lam
    if settings.length_alpha is not None:
        lam = vapo_lambda(row_sums(rows.loss_mask, np.int64), alpha=settings.length_alpha)
    value_lam = settings.lam if settings.value_lam is None else settings.value_lam
    known = {"rewards": rewards, "values": values, "gamma": settings.gamma}
    advantages, _ = gae(rows, **known, lam=lam)
    _, returns = gae(rows, **known, lam=value_lam)
    return _Estimate(rows, values, advantages, returns)


def _whitened(estimates: Sequence[_Estimate], *, ranks: Ranks) -> list[_Estimate]:
    """Return the estimates with advantages of mean 0 and variance 1 over the step."""
    white = whiten_tokens(
        joined_column([each.advantages for each in estimates]),
        loss_mask=joined_column([each.rows.loss_mask for each in estimates]),
        sum_ranks=lambda number: math.fsum(ranks.gather(number)),
    )
    bounds = itertools.pairwise(np.cumsum([0, *[len(each.rows) for each in estimates]]).tolist())
    cuts = [Ragged(white.values, white.offsets[a : b + 1]).flat() for a, b in bounds]
    return [each._replace(advantages=cut) for each, cut in zip(estimates, cuts, strict=True)]


def _statistics(estimates: Sequence[_Estimate], *, ranks: Ranks) -> dict[str, float]:
    """Return means of values and returns, and the explained variance, over the trained tokens."""
    values_N, returns_N = (
        np.concatenate([_trained(getattr(each, name), each.rows) for each in estimates])
        for name in ("values", "returns")
    )

    def totals(*columns: NDArray[np.float64]) -> list[float]:
        own = [math.fsum(column) for column in columns]
        return [math.fsum(column) for column in zip(*ranks.gather(own), strict=True)]

    count, value_sum, return_sum = totals(np.ones(len(values_N)), values_N, returns_N)
    value_mean, return_mean = (each / max(1.0, count) for each in (value_sum, return_sum))
    deviation_N = returns_N - return_mean
    error_N = deviation_N - (values_N - value_mean)
    unexplained, total = totals(error_N**2, deviation_N**2)
    is_known = total > _LEAST_VARIANCE * count
    return {
        "value_mean": value_mean,
        "return_mean": return_mean,
        "explained_variance": 1.0 - unexplained / total if is_known else math.nan,
    }


def _trained(column: Ragged[Any], rows: Rows) -> NDArray[np.float64]:
    is_trained = rows.loss_mask.flat().values.astype(np.bool_)
    return column.flat().values[is_trained].astype(np.float64)
