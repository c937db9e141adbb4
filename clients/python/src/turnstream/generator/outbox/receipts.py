"""Receipts of writes that the store has not acknowledged yet, and the counts of a publisher."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turnstream.errors import NotReadyError, TurnstreamError, WaitReason
from turnstream.types import TrajectoryKey, TurnShape
from turnstream.types.names import timeout

_MAX_NOTES: Final = 5  # notes on the first error about the others

_new_event = threading.Lock()


class PendingWrite:
    """Counts the unacknowledged parts of a write. Only the outbox settles it.

    Args:
        unread_failures: list to which it adds itself if it ends with an error, so that the error is
            raised even if no caller reads it.
        check_caller: raises where it can never be settled: in a forked process, or for asyncio in
            another event loop.
    """

    __slots__ = (
        "_check_caller",
        "_errors",
        "_event",
        "_num_open",
        "_unread_failures",
        "_why",
        "was_read",
    )

    def __init__(
        self,
        num_parts: int = 1,
        *,
        unread_failures: list[PendingWrite] | None = None,
        why: Callable[[PendingWrite], Sequence[WaitReason]] = lambda _: (),
        check_caller: Callable[[], None] = lambda: None,
    ) -> None:
        self._num_open = num_parts
        self._errors: dict[TrajectoryKey | None, TurnstreamError] = {}
        self._unread_failures = unread_failures
        self._why = why
        self._check_caller = check_caller
        self._event: Any = None
        self.was_read = False

    @property
    def is_done(self) -> bool:
        """Whether the store acknowledged all of it, or some of it failed for good."""
        return self._num_open == 0

    @property
    def errors(self) -> Mapping[TrajectoryKey | None, TurnstreamError]:
        """Return the errors so far by trajectory."""
        return dict(self._errors)

    def settle(self, key: TrajectoryKey | None, error: TurnstreamError | None = None) -> None:
        """Record that one part was acknowledged, or failed for good; nothing after the last."""
        if self.is_done:
            return
        self._num_open -= 1
        if error is not None:
            self._errors[key] = error
        if self._num_open == 0:
            if self._errors and self._unread_failures is not None:
                self._unread_failures.append(self)
            if self._event is not None:
                self._event.set()

    def raise_error(self) -> None:
        """Raise the first error, if there is one."""
        self.was_read = True
        for error in self._errors.values():
            raise error

    def _timed_out(self, timeout_s: float | None) -> NotReadyError:
        message = f"the store has not acknowledged it within {timeout_s:g} s"
        return NotReadyError(message, self._why(self))


class Receipt(PendingWrite):
    """Stands for writes that were accepted here and are on their way to the store."""

    __slots__ = ()

    def result(self, timeout_s: float | None = None) -> None:
        """Wait until the store has acknowledged all of it.

        Raises:
            NotReadyError: it was not done within `timeout_s`, with the reason; sending continues.
            RejectedError: this is a process that was forked after the write.
            TurnstreamError: the first error; `errors` has all of them.
        """
        timeout_s = timeout(timeout_s, field="timeout_s")
        if not self.is_done:
            self._check_caller()
            with _new_event:
                self._event = self._event or threading.Event()
            # Another thread may have settled it before it could see the event.
            if not self.is_done and not self._event.wait(timeout_s):
                raise self._timed_out(timeout_s)
        self.raise_error()


class AsyncReceipt(PendingWrite):
    """The same as Receipt, to be awaited in the event loop of its publisher."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        return self.result().__await__()

    async def result(self, timeout_s: float | None = None) -> None:
        """Wait like `Receipt.result`."""
        timeout_s = timeout(timeout_s, field="timeout_s")
        if not self.is_done:
            self._check_caller()
            self._event = self._event or asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError as error:
                raise self._timed_out(timeout_s) from error
        self.raise_error()


