"""How long a publisher lets its store be away, or silent. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable

from turnstream.errors import WaitReason
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.deadlines import ANSWER_S
from turnstream.store.client.replies import FULL
from turnstream.store.waits.awaited import store_away, store_full, store_silent
from turnstream.store.waits.wait_snapshot import WaitSnapshot


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
        """Record a failed try; return whether the outage has lasted too long.

        The outage began with the first failed try, or at `since_s`.
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
        """Record an answer of the store, which ends the outage."""
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


class Outage:
    """Times of the last question and answer, and the length of an outage.

    Args:
        timeout_s: how long the store may take no writes. An earlier round has ANSWER_S more.
        jitter: returns numbers from 0 to 1.
        address: of the store, for messages.

    Attributes:
        sent_s: time of the last round.
    """

    def __init__(self, timeout_s: float, *, jitter: Callable[[], float], address: str) -> None:
        self.timeout_s = timeout_s
        self.sent_s = 0.0
        self._address = address
        self._backoff = Backoff(timeout_s, jitter=jitter)
        self._trouble = ""  # last error of the store or the connection
        self._is_silent = False  # or that it said nothing
        self._away_since_s: float | None = None
        self._num_calls: int | None = None
        self._answered_s: float | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._backoff.is_failing

    @property
    def is_full(self) -> bool:
        """Whether the store answers, and has no memory for writes."""
        return self._away_since_s is not None and self._trouble.startswith(FULL)

    @property
    def trouble(self) -> str:
        """Why the store takes no writes, where that is so."""
        return self._trouble if self.is_failing else "it does not answer"

    def sent(self, num_calls: int) -> None:
        """A round is on its way, since `sent_s`."""
        self._num_calls = num_calls

    def ended(self) -> None:
        """No round is on its way any more."""
        self._num_calls = None

    def answered(self, now_s: float) -> None:
        """The store has said something."""
        self._answered_s = now_s

    def took(self) -> None:
        """End the outage: the store takes writes, or nothing waits for it."""
        self._away_since_s = None
        self._backoff.succeeded()

    def refused(self, trouble: str, now_s: float) -> bool:
        """The store answered that it takes no writes. Gives whether that was for too long."""
        return self._failed(trouble, now_s, since_s=now_s, is_silent=False)

    def lost(self, trouble: str, now_s: float) -> bool:
        """The connection failed under a round. Gives whether the store was away for too long.

        It has been so since the round was sent.
        """
        return self._failed(trouble, now_s, since_s=self.sent_s, is_silent=False)

    def unanswered(self, trouble: str, now_s: float) -> bool:
        """The same where the connection holds, and the store says nothing."""
        return self._failed(trouble, now_s, since_s=self.sent_s, is_silent=True)

    def _failed(self, trouble: str, now_s: float, *, since_s: float, is_silent: bool) -> bool:
        self._trouble, self._is_silent = trouble, is_silent
        self._away_since_s = self._away_since_s or since_s
        return self._backoff.failed(now_s, since_s=since_s)

    def pause_s(self, now_s: float) -> float:
        """Seconds until the store is asked again; 0 if it may be asked now."""
        return self._backoff.pause_s(now_s)

    def left_s(self, now_s: float) -> float | None:
        """Seconds for which the round on its way may wait for its answer; None without one."""
        if self._num_calls is None:
            return None
        since_s = self.sent_s if self._backoff.since_s is None else self._backoff.since_s
        return max(0.0, since_s + self.timeout_s + ANSWER_S - now_s)

    def away_s(self, now_s: float) -> float | None:
        """Seconds since the store takes no writes; None while it takes them."""
        return None if self._away_since_s is None else now_s - self._away_since_s

    def is_strained(self, now_s: float) -> bool:
        """Whether the store is away, or has let the round on its way wait for a while."""
        is_silent = self._num_calls is not None and now_s - self.sent_s >= ANSWER_S
        return self.is_failing or is_silent

    def silent_s(self, now_s: float) -> float | None:
        """Seconds since the store answered anything; None if it never did."""
        return None if self._answered_s is None else now_s - self._answered_s

    def why(self, now_s: float, waits: WaitSnapshot | None) -> list[WaitReason]:
        """Return whether the store is full, away or silent; `waits` is what it said of the run."""
        away_since_s, silent_since_s = self._away_since_s, None
        if away_since_s is not None and self._is_silent:
            away_since_s, silent_since_s = None, away_since_s
        elif self._num_calls is not None:
            silent_since_s = self.sent_s
        found: list[WaitReason] = []
        if away_since_s is not None:
            since_s = now_s - away_since_s
            if self.is_full:
                found.append(store_full(waits, address=self._address, since_s=since_s))
            else:
                found.append(store_away(self._trouble, address=self._address, since_s=since_s))
        if silent_since_s is not None:
            since_s = now_s - silent_since_s
            found.append(store_silent(address=self._address, since_s=since_s))
        return found


def first_of(*pauses_s: float | None) -> float | None:
    """The shortest of some pauses, of which None never ends."""
    return min([pause_s for pause_s in pauses_s if pause_s is not None], default=None)
