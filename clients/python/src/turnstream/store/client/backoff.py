"""The pauses between two attempts, for every loop that tries again after a failure."""

from __future__ import annotations

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


def pause_after(num_failures: int) -> float:
    """Return the seconds to wait after the n-th failure in a row, counted from 1.

    >>> [pause_after(number) for number in (1, 2, 3, 100)]
    [0.05, 0.1, 0.2, 1.0]
    """
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_failures - 1, 16))
