"""Equality of values that hold arrays: exact, dtypes included, NaN equal to NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def assert_same(actual: object, expected: object) -> None:
    """Compare dataclasses, sequences, mappings and arrays all the way down.

    Raises:
        AssertionError: names the first place that differs and what is there.
    """
    difference = _difference(actual, expected, path="value")
    if difference:
        raise AssertionError(difference)


def _difference(actual: Any, expected: Any, *, path: str) -> str:
    if isinstance(expected, np.ndarray) or isinstance(actual, np.ndarray):
        return _array_difference(actual, expected, path=path)
    if is_dataclass(expected):
        if type(actual) is not type(expected):
            return f"{path}: a {type(actual).__name__}, not a {type(expected).__name__}"
        names = [field.name for field in fields(expected)]
        pairs = ((f".{n}", getattr(actual, n), getattr(expected, n)) for n in names)
        return _first(pairs, path=path)
    if isinstance(expected, Mapping):
        if list(actual) != list(expected):
            return f"{path}: keys {list(actual)}, not {list(expected)}"
        return _first(((f"[{k!r}]", actual[k], expected[k]) for k in expected), path=path)
    if isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        if len(actual) != len(expected):
            return f"{path}: {len(actual)} items, not {len(expected)}"
        pairs = enumerate(zip(actual, expected, strict=True))
        return _first(((f"[{i}]", a, e) for i, (a, e) in pairs), path=path)
    is_equal = actual == expected or (actual != actual and expected != expected)
    return "" if is_equal else f"{path}: {actual!r}, not {expected!r}"


def _first(pairs: Any, *, path: str) -> str:
    for name, actual, expected in pairs:
        difference = _difference(actual, expected, path=path + name)
        if difference:
            return difference
    return ""


def _array_difference(actual: Any, expected: Any, *, path: str) -> str:
    if type(actual) is not type(expected):
        return f"{path}: a {type(actual).__name__}, not a {type(expected).__name__}"
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return (
            f"{path}: {actual.dtype}{list(actual.shape)}, "
            f"not {expected.dtype}{list(expected.shape)}"
        )
    if not np.array_equal(actual, expected, equal_nan=expected.dtype.kind == "f"):
        return f"{path}: {actual.tolist()}, not {expected.tolist()}"
    return ""
