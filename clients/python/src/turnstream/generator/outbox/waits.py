"""How long the store may be away, full or silent; and the reasons for waits. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from turnstream.errors import (
    StoreFullError,
    StoreUnavailableError,
    TurnstreamError,
    WaitKind,
    WaitReason,
)
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.run_calls import MAX_NAMED, Admissions
from turnstream.generator.outbox.trajectories import TrajectoryTracker
from turnstream.generator.outbox.writes import Admission, TrajectoryQueue
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.deadlines import ANSWER_S
from turnstream.store.client.replies import FULL, RETRY_AFTER_S
from turnstream.store.waits.awaited import admission_awaited, not_ready, store_away, store_full
from turnstream.store.waits.wait_reasons import Fact, wait_reason
from turnstream.store.waits.wait_snapshot import WaitSnapshot
from turnstream.store.waits.wait_warnings import WaitWarnings


class Outage:
    """Times of the last round and answer, and the length of an outage.

    Between two tries there are pauses, which double up to a second.

    Args:
        timeout_s: how long the store may take no writes. An earlier round has ANSWER_S more.
        jitter: returns numbers from 0 to 1, so that many clients do not come back at once.

    Attributes:
        progress_s: time at which bytes of it were sent last.
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

        The first failure of an outage says since when it lasts. A silent store keeps the
        connection open, and does not answer.
        """
        self._trouble, self._is_silent = trouble, is_silent
        self._away_since_s = self._away_since_s or since_s
        self._since_s = since_s if self._since_s is None else self._since_s
        deadline_s = self._since_s + self.timeout_s
        if now_s >= deadline_s:
            return True
        self._num_failures += 1
        pause_s = pause_after(self._num_failures) * (0.5 + 0.5 * self._jitter())
        self._paused_until_s = min(now_s + pause_s, deadline_s)
        return False

    def end(self) -> None:
        """End the outage: the store takes writes, or nothing waits for it."""
        self._away_since_s = self._since_s = None
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


class WaitMessages:
    """The reasons of one publisher, the most important first."""

    def __init__(self, tracker: TrajectoryTracker, admissions: Admissions, outage: Outage) -> None:
        self._tracker = tracker
        self._admissions = admissions
        self._outage = outage
        self._warnings = WaitWarnings()

    def waiting(self, now_s: float, delivery: PendingWrite | None = None) -> list[WaitReason]:
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
        """Return why nothing more may be accepted."""
        inflight = self._tracker.inflight
        full = no_space(
            inflight_bytes=inflight.inflight_bytes,
            unadmitted_bytes=inflight.unadmitted_bytes,
            max_inflight_bytes=inflight.max_inflight_bytes,
        )
        return [full, *self.waiting(now_s)]

    def not_on_disk(self, now_s: float) -> list[WaitReason]:
        """Return why something that was acknowledged may still be lost."""
        buffer = self._tracker.resend_buffer
        left_s = buffer.pause_s(now_s)
        found = [] if left_s is None else [not_on_disk(left_s=left_s, keep_s=buffer.keep_s)]
        return [*found, *self.waiting(now_s)]

    def errors_of_failed(
        self, message: str, now_s: float
    ) -> Callable[[TrajectoryQueue | Admission | str], TurnstreamError]:
        """Return the errors of writes that fail after the store was full, away or silent."""
        why, silent_s = self.store(now_s), self._outage.silent_s(now_s)
        kind = StoreUnavailableError
        if self._outage.is_full:
            kind, message = StoreFullError, f"{message.partition(': ')[0]}: {why[0].sentence}"

        def error_of(what: TrajectoryQueue | Admission | str) -> TurnstreamError:
            waited = _of_failed(what, silent_s=silent_s, now_s=now_s)
            return kind(message, [*waited, *why], RETRY_AFTER_S)

        return error_of


def of_writes(
    queues: Iterable[TrajectoryQueue], delivery: PendingWrite | None, *, silent_s: float | None
) -> list[WaitReason]:
    """Return the unacknowledged writes, of one delivery if it is set.

    `silent_s` are the seconds since the last answer of the store; None before the first.
    """
    answered = f"the store last answered {silent_s or 0.0:.1f} s ago"
    if silent_s is None:
        answered = "the store has not answered yet"
    found: list[WaitReason] = []
    for queue in queues:
        numbered = enumerate(queue.pending, queue.num_acknowledged)
        turns = (n for n, each in numbered if delivery in (None, each.receipt))
        turn = next(turns, None)
        is_ending = queue.end is not None and delivery in (None, queue.end)
        if turn is None and not is_ending:
            continue
        what = f"turn {turn}" if turn is not None else _end_in_words(queue)
        place = "" if queue.epoch else ", which is not open yet,"
        facts = {
            "group": queue.key.group_id,
            "sample": queue.key.sample,
            "attempt": queue.key.attempt,
            "turn": turn,
            "turns_waiting": len(queue.pending),
            "silent_s": silent_s,
        }
        sentence = f"{what} of {queue.key.readable_name}{place} is not acknowledged; {answered}"
        found.append(WaitReason(WaitKind.NOT_ACKNOWLEDGED, sentence, facts))
        if len(found) == MAX_NAMED:
            break
    return found


def _end_in_words(queue: TrajectoryQueue) -> str:
    after = f", after {len(queue.pending)} turns," if queue.pending else ""
    return ("the seal" if queue.seal is not None else "the abandonment") + after


def _of_failed(
    what: TrajectoryQueue | Admission | str, *, silent_s: float | None, now_s: float
) -> list[WaitReason]:
    facts: dict[str, Fact] = {"call": what} if isinstance(what, str) else {}
    sentence = f"{what} is not acknowledged"
    if isinstance(what, TrajectoryQueue):
        return of_writes([what], None, silent_s=silent_s)
    if isinstance(what, Admission):
        group, since_s = what.group, what.since_s
        if since_s is not None:
            return [admission_awaited(group, what.reason, waited_s=now_s - (since_s or now_s))]
        facts = {"group": group.group_id, "samples": group.num_samples}
        sentence = f"group {group.group_id} has asked for admission, and was not answered"
    return [WaitReason(WaitKind.NOT_ACKNOWLEDGED, sentence, facts)]


def no_space(**facts: int) -> WaitReason:
    """Return the lack of space from inflight_bytes, unadmitted_bytes, and max_inflight_bytes."""
    text = (
        "{bytes:,} bytes are not acknowledged, {unadmitted_bytes:,} of them of groups that wait "
        "for admission; max_inflight_bytes is {max_inflight_bytes:,}"
    )
    num_bytes = facts["inflight_bytes"] + facts["unadmitted_bytes"]
    return wait_reason(WaitKind.NOT_ACKNOWLEDGED, text, facts, bytes=num_bytes)


def not_on_disk(*, left_s: float, keep_s: float) -> WaitReason:
    """Return that the store may still lose what it has acknowledged."""
    why = (
        f"what was acknowledged {max(0.0, keep_s - left_s):.1f} s ago is on disk when the store "
        f"still answers {keep_s:g} s after it, in {left_s:.1f} s"
    )
    return not_ready("disk", why, left_s=left_s, keep_s=keep_s)
