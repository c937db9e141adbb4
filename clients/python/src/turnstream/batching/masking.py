"""Tokens that a plan leaves untrained, though their turns have them for training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from turnstream.batching.columns import TokenColumns
from turnstream.types import Ragged


def masked_columns(
    columns: TokenColumns, *, is_masked: Sequence[bool], masked_versions: Collection[int] = ()
) -> TokenColumns:
    """The columns with mask 0 where a row or a version is masked, and log-probability 0.0 there.

    The same object if nothing is masked.

    Args:
        columns: of B rows.
        is_masked: B truth values.
        masked_versions: that sampled the tokens to mask.
    """
    if not any(is_masked) and not masked_versions:
        return columns
    is_live_B = ~np.array(is_masked, np.bool_)
    mask = columns.loss_mask
    kept = mask.values * np.repeat(is_live_B, mask.lengths)
    if masked_versions:
        is_old = np.isin(columns.run_versions.values, list(masked_versions))
        kept *= ~np.repeat(is_old, columns.run_counts.values)
    logprobs = columns.logprobs
    if logprobs is not None:
        values = np.where(kept, logprobs.values, np.float32(0))
        logprobs = Ragged(values, logprobs.offsets)
    return replace(
        columns,
        loss_mask=Ragged(kept, mask.offsets),
        logprobs=logprobs,
    )
