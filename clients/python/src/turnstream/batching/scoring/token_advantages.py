"""Advantages that differ from token to token of a trajectory: GAE and REINFORCE++ returns.

They follow the chain of a trajectory's trained tokens. Values and advantages are carried over the
tokens in between unchanged, at no discount, and a reward on one counts for the trained token before
it. A trajectory that was split into several rows has its chain cut, so it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.values import RewardSource
from turnstream.batching.merge.buffers import offsets_of, row_sums
from turnstream.batching.scoring.advantages import WHITENING_EPSILON
from turnstream.errors import BatchingError, UnsupportedEstimatorError
from turnstream.types import Ragged, Rows

FloatArray = NDArray[np.float64]


def rewards_on_last_token(
    rewards_B: NDArray[np.floating], *, lengths_B: NDArray[np.integer]
) -> Ragged[np.float32]:
    """Return one reward per row as token rewards: on the last response token, 0.0 before it.

    A row without a response has no token for a reward: BatchingError unless the reward is 0.0.
    """
    offsets = offsets_of(lengths_B)
    is_empty_B = np.asarray(lengths_B) == 0
    lost = np.flatnonzero(is_empty_B & (rewards_B != 0))
    if len(lost):
        row = int(lost[0])
        raise BatchingError(f"row {row} has a reward of {rewards_B[row]} and no response token")
    values = np.zeros(offsets[-1], np.float32)
    values[offsets[1:][~is_empty_B] - 1] = rewards_B[~is_empty_B]
    return Ragged(values, offsets)


def token_rewards(rows: Rows, *, source: RewardSource) -> Ragged[np.float32]:
    """Return one reward per response token; those of a row sum to its planned reward.

    With "sum_of_turns" the rewards stand where the turns have them, and the penalty of the length
    on the last response token. With the other sources all of the reward stands there. A row without
    a response has none, and an inert row has 0.0.

    Args:
        rows: each row is a whole trajectory.
        source: `reward_source` of the run.
    """
    counted_B = ~rows.is_padding & (rows.response_lengths > 0)
    rewards_B = np.where(counted_B, rows.reward, np.float32(0))
    lengths_B = rows.response_lengths
    if source != "sum_of_turns":
        return rewards_on_last_token(rewards_B, lengths_B=lengths_B)
    of_turns = rows.rewards.flat()
    penalty_B = rewards_B - row_sums(of_turns, np.float64)
    on_last = rewards_on_last_token(np.where(counted_B, penalty_B, 0.0), lengths_B=lengths_B)
    return Ragged(of_turns.values + on_last.values, of_turns.offsets)


def gae(
    rows: Rows,
    *,
    rewards: Ragged[np.float32],
    values: Ragged[np.float32],
    gamma: float = 1.0,
    lam: float | FloatArray = 0.95,
) -> tuple[Ragged[np.float32], Ragged[np.float32]]:
    """Return advantages and returns of every response token, 0.0 where it is not trained.

    Generalised advantage estimation (arXiv:1506.02438, eq. 16); after the last trained token, the
    value is 0. Returns are advantage + value; whiten the advantages afterwards.
    """
    chain = _Chain(rows, estimator="gae")
    chain_rewards = chain.collect_rewards(rewards)
    chain_values = chain.collect(values)
    values_ahead = np.zeros(len(chain_values))
    values_ahead[:-1] = np.where(chain.num_ahead[:-1] > 0, chain_values[1:], 0.0)
    delta = chain_rewards + gamma * values_ahead - chain_values
    decay = gamma * np.broadcast_to(np.asarray(lam, np.float64), len(rows))
    advantages = chain.sum_ahead(delta, decay_B=decay)
    return chain.spread(advantages), chain.spread(advantages + chain_values)


def reinforce_plus_plus(
    rows: Rows, *, rewards: Ragged[np.float32], gamma: float = 1.0
) -> Ragged[np.float32]:
    """Return whitened discounted returns of every response token, 0.0 where it is not trained.

    REINFORCE++ (arXiv:2501.03262). Pass the rows of the whole batch and of all ranks, because its
    trained tokens are whitened together.
    """
    return whiten_tokens(
        token_returns(rows, rewards=rewards, gamma=gamma), loss_mask=rows.loss_mask
    )


def token_returns(
    rows: Rows, *, rewards: Ragged[np.float32], gamma: float = 1.0
) -> Ragged[np.float32]:
    """Discounted return-to-go of every response token; see `reinforce_plus_plus`."""
    chain = _Chain(rows, estimator="reinforce_pp")
    decay = np.full(len(rows), gamma)
    return chain.spread(chain.sum_ahead(chain.collect_rewards(rewards), decay_B=decay))


def whiten_tokens(
    values: Ragged[np.float32],
    *,
    loss_mask: Ragged[np.uint8],
    sum_ranks: Callable[[float], float] = float,
) -> Ragged[np.float32]:
    """Return (x - mean) / sqrt(var + 1e-8) over trained tokens only, 0.0 on all others.

    Sums are rounded once, so the order of the rows has no effect.

    Args:
        values: one per response token; all ranks' rows, or one rank's if `sum_ranks` is passed.
        loss_mask: one number per value.
        sum_ranks: returns the sum of a number over all ranks. Each rank calls it three times.
    """
    values, loss_mask = values.flat(), loss_mask.flat()
    is_trained = loss_mask.values.astype(np.bool_)
    white = np.zeros(len(values.values), np.float32)
    trained = values.values[is_trained].astype(np.float64)
    count = max(1.0, sum_ranks(len(trained)))
    deviation = trained - sum_ranks(math.fsum(trained)) / count
    variance = sum_ranks(math.fsum(deviation**2)) / count
    white[is_trained] = deviation / np.sqrt(variance + WHITENING_EPSILON)
    return Ragged(white, values.offsets)


def vapo_lambda(num_trained_B: NDArray[np.integer], *, alpha: float = 0.05) -> FloatArray:
    """Float64 (B,): 1 - 1 / (alpha * T), longer chains look further (VAPO, arXiv:2504.05118).

    0 where alpha * T is 1 or less.
    """
    reach = np.maximum(alpha * np.asarray(num_trained_B, np.float64), 1.0)
    return 1.0 - 1.0 / reach


class _Chain:
    """The trained tokens of all rows, one after the other, each row a segment.

    Attributes:
        num_ahead: int64 (N,), trained tokens behind each in its row.
    """

    def __init__(self, rows: Rows, *, estimator: str) -> None:
        _require_whole(rows, estimator=estimator)
        self._mask = rows.loss_mask.flat()
        self._is_trained = self._mask.values.astype(np.bool_)
        ends = np.concatenate(([0], np.cumsum(self._is_trained)))[self._mask.offsets]
        self._num_trained_B = np.diff(ends)
        # Where each row's trained tokens begin, for each of its response tokens.
        self._row_start = np.repeat(ends[:-1], self._mask.lengths)
        places: NDArray[np.int64] = np.arange(1, ends[-1] + 1, dtype=np.int64)
        self.num_ahead = np.repeat(ends[1:], self._num_trained_B) - places

    def collect(self, values: Ragged[np.float32]) -> FloatArray:
        """Return the values at the trained tokens."""
        return self._aligned(values)[self._is_trained].astype(np.float64)

    def collect_rewards(self, rewards: Ragged[np.float32]) -> FloatArray:
        """Return the sum of the rewards at each trained token and after it, before the next one.

        A reward before a row's first trained token has no token that earned it and is left out.
        """
        per_token = self._aligned(rewards)
        last_trained = np.cumsum(self._is_trained) - 1
        has_one = last_trained >= self._row_start
        sums = np.bincount(
            last_trained[has_one],
            weights=per_token[has_one],
            minlength=len(self.num_ahead),
        )
        return sums.astype(np.float64)

    def sum_ahead(self, values: FloatArray, *, decay_B: FloatArray) -> FloatArray:
        """Return x_t = values_t + decay * x_(t+1) inside each row.

        Each pass doubles how far a token has looked ahead: log2(longest row) passes over flat
        arrays.
        """
        sums = values.copy()
        reach_decay = np.repeat(decay_B, self._num_trained_B)
        reach = 1
        longest = int(self._num_trained_B.max(initial=0))
        while reach < longest and reach_decay.any():
            ahead = reach_decay[:-reach] * sums[reach:]
            sums[:-reach] += np.where(self.num_ahead[:-reach] >= reach, ahead, 0.0)
            reach_decay = reach_decay * reach_decay
            reach *= 2
        return sums

    def spread(self, chain: FloatArray) -> Ragged[np.float32]:
        """Back to one value per response token, 0.0 where it is not trained."""
        values = np.zeros(len(self._is_trained), np.float32)
        values[self._is_trained] = chain
        return Ragged(values, self._mask.offsets)

    def _aligned(self, values: Ragged[np.float32]) -> NDArray[np.float32]:
        if not np.array_equal(values.lengths, self._mask.lengths):
            raise BatchingError("one value per response token is needed, row by row")
        return values.flat().values


def _require_whole(rows: Rows, *, estimator: str) -> None:
    is_part = ~rows.is_padding & (~rows.is_last | (rows.sequence_index > 0))
    parts = np.flatnonzero(is_part)
    if len(parts):
        raise UnsupportedEstimatorError(
            f"{estimator} follows the tokens of a whole trajectory, and "
            f"{rows.trajectory_id[int(parts[0])]} is split into several rows"
        )
