"""How far a token is behind the weights it will train, and how many groups may be under way.

A version is an integer name of weights; the run maps it to the step after which they were made.
Age is counted in steps, not in versions: two versions of the same step are of the same age.

Sources: the capacity formula is that of AReaL (Fu et al., 2025, section 4.1), with dropped groups
taken out of what was accepted, or a run that filters many groups would starve its trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream.types import VersionRun

OverAge = Literal["drop", "mask", "keep"]


def capacity(
    *,
    version_step: int,
    batch_groups: int,
    max_staleness: int,
    num_accepted: int,
    num_running: int,
    max_concurrent: int,
) -> int:
    """Groups that may start now without any of them growing staler than allowed.

    >>> capacity(version_step=3, batch_groups=8, max_staleness=2, num_accepted=27, num_running=5,
    ...          max_concurrent=100)
    16

    Args:
        version_step: steps trained so far.
        batch_groups: groups of one step.
        max_staleness: steps that a group may lag.
        num_accepted: groups finished that were trained or can still be: filtered, expired, dropped
            and abandoned ones do not count.
        num_running: groups under way.
        max_concurrent: groups that may be under way at once.
    """
    allowed = (max_staleness + version_step + 1) * batch_groups
    return max(0, min(max_concurrent - num_running, allowed - (num_accepted + num_running)))


def oldest_trained_version(
    version_runs: Sequence[VersionRun], loss_mask: NDArray[np.uint8]
) -> int | None:
    """The oldest version that sampled a trained token; None if no such token names one.

    Raises:
        BatchingError: the runs do not cover the mask.
    """
    versions = [run.version for run, mask in _runs_of(version_runs, loss_mask) if mask.any()]
    return min((version for version in versions if version is not None), default=None)


def age(version: int, *, train_step: int, step_of_version: Mapping[int, int]) -> int:
    """Steps between the batch that trains and the weights that sampled.

    >>> age(4, train_step=7, step_of_version={4: 5})
    1

    The batch of step 7 trains the weights made after step 6; those of version 4 were made after
    step 5, so the token is one step behind.

    Raises:
        BatchingError: nobody announced the version.
    """
    if version not in step_of_version:
        raise BatchingError(f"version {version} was never announced")
    return train_step - 1 - step_of_version[version]


def mask_old_tokens(
    version_runs: Sequence[VersionRun],
    loss_mask: NDArray[np.uint8],
    *,
    max_age: int,
    train_step: int,
    step_of_version: Mapping[int, int],
) -> NDArray[np.uint8]:
    """A copy of the mask with 0 where the token is older than `max_age` steps.

    Tokens without a version keep their mask: nothing says that they are old.
    """
    kept = loss_mask.copy()
    for run, part in _runs_of(version_runs, kept):
        if run.version is not None and (
            age(run.version, train_step=train_step, step_of_version=step_of_version) > max_age
        ):
            part[:] = 0
    return kept


def _runs_of(
    version_runs: Sequence[VersionRun], loss_mask: NDArray[np.uint8]
) -> list[tuple[VersionRun, NDArray[np.uint8]]]:
    """Each run with its part of the mask, as a view."""
    covered = sum(run.num_tokens for run in version_runs)
    if covered != len(loss_mask):
        raise BatchingError(
            f"version_runs cover {covered} tokens, the response has {len(loss_mask)}"
        )
    parts: list[tuple[VersionRun, NDArray[np.uint8]]] = []
    start = 0
    for run in version_runs:
        parts.append((run, loss_mask[start : start + run.num_tokens]))
        start += run.num_tokens
    return parts
