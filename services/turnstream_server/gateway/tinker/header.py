"""The parts of a training call that both encodings have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from turnstream.batching.rows.operations import Operation
from turnstream.errors import BatchingError
from turnstream_server.operations.contents import ForwardBackwardRun

_Result = TypeVar("_Result")

DecodeOperation = Callable[[str], Operation | ForwardBackwardRun]
"""Takes a request id, and returns the operation or the call on a run, or raises BatchingError."""


class CallHeader(NamedTuple):
    """The place of a call; see `TrainingCall`."""

    model_id: str
    seq_id: int
    forward_only: bool = False
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Decoded(Generic[_Result]):
    """A decoder that has run. It can be sent to another process, as the decoder itself cannot."""

    result: _Result | BatchingError

    @classmethod
    def run(cls, decode: Callable[[], _Result]) -> Decoded[_Result]:
        """Run a decoder, and keep its result or its BatchingError."""
        try:
            return cls(decode())
        except BatchingError as error:
            return cls(error)

    def __call__(self, *_: object) -> _Result:
        """Return the result, or raise the error."""
        if isinstance(self.result, BatchingError):
            raise self.result
        return self.result
