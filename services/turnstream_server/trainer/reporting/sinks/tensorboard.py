"""Metrics for TensorBoard, in event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnstream.optional import from_extra
from turnstream_server.trainer.reporting.declarations import numbers


class TensorBoard:
    """Writes event files to a folder; each step is on disk when `write` returns.

    Args:
        folder: receives one file for each start of the trainer.
        from_step: last step in the weights; TensorBoard drops the values of later steps that an
            earlier start has written.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        with from_extra("tensorboard", needed_by="--tensorboard", distribution="turnstream-server"):
            from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=from_step + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a scalar for each number."""
        for metric, value in numbers(metrics):
            self._writer.add_scalar(metric.tag, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
