"""Clip-Cov and KL-Cov select the same tokens for every cut, layout and order of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from testkit.training.training import make_mini_batch
from turnstream.worker import PulledMiniBatch
from turnstream.worker.layouts import jagged_to_torch, packed_to_torch
from turnstream.worker.tensors import RowTensors, to_torch
from turnstream_server.trainer.objectives.parameters import ClipCov, KlCov
from turnstream_server.trainer.objectives.scores import (
    PreparedPart,
    TokenScores,
    one_rank,
    selected_tokens,
)

LOGPROBS = np.array([-1.0, -2.0, -3.0, -0.5, -1.5, -0.2, -4.0, -0.1, -6.0])
"""Four rows with 3, 1, 3 and 2 trained tokens."""


def _chosen(
    settings: Any,
    parts: Sequence[RowTensors],
    *,
    logprobs: np.ndarray = LOGPROBS,
    seed: int = 0,
) -> dict[int, list[bool]]:
    """Return row id to the choice of its trained tokens, in order."""
    by_row = dict(zip(range(4), np.split(logprobs, [3, 4, 7]), strict=True))
    prepared, scores = [], []
    for part in parts:
        ids = part.row_id_B.tolist()
        current_BR = torch.full(part.trained_tokens.shape, float("nan"))
        current = np.concatenate([by_row[row_id] for row_id in ids])
        current_BR[part.trained_tokens] = torch.from_numpy(current).float()
        scores.append(
            TokenScores(current_BR=current_BR, old_BR=current_BR, behaviour_BR=current_BR)
        )
        advantages_BR = part.advantages
        prepared.append(
            PreparedPart(part=part, counted=part, advantages_BR=advantages_BR, weights=())
        )
    found = selected_tokens(settings, prepared, scores, seed=seed, gather=one_rank)
    chosen: dict[int, list[bool]] = {}
    for part, selected_BR in zip(parts, found, strict=True):
        assert not selected_BR[~part.trained_tokens].any()
        ids = part.row_id_B.tolist()
        values = selected_BR[part.trained_tokens].tolist()
        for row_id in ids:
            chosen[row_id] = [values.pop(0) for _ in by_row[row_id]]
    return chosen


def _whole(mini_batch: PulledMiniBatch) -> list[RowTensors]:
    return list(to_torch(mini_batch).micro_batches())


def _flat(chosen: dict[int, list[bool]]) -> np.ndarray:
    return np.concatenate([chosen[row_id] for row_id in sorted(chosen)])


def _covariances(mini_batch: PulledMiniBatch) -> np.ndarray:
    advantages = np.repeat(mini_batch.rows.advantage.astype(float), [3, 1, 3, 2])
    return (LOGPROBS - LOGPROBS.mean()) * (advantages - advantages.mean())


def test_clip_cov_selects_random_tokens_inside_its_range() -> None:
    mini_batch = make_mini_batch()
    covariances = _covariances(mini_batch)
    inside = (covariances > 0.0) & (covariances < 2.0)
    settings = ClipCov(share=0.23, low=0.0, high=2.0)

    chosen = [_flat(_chosen(settings, _whole(mini_batch), seed=seed)) for seed in range(40)]

    assert 2 < inside.sum() < 9
    assert {each.sum() for each in chosen} == {2}
    assert (np.any(chosen, axis=0) == inside).all()


def test_rounding_errors_do_not_decide_between_equal_covariances() -> None:
    logprobs = np.array([-1.0, -1.0, -1.0, -3.0, -2.0, -2.0, -2.0, -4.0, -4.0])
    noisy = logprobs - np.array([0.0, 1.2e-7, 6e-8, *[0.0] * 6])
    parts = _whole(make_mini_batch())

    for seed in range(10):
        exact, other = (
            _chosen(KlCov(share=0.45), parts, logprobs=each, seed=seed)
            for each in (logprobs, noisy)
        )
        assert exact == other
        assert (sum(exact[3]), sum(exact[0])) == (2, 2)  # two of three equal ones


@pytest.mark.parametrize(
    "settings", [KlCov(share=0.4), ClipCov(share=0.4, low=-0.5, high=2.0)], ids=lambda s: s.name
)
@pytest.mark.parametrize("advantages", [(1.0, -0.5, 0.25, -1.5), (0.1, 0.1, 0.1, 0.1)], ids=str)
def test_choice_is_the_same_for_every_cut_and_layout(settings: Any, advantages: Any) -> None:
    # Equal advantages have covariances of 0, or almost: the hash decides.
    mini_batch = make_mini_batch(advantages=advantages)
    cuts = [((0, 1), (2, 3)), ((3,), (1, 0), (2,)), ((2, 0, 3, 1),)]
    shares = [replace(mini_batch, info=replace(mini_batch.info, micro_batches=c)) for c in cuts]
    expected = _chosen(settings, _whole(mini_batch))

    others: list[Sequence[RowTensors]] = [_whole(share) for share in shares]
    others += [packed_to_torch(share) for share in shares]
    others += [[jagged_to_torch(mini_batch)]]

    assert _flat(expected).sum() == 3
    for parts in others:
        assert _chosen(settings, parts) == expected


def test_choice_of_equal_tokens_changes_with_the_seed() -> None:
    parts = _whole(make_mini_batch(advantages=(0.1, 0.1, 0.1, 0.1)))

    chosen = {str(_chosen(KlCov(share=0.4), parts, seed=seed)) for seed in range(10)}

    assert len(chosen) > 5
