"""The comparison that tests use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from testkit import assert_same, stored_turn
from turnstream.types import VersionRun


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"token_ids": np.array([1], np.int32)}, r"token_ids', 'int32\[1\].*not .*int32\[2\]"),
        ({"token_ids": np.array([97, 9])}, r"token_ids', 'int64\[2\].*not .*int32\[2\]"),
        ({"token_ids": np.array([97, 9], np.int32)}, r"\[97, 9\]'\), not .*\[97, 98\]"),
        ({"index": 1}, r"\('value.index', 1\), not \('value.index', 0\)"),
        ({"logprobs": np.zeros(1)}, r"value.logprobs', 'float64\[1\].*not .*None"),
        ({"version_runs": (VersionRun(7, 1),)}, "value.version_runs', '1 items'.*not .*'0 items'"),
    ],
)
def test_a_difference_is_named_by_its_place(changes: dict[str, Any], difference: str):
    expected = stored_turn("a", "B")

    with pytest.raises(AssertionError, match=difference):
        assert_same(replace(expected, **changes), expected)


def test_nan_is_the_same_as_nan():
    values = {"a": float("nan"), "b": np.array([np.nan], np.float32)}

    assert_same(dict(values), values)
    with pytest.raises(AssertionError, match="nan"):
        assert_same({**values, "b": np.array([0.0], np.float32)}, values)
