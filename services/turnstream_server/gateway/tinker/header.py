"""The parts of a training call that both encodings have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from turnstream.batching.rows.operations import Operation
from turnstream_server.commands.contents import ForwardBackwardRun

DecodeOperation = Callable[[str], Operation | ForwardBackwardRun]
"""Takes a request id, and returns the operation or the call on a run, or raises BatchingError."""


class CallHeader(NamedTuple):
    """The place of a call; see `TrainingCall`."""

    model_id: str
    seq_id: int
    forward_only: bool = False
    is_sparse: bool = False
