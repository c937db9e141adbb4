"""The time of a run, read without a script."""

from __future__ import annotations

from collections.abc import Sequence

FIELDS = ("ms", "at_ms", "most_ms")
"""Fields of the key `clock`, in the order of `run_ms`'s arguments."""


def run_ms(fields: Sequence[bytes | None], *, now_ms: int) -> int:
    """The run's time, as run_clock.lua says it, when it is `now_ms` by the store's clock.

    >>> run_ms((b"1000", b"5000", b"300"), now_ms=5200)
    1200
    >>> run_ms((b"1000", b"5000", b"300"), now_ms=3_605_200)  # the store's clock was set
    1300
    >>> run_ms((None, None, None), now_ms=5200)  # an older release has made the run
    5200
    """
    known_ms, at_ms, most_ms = (None if field is None else int(field) for field in fields)
    if known_ms is None or at_ms is None or most_ms is None:
        return now_ms
    since_ms = now_ms - at_ms
    return known_ms + (since_ms if 0 <= since_ms <= most_ms else most_ms)
