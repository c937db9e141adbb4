from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.errors import CorruptRecordError
from turnstream.records.compact import decode_ledger_file, encode_ledger_file
from turnstream.records.framing import LEDGER_FILE, write_frame


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_ledger_file_returns_its_records_in_order(records: list[bytes]) -> None:
    assert decode_ledger_file(encode_ledger_file(records)) == records


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), st.data())
def test_flipped_bit_of_ledger_file_is_found(records: list[bytes], data: st.DataObject) -> None:
    content = bytearray(encode_ledger_file(records))
    position = data.draw(st.integers(4, len(content) - 1))  # after the magic number
    content[position] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(CorruptRecordError):
        decode_ledger_file(bytes(content))


@pytest.mark.parametrize("length", [2, 4])
def test_ledger_file_with_wrong_lengths_is_refused(length: int) -> None:
    content = write_frame(LEDGER_FILE, struct.pack("<I", length), [np.zeros(3, np.uint8)])

    with pytest.raises(CorruptRecordError, match="has not the"):
        decode_ledger_file(content)


def test_ledger_file_with_cut_lengths_is_refused() -> None:
    with pytest.raises(CorruptRecordError):
        decode_ledger_file(write_frame(LEDGER_FILE, b"abc"))
