"""Work that pauses between forward passes, so that the passes of several models take turns."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Value = TypeVar("_Value")

Turns = Generator[None, None, _Value]
"""Work with pauses, and its result."""


def last_value(turns: Turns[_Value]) -> _Value:
    """Run work without its pauses, and return its result.

    >>> def work():
    ...     yield
    ...     return 7
    >>> last_value(work())
    7
    """
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value
