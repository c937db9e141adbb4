"""Compact records of many batches in one file, under a checksum of its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from turnstream.errors import CorruptRecordError
from turnstream.records.framing import LEDGER_FILE, read_frame, write_frame


def encode_ledger_file(records: Sequence[bytes]) -> bytes:
    """The content of a file: the lengths of the records, and the records one behind the other."""
    lengths = struct.pack(f"<{len(records)}I", *map(len, records))
    return write_frame(LEDGER_FILE, lengths, [np.frombuffer(b"".join(records), np.uint8)])


def decode_ledger_file(content: bytes) -> list[bytes]:
    """The records of a file, in order.

    Raises:
        CorruptRecordError: the bytes are damaged or contradict themselves.
        UnknownFormatError: another release wrote it.
    """
    frame = read_frame(content, kind=LEDGER_FILE)
    if len(frame.header) % 4:
        raise CorruptRecordError("the lengths of a ledger file are cut short")
    lengths = [length for (length,) in struct.iter_unpack("<I", frame.header)]
    if frame.body_start + sum(lengths) != frame.body_stop:
        raise CorruptRecordError(f"a ledger file has not the {sum(lengths)} bytes of its records")
    records: list[bytes] = []
    start = frame.body_start
    for length in lengths:
        records.append(content[start : start + length])
        start += length
    return records