def raise_unread(failures: list[PendingWrite], losses: list[TurnstreamError]) -> None:
    """Raise the losses and the unread errors as one error, and clear the list."""
    unread = [failed for failed in failures if not failed.was_read]
    failures.clear()
    errors = [*losses, *(error for failed in unread for error in failed.errors.values())]
    if not errors:
        return
    first, *others = dict.fromkeys(errors)
    first.others = tuple(others)
    for other in others[:_MAX_NOTES]:
        first.add_note(f"and {other}")
    if len(others) > _MAX_NOTES:
        first.add_note(f"and {len(others) - _MAX_NOTES} more")
    raise first


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStatistics:
    """Counts since the publisher was made.

    Attributes:
        num_trajectories: trajectories sealed and acknowledged.
        num_abandoned: trajectories abandoned.
        num_turns: turns acknowledged.
        wire_bytes: bytes of the acknowledged turn records.
        resend_bytes: their size if each turn carried its full context.
        turn_tokens: prompt + response, summed over the turns.
        merged_tokens: tokens of the merged rows.
        num_duplicates: records that the store already had, after a lost answer or a restart.
        num_retries: calls repeated because the store was away or full.
        num_waits: refused requests for admission.
        wait_s: seconds of waiting for admission.
        num_restarts: restarts of the store after which kept writes were sent again.
        num_resent: turns acknowledged again after a restart.
        num_lost: ended trajectories and posted rewards that the store lost for good.
        num_forgotten: turns dropped from the resend buffer before `keep_s`, for lack of space.
        kept_bytes: acknowledged bytes in the resend buffer.
        max_kept_bytes: limit of `kept_bytes`.
        inflight_bytes: accepted and not yet acknowledged.
        max_inflight_bytes: limit of `inflight_bytes`.
    """

    num_trajectories: int = 0
    num_abandoned: int = 0
    num_turns: int = 0
    wire_bytes: int = 0
    resend_bytes: int = 0
    turn_tokens: int = 0
    merged_tokens: int = 0
    num_duplicates: int = 0
    num_retries: int = 0
    num_waits: int = 0
    wait_s: float = 0.0
    num_restarts: int = 0
    num_resent: int = 0
    num_lost: int = 0
    num_forgotten: int = 0
    kept_bytes: int = 0
    max_kept_bytes: int = 0
    inflight_bytes: int = 0
    max_inflight_bytes: int = 0


class InflightCounts:
    """The numbers of one outbox; bytes are those of records that are not acknowledged."""

    def __init__(self, max_inflight_bytes: int) -> None:
        self.max_inflight_bytes = max_inflight_bytes
        self.inflight_bytes = 0
        self.unadmitted_bytes = 0
        self._counts: defaultdict[str, Any] = defaultdict(int)

    def has_capacity_for_turn(self, num_bytes: int) -> bool:
        """Return whether an open trajectory may add so much; always, while nothing is in flight.

        Groups that wait for admission do not count: it may depend on this trajectory.
        """
        total_bytes = self.inflight_bytes + num_bytes
        return self.inflight_bytes == 0 or total_bytes <= self.max_inflight_bytes

    def has_capacity_for_group(self, num_bytes: int) -> bool:
        """Return whether a whole group may be added; always, while nothing is in flight."""
        total_bytes = self.inflight_bytes + self.unadmitted_bytes
        return total_bytes == 0 or total_bytes + num_bytes <= self.max_inflight_bytes

    def add(self, name: str, number: float = 1) -> None:
        """Count something by its name in PublisherStatistics."""
        self._counts[name] += number

    def accepted(self, num_bytes: int, *, is_open: bool) -> None:
        """Add accepted bytes of a trajectory; a negative number removes them."""
        if is_open:
            self.inflight_bytes += num_bytes
        else:
            self.unadmitted_bytes += num_bytes

    def moved(self, num_bytes: int, *, is_open: bool) -> None:
        """Count bytes as those of a trajectory that is open, or as unadmitted again."""
        self.accepted(-num_bytes, is_open=not is_open)
        self.accepted(num_bytes, is_open=is_open)

    def acknowledged(self, shape: TurnShape, *, num_bytes: int) -> None:
        """Count a turn that the store acknowledged."""
        self.inflight_bytes -= num_bytes
        counts = self._counts
        counts["num_turns"] += 1
        counts["wire_bytes"] += num_bytes
        counts["resend_bytes"] += num_bytes + 4 * shape.shared_tokens
        counts["turn_tokens"] += shape.num_tokens

    def statistics(self, **resend_counts: int) -> PublisherStatistics:
        """Return the counts so far, with those of the resend buffer."""
        return PublisherStatistics(
            **self._counts,
            **resend_counts,
            inflight_bytes=self.inflight_bytes + self.unadmitted_bytes,
            max_inflight_bytes=self.max_inflight_bytes,
        )
