"""The messages of a Get: the parts of one rank's share, each a header and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from turnstream.errors import CorruptRecordError
from turnstream.records.encoding import parse_message
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader
from turnstream.wire.v1.operations_pb2 import OperationChunk, OperationShareHeader

Header = TypeVar("Header", MiniBatchHeader, OperationShareHeader)


@dataclass(slots=True)
class Arrival(Generic[Header]):
    """A part that arrives: a mini-batch of a step, or a pass over operations.

    Attributes:
        header: its header.
        buffer: `header.num_bytes` bytes; None where the bytes are only counted.
        num_filled: number of its bytes that have arrived.
    """

    header: Header
    buffer: memoryview | None = None
    num_filled: int = 0

    def resume(self, header: MiniBatchHeader) -> bool:
        """Continue at the first byte of a header; return False if that does not fit."""
        found = (header.content_hash, header.num_bytes)
        is_same = found == (self.header.content_hash, self.header.num_bytes)
        if not is_same or header.first_byte > self.num_filled:
            return False
        self.num_filled = header.first_byte
        return True

    def add(self, data: bytes) -> None:
        """Add the next bytes; CorruptRecordError if the header announced fewer."""
        start, self.num_filled = self.num_filled, self.num_filled + len(data)
        if self.num_filled > self.header.num_bytes:
            raise CorruptRecordError(
                f"(step, part) {_place(self.header)} has more than the {self.header.num_bytes} "
                "bytes of its header"
            )
        if self.buffer is not None:
            self.buffer[start : self.num_filled] = data


def read_parts(
    messages: Iterable[bytes],
    kind: type[GetChunk | OperationChunk],
    *,
    admit: Callable[[Header], Arrival[Header]],
    step: int = 0,
    held: int = 0,
) -> Iterator[Arrival[Header]]:
    """Yield each part of a Get after its last byte has arrived.

    `kind` is the type of the messages. `admit` returns the place for the bytes after a header. The
    caller has the first `held` parts: the messages begin with the next one, or an earlier one.
    Operations have no `step`. Messages that contradict each other, or end before the last byte, are
    a CorruptRecordError. Kinds of messages of a later release are ignored.
    """
    arrival: Arrival[Header] | None = None
    num_complete, num_expected = 0, -1
    for message in messages:
        chunk: Any = parse_message(kind, message)
        match chunk.WhichOneof("chunk"):
            case "header":
                found = _place(chunk.header)
                if num_expected < 0:
                    num_complete = min(found[1], held)
                if arrival is not None or found != (step, num_complete):
                    raise CorruptRecordError(
                        f"(step, part) {found} came instead of {(step, num_complete)}, or before "
                        "the last byte of the one before"
                    )
                num_expected = _num_parts(chunk.header)
                arrival = admit(chunk.header)
            case "data":
                if arrival is None:
                    raise CorruptRecordError(
                        f"{len(chunk.data)} bytes came before the header of part {num_complete} of "
                        f"step {step}"
                    )
                arrival.add(chunk.data)
            case _:
                pass
        if arrival is not None and arrival.num_filled == arrival.header.num_bytes:
            yield arrival
            arrival, num_complete = None, num_complete + 1
    if num_complete != num_expected:
        raise CorruptRecordError(
            f"the messages ended after {num_complete} of {max(num_expected, 0) or 'all'} parts of "
            f"step {step}"
        )


def _place(header: MiniBatchHeader | OperationShareHeader) -> tuple[int, int]:
    """Return the step, 0 for operations, and the index of a part."""
    if isinstance(header, OperationShareHeader):
        return 0, header.index
    return header.step, header.mini_batch


def _num_parts(header: MiniBatchHeader | OperationShareHeader) -> int:
    is_operation = isinstance(header, OperationShareHeader)
    return header.num_shares if is_operation else header.num_mini_batches
