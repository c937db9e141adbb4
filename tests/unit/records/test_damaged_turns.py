"""A close look at a damaged record: what is readable, and where exactly it is wrong."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.records.damage import changed_byte, examine_turn
from turnstream.records.turns import encode_turn
from turnstream.testing import stored_turn

TURN = stored_turn("abc", "DeF", logprobs=-0.5, version=1)
RECORD = encode_turn(TURN)
CRC = int.from_bytes(RECORD[-4:], "little")


def with_crc(record: bytes) -> bytes:
    return record[:-4] + struct.pack("<I", zlib.crc32(record[:-4]))


def test_a_sound_record_has_no_flaw() -> None:
    found = examine_turn(RECORD, index=0, sealed_crc=CRC)

    assert found.flaws == ()
    assert found.turn is not None
    assert found.turn.token_ids.tolist() == TURN.token_ids.tolist()


@pytest.mark.parametrize("sealed_crc", [CRC, None])
@pytest.mark.parametrize("position", range(len(RECORD) - 4))
def test_a_single_wrong_byte_is_found_where_it_is_and_put_right(
    position: int, sealed_crc: int | None
) -> None:
    damaged = bytearray(RECORD)
    damaged[position] ^= 0x41

    found = examine_turn(bytes(damaged), index=0, sealed_crc=sealed_crc)

    flaw = found.flaws[0]
    assert (flaw.start, flaw.stop) == (position, position + 1)
    assert f"is {damaged[position]:02x}, was {RECORD[position]:02x}" in flaw.problem
    assert found.is_repaired
    assert found.turn is not None
    assert found.turn.token_ids.tolist() == TURN.token_ids.tolist()


def test_names_the_field_of_the_wrong_byte() -> None:
    damaged = bytearray(RECORD)
    damaged[RECORD.index(np.float32(-0.5).tobytes())] ^= 1

    (flaw,) = examine_turn(bytes(damaged), index=0, sealed_crc=CRC).flaws

    assert flaw.field == "logprobs"


def test_a_wrong_checksum_is_told_from_wrong_bytes_by_the_seal() -> None:
    found = examine_turn(RECORD[:-1] + b"\x00", index=0, sealed_crc=CRC)

    assert found.flaws[0].field == "checksum"
    assert found.is_repaired


def test_a_sound_record_of_another_turn_is_told_by_the_seal() -> None:
    other = encode_turn(stored_turn("abcde", "fGh"))

    found = examine_turn(other, index=0, sealed_crc=CRC)

    assert "more than one byte differs" in found.flaws[0].problem
    assert found.turn is not None
    assert not found.is_repaired


def test_numbers_that_no_model_samples_are_named_with_their_bytes() -> None:
    assert TURN.logprobs is not None
    logprobs = TURN.logprobs.copy()
    logprobs[2] = np.nan
    record = encode_turn(replace(TURN, logprobs=logprobs))

    (flaw,) = examine_turn(record, index=0).flaws

    assert (flaw.field, flaw.stop - flaw.start) == ("logprobs", 4)
    assert np.isnan(np.frombuffer(record[flaw.start : flaw.stop], "<f4")[0])
    assert "position 2" in flaw.problem


def test_what_is_left_of_a_record_that_was_cut_short_can_be_read() -> None:
    found = examine_turn(RECORD[:-12], index=0, sealed_crc=CRC)

    assert found.turn is None
    assert found.arrays["token_ids"].tolist() == TURN.token_ids.tolist()
    assert any(
        flaw.field == "logprobs" and "leaves the record" in flaw.problem for flaw in found.flaws
    )


@given(st.binary(min_size=1, max_size=200))
def test_any_bytes_can_be_looked_at(junk: bytes) -> None:
    for record in (junk, b"TST\x00" + junk, with_crc(RECORD[:40] + junk + RECORD[40:])):
        found = examine_turn(record, index=0, sealed_crc=CRC)

        assert found.flaws
        assert all(0 <= flaw.start <= flaw.stop for flaw in found.flaws)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_the_only_wrong_byte_of_anything_is_found(body: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(body) - 1))
    bits = data.draw(st.integers(1, 255))
    damaged = bytearray(body)
    damaged[position] ^= bits

    found = changed_byte(
        bytes(damaged), found_crc=zlib.crc32(damaged), expected_crc=zlib.crc32(body)
    )

    assert found == (position, body[position])
