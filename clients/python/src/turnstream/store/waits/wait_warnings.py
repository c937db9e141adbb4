"""When a long wait is worth a line in the log. No I/O, no clock."""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 5.0
"""Seconds of waiting before the first warning."""

EVERY_S: Final = 30.0
"""Seconds between two warnings of one wait."""

_ROUNDING_S: Final = 1e-6
"""Without it, a timer for the due time may fire 1e-15 s early, and is set again and again."""


class WaitWarnings:
    """Times of the warnings of a wait: after FIRST_S seconds, then every EVERY_S seconds.

    >>> warnings = WaitWarnings()
    >>> [seconds for seconds in range(100) if warnings.is_due(seconds)]
    [5, 35, 65, 95]
    >>> warnings.is_due(None), warnings.is_due(4), warnings.is_due(6)
    (False, False, True)
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._due_s = FIRST_S

    def is_due(self, waited_s: float | None) -> bool:
        """Return whether to warn now.

        Args:
            waited_s: seconds since the wait began; None while nothing waits.
        """
        if waited_s is None or waited_s < self._waited_s:  # another wait
            self._due_s = FIRST_S
        self._waited_s = waited_s or 0.0
        if waited_s is None or waited_s < self._due_s - _ROUNDING_S:
            return False
        self._due_s = waited_s + EVERY_S
        return True

    def pause_s(self, waited_s: float | None) -> float | None:
        """Return the seconds until `is_due` may be true; None while nothing waits."""
        return None if waited_s is None else max(0.0, self._due_s - waited_s)
