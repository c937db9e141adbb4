"""Equality of values that hold arrays: exact, dtypes included, NaN equal to NaN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def assert_same(actual: object, expected: object) -> None:
    """Compare dataclasses, sequences, mappings and arrays all the way down.

    Raises:
        AssertionError: names the first place that differs and what is there.
    """
    for found, wanted in itertools.zip_longest(
        _places("value", actual), _places("value", expected)
    ):
        assert found == wanted, f"{found}, not {wanted}"


def _places(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield each place in a value, and what is there."""
    if isinstance(value, np.ndarray):
        numbers = value + 0.0 if value.dtype.kind == "f" else value  # without the sign of zeros
        yield path, f"{value.dtype}{list(value.shape)} {numbers.tolist()}"
    elif is_dataclass(value):
        yield path, type(value).__name__
        for field in fields(value):
            yield from _places(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in value:
            yield from _places(f"{path}[{key!r}]", value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield path, f"{len(value)} items"
        for index, each in enumerate(value):
            yield from _places(f"{path}[{index}]", each)
    else:
        yield path, value if value == value else "NaN"
