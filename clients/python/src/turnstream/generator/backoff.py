"""How long to leave a store alone that is away or full."""

from __future__ import annotations

from collections.abc import Callable

from turnstream.store.backoff import pause_after


class Backoff:
    """Pauses that double up to a second, within one deadline for the whole outage. No clock.

    Args:
        timeout_s: how long an outage may last.
        jitter: gives numbers from 0 to 1, so that many clients do not come back at once.
    """

    def __init__(self, timeout_s: float, *, jitter: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._jitter = jitter
        self._num_failures = 0
        self._since_s: float | None = None
        self._paused_until_s = 0.0

    def failed(self, now_s: float, *, since_s: float | None = None) -> bool:
        """Another try failed. Gives whether the outage has lasted too long.

        It began with the first try that failed, or at `since_s`, when that was begun.
        """
        if self._since_s is None:
            self._since_s = now_s if since_s is None else since_s
        deadline_s = self._since_s + self._timeout_s
        if now_s >= deadline_s:
            self.succeeded()
            return True
        self._num_failures += 1
        pause_s = pause_after(self._num_failures) * (0.5 + 0.5 * self._jitter())
        self._paused_until_s = min(now_s + pause_s, deadline_s)
        return False

    def succeeded(self) -> None:
        """The store answered: the outage, if there was one, is over."""
        self._since_s = None
        self._num_failures = 0
        self._paused_until_s = 0.0

    @property
    def since_s(self) -> float | None:
        """When the outage began; None while there is none."""
        return self._since_s

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._since_s is not None

    def pause_s(self, now_s: float) -> float:
        """Seconds until the next try; 0 if it may be made now."""
        return max(0.0, self._paused_until_s - now_s)
