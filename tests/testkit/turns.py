"""Builders of what generators send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.letters import ids, mask
from turnstream.types import (
    NO_PARENT,
    Anchor,
    Group,
    Status,
    StoredTurn,
    Trajectory,
    Turn,
    VersionRun,
)

PerToken = float | Sequence[float] | None
"""One number for every response token, or one each; None leaves the array out."""


def turn(
    prompt: str,
    response: str,
    *,
    logprobs: PerToken = None,
    rewards: PerToken = None,
    weights: PerToken = None,
    version: int | None = None,
    extras: Mapping[str, NDArray[Any]] | None = None,
    anchor: Anchor | None = None,
) -> Turn:
    """A turn from letters: the full prompt, then the response with its trained tokens as capitals.

    A response of capitals alone has no mask, as with most generators. A single number of logprobs
    or weights is written at the trained tokens, one of rewards at the last token.
    """
    loss_mask = mask(response)
    return Turn(
        prompt_ids=ids(prompt),
        response_ids=ids(response),
        logprobs=_per_token(logprobs, where=loss_mask),
        loss_mask=None if loss_mask.all() else loss_mask,
        rewards=_per_token(rewards, where=_last(len(response))),
        token_weights=_per_token(weights, where=loss_mask),
        version_runs=_runs(version, num_tokens=len(response)),
        extras=dict(extras or {}),
        anchor=anchor,
    )


def stored_turn(
    new_prompt: str,
    response: str,
    *,
    index: int = 0,
    parent: int = NO_PARENT,
    shared: int = 0,
    logprobs: PerToken = None,
    rewards: PerToken = None,
    weights: PerToken = None,
    version: int | None = None,
) -> StoredTurn:
    """A turn as it is stored: only the prompt tokens that its parent lacks. See `turn`."""
    loss_mask = mask(response)
    return StoredTurn(
        index=index,
        parent_turn=parent,
        shared_tokens=shared,
        token_ids=ids(new_prompt + response),
        num_response_tokens=len(response),
        logprobs=_per_token(logprobs, where=loss_mask),
        loss_mask=None if loss_mask.all() else loss_mask,
        rewards=_per_token(rewards, where=_last(len(response))),
        token_weights=_per_token(weights, where=loss_mask),
        version_runs=_runs(version, num_tokens=len(response)),
    )


def trajectory(
    *turns: Turn,
    sample: int = 0,
    reward: float | None = 1.0,
    status: Status = Status.COMPLETED,
    tags: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Trajectory:
    """An episode of these turns; the default is one turn "ab" -> "CD"."""
    return Trajectory(
        turns=turns or (turn("ab", "CD"),),
        sample=sample,
        reward=reward,
        status=status,
        tags=tags or {},
        metrics=metrics or {},
    )


def group(group_id: str = "g0", *trajectories: Trajectory, prompt_uid: str = "") -> Group:
    """A group of these trajectories; the default is two with rewards 1 and 0."""
    members = trajectories or (trajectory(sample=0), trajectory(sample=1, reward=0.0))
    return Group(group_id=group_id, trajectories=members, prompt_uid=prompt_uid)


def _per_token(values: PerToken, *, where: NDArray[np.uint8]) -> NDArray[np.float32] | None:
    if values is None:
        return None
    if isinstance(values, int | float):
        return np.where(where, np.float32(values), np.float32(0))
    return np.array(values, np.float32)


def _last(num_tokens: int) -> NDArray[np.uint8]:
    return np.array([i == num_tokens - 1 for i in range(num_tokens)], np.uint8)


def _runs(version: int | None, *, num_tokens: int) -> tuple[VersionRun, ...]:
    return () if version is None else (VersionRun(version, num_tokens),)
