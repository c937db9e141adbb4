"""Messages of a Get call to mini-batches, with one copy of the payload: into its own buffer.

A data chunk is `12 <varint length> <bytes>` on the wire. A protobuf parser would copy these bytes
once more, so the framing is removed here. Every other form goes through protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from google.protobuf.message import DecodeError

from turnstream.errors import CorruptRecordError
from turnstream.records.batches import decode_mini_batch
from turnstream.types import MiniBatch
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader

_DATA_TAG = GetChunk.DATA_FIELD_NUMBER << 3 | 2  # length-delimited


def parse_chunk(message: bytes) -> MiniBatchHeader | memoryview | None:
    """Return the header or the data in a GetChunk; None for a kind of a later release.

    Data is a view of `message`. Another message than a GetChunk is a CorruptRecordError.
    """
    if message and message[0] == _DATA_TAG:
        start, length = _read_varint(message, 1)
        if start + length == len(message):
            return memoryview(message)[start:]
    try:
        chunk = GetChunk.FromString(message)
    except DecodeError as error:
        raise CorruptRecordError(f"a message of {len(message)} bytes is no chunk") from error
    match chunk.WhichOneof("chunk"):
        case "header":
            return chunk.header
        case "data":
            return memoryview(chunk.data)
        case _:
            return None


def _read_varint(message: bytes, start: int) -> tuple[int, int]:
    """Return the end and the value of the number at `start`; an incomplete one has the value 0."""
    value = 0
    for index in range(start, min(start + 10, len(message))):
        value |= (message[index] & 0x7F) << 7 * (index - start)
        if message[index] < 0x80:
            return index + 1, value
    return len(message) + 1, 0


class Arrival:
    """A mini-batch in transfer; its bytes are copied into a buffer.

    Those of a mini-batch that was received before are only counted (`keeps` is False).
    """

    def __init__(self, header: MiniBatchHeader, *, keeps: bool = True) -> None:
        self.header = header
        self.keeps = keeps
        self._num_filled = 0
        # Arrow's allocator aligns to 64 bytes, as columns need it, and reuses its pages.
        self._view = memoryview(pa.allocate_buffer(header.num_bytes if keeps else 0)).cast("B")

    @property
    def is_complete(self) -> bool:
        """Whether every promised byte has arrived."""
        return self._num_filled == self.header.num_bytes

    def add(self, chunk: memoryview) -> None:
        """Take the next bytes; refuse more bytes than promised."""
        start, self._num_filled = self._num_filled, self._num_filled + len(chunk)
        if self._num_filled > self.header.num_bytes:
            raise CorruptRecordError(
                f"mini-batch {self.header.mini_batch} of step {self.header.step} has more than "
                f"the {self.header.num_bytes} bytes of its header"
            )
        if self.keeps:
            self._view[start : self._num_filled] = chunk

    def decode(self) -> MiniBatch:
        """Return the mini-batch, as views of the buffer; another hash is a CorruptRecordError."""
        return decode_mini_batch(self._view.toreadonly(), expected_hash=self.header.content_hash)


def read_step(
    messages: Iterable[bytes], *, step: int, admit: Callable[[MiniBatchHeader], Arrival]
) -> Iterator[Arrival]:
    """Yield the mini-batches of one Get, in order, each after its last byte has arrived.

    `admit` is called with every header, and returns the receiver of its bytes. Messages that
    contradict each other, or end before the last byte, are a CorruptRecordError.
    """
    arrival: Arrival | None = None
    num_complete, num_expected = 0, None
    for message in messages:
        chunk = parse_chunk(message)
        if chunk is None:
            continue
        if isinstance(chunk, MiniBatchHeader):
            _check_order(chunk, step=step, index=num_complete, is_free=arrival is None)
            num_expected = chunk.num_mini_batches
            arrival = admit(chunk)
        elif arrival is None:
            raise CorruptRecordError(f"step {step}: data of no mini-batch")
        else:
            arrival.add(chunk)
        if arrival is not None and arrival.is_complete:
            yield arrival
            arrival, num_complete = None, num_complete + 1
    if num_complete != num_expected:
        raise CorruptRecordError(
            f"step {step} ended after {num_complete} of {num_expected or 'all'} mini-batches"
        )


def _check_order(header: MiniBatchHeader, *, step: int, index: int, is_free: bool) -> None:
    if not is_free:
        raise CorruptRecordError(f"mini-batch {index} of step {step} was cut short")
    if header.step != step or header.mini_batch != index:
        raise CorruptRecordError(
            f"mini-batch {header.mini_batch} of step {header.step} came "
            f"instead of {index} of step {step}"
        )
