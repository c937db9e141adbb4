from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from testkit import turn
from turnstream.batching.merge.anchors import anchor_hash
from turnstream.batching.merge.storing import store_turns
from turnstream.errors import InvalidTurnError


@pytest.mark.parametrize(
    ("anchor", "kept"),
    [
        # As `printf 'room 3' | sha256sum | cut -c -16` says, and of nothing at all.
        ("room 3", 0xCE7E7C3D821BD771),
        (b"room 3", 0xCE7E7C3D821BD771),
        ("Zürich", 0x4251685E06CAB635),
        ("", 0xE3B0C44298FC1C14),
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (np.uint64(2**63), 2**63),
        (None, None),
    ],
)
def test_an_anchor_is_the_same_64_bits_in_any_language(anchor: Any, kept: int | None) -> None:
    assert anchor_hash(anchor) == kept
    assert anchor_hash(anchor_hash(anchor)) == kept


@pytest.mark.parametrize(
    ("anchor", "says"),
    [
        (-1, "-1 is not a whole number from 0 to 2"),
        (2**64, "18446744073709551616 is not a whole number from 0 to 2"),
        (True, "True is not a whole number from 0 to 2"),
        (1.0, "1.0 is not a text, bytes or a whole number"),
        (["a"], r"\['a'\] is not a text, bytes or a whole number"),
        ("\ud800", r"'\\ud800' is no valid Unicode"),
    ],
)
def test_invalid_anchor_is_refused_with_its_value(anchor: Any, says: str) -> None:
    with pytest.raises(InvalidTurnError, match=f"^anchor: {says}"):
        anchor_hash(anchor)


def test_turns_are_stored_with_the_hash_of_their_anchors() -> None:
    stored = store_turns([turn("a", "B", anchor="room 3"), turn("ab", "C")])

    assert [each.anchor for each in stored] == [0xCE7E7C3D821BD771, None]
