"""The builders, comparison and waiting that are shipped for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from testkit import (
    assert_same,
    is_same,
    stored_turn,
    wait_until,
    wait_until_async,
)
from turnstream.types import VersionRun


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"token_ids": np.array([1], np.int32)}, r"value.token_ids: int32\[1\], not int32\[2\]"),
        ({"token_ids": np.array([97, 9])}, r"value.token_ids: int64\[2\], not int32\[2\]"),
        ({"token_ids": np.array([97, 9], np.int32)}, r"token_ids: \[97, 9\], not \[97, 98\]"),
        ({"index": 1}, "value.index: 1, not 0"),
        ({"logprobs": np.zeros(1)}, "value.logprobs: a ndarray, not a NoneType"),
        ({"version_runs": (VersionRun(7, 1),)}, "value.version_runs: 1 items, not 0"),
    ],
)
def test_a_difference_is_named_by_its_place(changes: dict[str, Any], difference: str):
    expected = stored_turn("a", "B")

    with pytest.raises(AssertionError, match=difference):
        assert_same(replace(expected, **changes), expected)


def test_nan_is_the_same_as_nan():
    assert is_same(np.array([np.nan], np.float32), np.array([np.nan], np.float32))
    assert is_same({"a": float("nan")}, {"a": float("nan")})
    assert not is_same(np.array([np.nan], np.float32), np.array([0.0], np.float32))


def test_waiting_in_vain_names_what_was_waited_for():
    with pytest.raises(TimeoutError, match=r"0.02 s waiting for a batch; the last answer was \[\]"):
        wait_until(list, timeout_s=0.02, describe="a batch")


async def test_waiting_asynchronously_names_what_was_waited_for():
    async def never() -> bool:
        return False

    with pytest.raises(TimeoutError, match="waiting for a leader"):
        await wait_until_async(never, timeout_s=0.02, describe="a leader")
