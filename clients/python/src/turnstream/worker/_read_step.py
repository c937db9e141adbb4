"""The messages of a Get: mini-batches of one step, each a header and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from turnstream.errors import CorruptRecordError
from turnstream.records.values import parse_message
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader


@dataclass(slots=True)
class Arrival:
    """A mini-batch that arrives.

    Attributes:
        header: its header.
        buffer: `header.num_bytes` bytes; None where the bytes are only counted.
        num_filled: number of its bytes that have arrived.
    """

    header: MiniBatchHeader
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
                f"mini-batch {self.header.mini_batch} of step {self.header.step} has more than the "
                f"{self.header.num_bytes} bytes of its header"
            )
        if self.buffer is not None:
            self.buffer[start : self.num_filled] = data


def read_step(
    messages: Iterable[bytes],
    *,
    step: int,
    admit: Callable[[MiniBatchHeader], Arrival],
    held: int = 0,
) -> Iterator[Arrival]:
    """Yield each mini-batch of a Get after its last byte has arrived.

    `admit` returns the place for the bytes after a header. The caller has the first `held`
    mini-batches: the messages begin with the next one, or an earlier one. Messages that contradict
    each other, or end before the last byte, are a CorruptRecordError. Kinds of messages of a later
    release are ignored.
    """
    arrival: Arrival | None = None
    num_complete, num_expected = 0, -1
    for message in messages:
        chunk = parse_message(GetChunk, message)
        match chunk.WhichOneof("chunk"):
            case "header":
                found = chunk.header.mini_batch
                if num_expected < 0:
                    num_complete = min(found, held)
                if arrival is not None or (chunk.header.step, found) != (step, num_complete):
                    raise CorruptRecordError(
                        f"(step, mini-batch) {(chunk.header.step, found)} came instead of "
                        f"{(step, num_complete)}, or before the last byte of the one before"
                    )
                num_expected = chunk.header.num_mini_batches
                arrival = admit(chunk.header)
            case "data":
                if arrival is None:
                    raise CorruptRecordError(
                        f"{len(chunk.data)} bytes came before the header of mini-batch "
                        f"{num_complete} of step {step}"
                    )
                arrival.add(chunk.data)
            case _:
                pass
        if arrival is not None and arrival.num_filled == arrival.header.num_bytes:
            yield arrival
            arrival, num_complete = None, num_complete + 1
    if num_complete != num_expected:
        raise CorruptRecordError(
            f"step {step} ended after {num_complete} of {max(num_expected, 0) or 'all'} "
            "mini-batches"
        )
