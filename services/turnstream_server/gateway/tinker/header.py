"""The parts of a training call that both encodings have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from turnstream.batching.rows.operations import Operation

DecodeOperation = Callable[[str], Operation]
"""Takes a request id, and returns the operation or raises BatchingError."""


class CallHeader(NamedTuple):
    """The place of a call; see `TrainingCall`."""

    model_id: str
    seq_id: int
    forward_only: bool = False
