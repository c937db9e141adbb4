"""Numbers of one step for dashboards, from its mini-batches."""

from __future__ import annotations

from turnstream.types import MiniBatch


class StepMetrics:
    """Adds up the mini-batches of a step.

    Args:
        waited_s: seconds that the stream had waited for data before this step.
    """

    def __init__(self, waited_s: float) -> None:
        self._waited_s = waited_s
        self._num_tokens = self._num_rows = self._num_groups = self._num_trained = 0
        self._num_positions = 0
        self._merge = 0.0
        self._oldest: int | None = None

    def add(self, mini_batch: MiniBatch) -> None:
        """Count a mini-batch."""
        info, rows = mini_batch.info, mini_batch.rows
        tokens = int(rows.input_ids.lengths[~rows.is_padding].sum())
        self._num_tokens += tokens
        self._num_positions += info.width * int((~rows.is_padding).sum())
        self._merge += info.merge_ratio * tokens
        self._num_rows += info.num_real_rows
        self._num_groups += info.denominators.num_groups
        self._num_trained += info.denominators.num_tokens
        if info.oldest_version is not None:
            oldest = self._oldest
            self._oldest = (
                info.oldest_version if oldest is None else min(oldest, info.oldest_version)
            )

    def numbers(self, *, newest_version: int, wait_s: float) -> dict[str, float]:
        """Return the numbers so far, by the names of `Step.metrics`."""
        found: dict[str, float] = {
            "padding_share": 1 - self._num_tokens / self._num_positions
            if self._num_positions
            else 0,
            "merge_ratio": self._merge / self._num_tokens if self._num_tokens else 1.0,
            "num_rows": self._num_rows,
            "num_groups": self._num_groups,
            "num_trained_tokens": self._num_trained,
            "num_tokens": self._num_tokens,
            "wait_s": wait_s - self._waited_s,
        }
        if self._oldest is not None and newest_version >= 0:
            found["staleness"] = newest_version - self._oldest
        return found
