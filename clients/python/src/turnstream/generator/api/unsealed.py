"""Trajectories whose block ended without `seal`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types.names import few_of

_logger = logging.getLogger(__name__)


def warn_unsealed(group_id: str, samples: Sequence[int]) -> None:
    """Log that samples were abandoned because their block was left without a seal."""
    _logger.warning(
        "group %s: sample %s left without a seal, so it is abandoned and not trained: call "
        "seal(reward=...) before the block ends",
        *(group_id, few_of(samples)),
    )


def reason_of(error: BaseException | None) -> str:
    """Return why a with block was left, for the ledger."""
    if error is None:
        return UNSEALED
    return f"{type(error).__name__}: {error}"
