"""How long the store of a publisher may be away, full or silent. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable

from turnstream.errors import WaitReason
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.deadlines import ANSWER_S
from turnstream.store.client.replies import FULL
from turnstream.store.waits.awaited import store_away, store_full
from turnstream.store.waits.wait_snapshot import WaitSnapshot


class Outage:
    """Times of the last round and answer, and the length of an outage.

    Between two tries there are pauses, which double up to a second.

    Args:
        timeout_s: how long the store may take no writes. An earlier round has ANSWER_S more.
        jitter: returns numbers from 0 to 1, so that many clients do not come back at once.
        address: address of the store, for messages.

    Attributes:
        sent_s: time of the last round.
        progress_s: time at which bytes of it were sent last.
        num_calls: number of calls of the round in flight; None without one.
        answered_s: time of the last answer; None before the first.
    """

    def __init__(self, timeout_s: float, *, jitter: Callable[[], float], address: str) -> None:
        self.timeout_s = timeout_s
        self.sent_s = self.progress_s = 0.0
        self.num_calls: int | None = None
        self.answered_s: float | None = None
        self._jitter = jitter
        self._address = address
        self._trouble = ""  # last error of the store or the connection
        self._is_silent = False  # or that it said nothing
        self._num_failures = 0
        self._since_s: float | None = None  # start of the outage for its deadline
        self._paused_until_s = 0.0
        self._away_since_s: float | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the last try failed."""
        return self._since_s is not None

    @property
    def is_full(self) -> bool:
        """Whether the store answers, and has no memory for writes."""
        return self._away_since_s is not None and self._trouble.startswith(FULL)

    @property
    def trouble(self) -> str:
        """Why the store takes no writes, where that is so."""
        return self._trouble if self.is_failing else "it does not answer"

    def failed(
        self, trouble: str, now_s: float, *, since_s: float, is_silent: bool = False
    ) -> bool:
        """Record a failed try; return whether the outage has lasted too long.

        Args:
            trouble: error of the store or the connection.
            now_s: the time.
            since_s: start of the outage, if this is its first failure.
            is_silent: the connection is open, and the store does not answer.
        """
        self._trouble, self._is_silent = trouble, is_silent
        self._away_since_s = self._away_since_s or since_s
        self._since_s = since_s if self._since_s is None else self._since_s
        deadline_s = self._since_s + self.timeout_s
        if now_s >= deadline_s:
            self._recover()
            return True
        self._num_failures += 1
        pause_s = pause_after(self._num_failures) * (0.5 + 0.5 * self._jitter())
        self._paused_until_s = min(now_s + pause_s, deadline_s)
        return False

    def end(self) -> None:
        """End the outage: the store takes writes, or nothing waits for it."""
        self._away_since_s = None
        self._recover()

    def _recover(self) -> None:
        self._since_s = None
        self._num_failures = 0
        self._paused_until_s = 0.0

    def pause_s(self, now_s: float) -> float:
        """Seconds until the next try; 0 if it may be made now."""
        return max(0.0, self._paused_until_s - now_s)

    def left_s(self, now_s: float) -> float | None:
        """Seconds for which the round in flight may wait for its answer; None without one."""
        if self.num_calls is None:
            return None
        since_s = self.progress_s if self._since_s is None else self._since_s
        return max(0.0, since_s + self.timeout_s + ANSWER_S - now_s)

    def away_s(self, now_s: float) -> float | None:
        """Seconds since the store takes no writes; None while it takes them."""
        return None if self._away_since_s is None else now_s - self._away_since_s

    def is_strained(self, now_s: float) -> bool:
        """Whether the store is away, or has let the round on its way wait for a while."""
        is_silent = self.num_calls is not None and now_s - self.progress_s >= ANSWER_S
        return self.is_failing or is_silent

    def silent_s(self, now_s: float) -> float | None:
        """Seconds since the store answered anything; None if it never did."""
        return None if self.answered_s is None else now_s - self.answered_s

    def why(self, now_s: float, waits: WaitSnapshot | None) -> list[WaitReason]:
        """Return whether the store is full, away or silent; `waits` is what it said of the run."""
        silent_s = None if self.num_calls is None else now_s - self.progress_s
        away_s = self.away_s(now_s)
        found: list[WaitReason] = []
        if away_s is not None and self._is_silent:
            silent_s = away_s
        elif away_s is not None and self.is_full:
            found.append(store_full(waits, address=self._address, since_s=away_s))
        elif away_s is not None:
            found.append(store_away(address=self._address, since_s=away_s, why=self._trouble))
        if silent_s is not None:
            found.append(store_away(address=self._address, since_s=silent_s))
        return found


def first_result(*pauses_s: float | None) -> float | None:
    """The shortest of some pauses, of which None never ends."""
    return min([pause_s for pause_s in pauses_s if pause_s is not None], default=None)
