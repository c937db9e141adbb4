"""Reasons for the waits of a publisher, from all its parts. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable

from turnstream.errors import (
    StoreFullError,
    StoreUnavailableError,
    TurnstreamError,
    WaitReason,
)
from turnstream.generator.outbox.admissions import Admissions
from turnstream.generator.outbox.outage import Outage
from turnstream.generator.outbox.outbox_waits import not_on_disk, of_what_ends, of_writes
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.trajectories import TrajectoryTracker
from turnstream.generator.outbox.trajectory_queue import Admission, Lane
from turnstream.store.client.replies import RETRY_AFTER_S
from turnstream.store.waits.wait_warnings import WaitWarnings


class WaitMessages:
    """The reasons of one publisher, the most important first."""

    def __init__(self, tracker: TrajectoryTracker, admissions: Admissions, outage: Outage) -> None:
        self._tracker = tracker
        self._admissions = admissions
        self._outage = outage
        self._warnings = WaitWarnings()

    def waiting(self, now_s: float, delivery: Delivery | None = None) -> list[WaitReason]:
        """Return why writes are unacknowledged; only those of `delivery` if it is set."""
        silent_s = self._outage.silent_s(now_s)
        return [
            *of_writes(self._tracker.unended, delivery, silent_s=silent_s),
            *self.store(now_s),
            *self._admissions.why_waiting(now_s, delivery),
        ]

    def warning(self, now_s: float) -> str:
        """Return the sentence to log of a wait that has become long; "" while none is due."""
        if not self._warnings.is_due(self._waited_s(now_s)):
            return ""
        found = [*self.store(now_s), *self._admissions.why_waiting(now_s)]
        return found[0].sentence if found else ""

    def warns_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `warning` may have a sentence; None while nothing waits."""
        return self._warnings.pause_s(self._waited_s(now_s))

    def _waited_s(self, now_s: float) -> float | None:
        waits = (self._outage.away_s(now_s), self._admissions.waited_s(now_s))
        return max((wait for wait in waits if wait is not None), default=None)

    def store(self, now_s: float) -> list[WaitReason]:
        """Return whether the store is full, away or silent."""
        return self._outage.why(now_s, self._admissions.waits)

    def no_space(self, now_s: float) -> list[WaitReason]:
        """Why nothing more may be accepted."""
        return [self._tracker.inflight.capacity_reason(), *self.waiting(now_s)]

    def not_on_disk(self, now_s: float) -> list[WaitReason]:
        """Why something that was acknowledged may still be lost."""
        resend_buffer = self._tracker.resend_buffer
        left_s = resend_buffer.pause_s(now_s)
        found = [] if left_s is None else [not_on_disk(left_s=left_s, keep_s=resend_buffer.keep_s)]
        return [*found, *self.waiting(now_s)]

    def given_up(
        self, message: str, now_s: float
    ) -> Callable[[Lane | Admission | str], TurnstreamError]:
        """The errors of writes that end as the store was full, away or silent for too long."""
        why, silent_s = self.store(now_s), self._outage.silent_s(now_s)
        kind = StoreUnavailableError
        if self._outage.is_full:
            kind, message = StoreFullError, f"{message.partition(': ')[0]}: {why[0].sentence}"

        def error_of(what: Lane | Admission | str) -> TurnstreamError:
            waited = of_what_ends(what, silent_s=silent_s, now_s=now_s)
            return kind(message, [*waited, *why], RETRY_AFTER_S)

        return error_of
