"""Groups that ask for leave to start, and how long they wait for it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnstream.errors import NotReadyError, TurnstreamError
from turnstream.generator.lanes import Admission, Lane
from turnstream.generator.lives import Lives
from turnstream.generator.receipts import Delivery
from turnstream.records.events import encode_event
from turnstream.store.replies import refusal, wake_id
from turnstream.types import GroupOpened, TrajectoryKey


class Admissions:
    """The groups of one publisher that are not open yet.

    Args:
        lives: of their members.
        timeout_s: how long a group may wait for leave.

    Attributes:
        wake_id: not None: groups wait until the run's wake stream is beyond this id.
    """

    def __init__(self, lives: Lives, *, timeout_s: float) -> None:
        self.wake_id: str | None = None
        self._lives = lives
        self._queues = lives.queues
        self._timeout_s = timeout_s

    def ask(
        self, group: GroupOpened, members: Iterable[TrajectoryKey], opened: Delivery
    ) -> list[Lane]:
        """Ask leave for a group and open these members of it."""
        lanes = [self._lives.begin(key) for key in members]
        self._queues.admissions.append(Admission(group, encode_event(group), lanes, opened))
        return lanes

    def adopt(
        self, group: GroupOpened, epochs: Mapping[TrajectoryKey, int], *, now_s: float
    ) -> list[Lane]:
        """Go on with a group of which the store has opened these members, with these epochs."""
        lanes = self._lives.begin_opened(epochs, now_s=now_s)
        opening = Admission(group, encode_event(group), lanes, Delivery())
        self._lives.window.keep(opening, now_s=now_s)
        return lanes

    def granted(self, admission: Admission, answers: Sequence[Any], now_s: float) -> None:
        """The group is open; each member is, or why not."""
        if admission.since_s is not None:
            self._lives.tally.add_wait(now_s - admission.since_s)
        first_error = None
        for lane, answer in zip(admission.lanes, answers, strict=True):
            if isinstance(answer, int):
                self._lives.opened(lane, answer, now_s)
            else:
                error = self._lives.not_opened(lane, answer.decode(), now_s)
                first_error = first_error or error
        self._lives.window.keep(admission, now_s=now_s)
        admission.opened.settle(None, first_error)

    def refused(self, admission: Admission, text: str, now_s: float) -> None:
        """The group must wait, or will never start."""
        newest_wake_id = wake_id(text)
        if newest_wake_id is not None:
            self._stand_aside(admission, str(refusal(text)), newest_wake_id, now_s)
            return
        for lane in admission.lanes:
            self._lives.refuse(lane, text, now_s)
        if any(lane.error is None for lane in admission.lanes):
            self._lives.window.keep(admission, now_s=now_s)
        admission.opened.settle(None, refusal(text))

    def woken(self) -> None:
        """The run's wake stream has moved: let those ask again who were told to wait."""
        self.wake_id = None
        self._queues.ask_again()

    def expire(self, now_s: float) -> None:
        """Turn away the groups that have waited for leave long enough."""
        while self.pause_s(now_s) == 0:
            admission = self._queues.waiting.popleft()
            message = f"no leave to start within {self._timeout_s:g} s"
            self._reject(
                admission,
                NotReadyError(f"group {admission.group.group_id}: {message}: {admission.reason}"),
            )

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until one has waited for long enough; None while none waits."""
        since_s = self._queues.waiting_since_s
        return None if since_s is None else max(0.0, since_s + self._timeout_s - now_s)

    def withdraw_given_up(self) -> None:
        """Ask no longer for groups of which every member was given up."""
        for admission in self._queues.take_given_up():
            for lane in admission.lanes:
                self._lives.end(lane)
            admission.opened.settle(None)

    def _stand_aside(
        self, admission: Admission, reason: str, newest_wake_id: str, now_s: float
    ) -> None:
        if admission.since_s is None:
            admission.since_s = now_s
            self._lives.tally.add("num_waits")
        admission.reason = reason
        self._queues.waiting.append(admission)
        self.wake_id = self.wake_id or newest_wake_id  # an older id may only wake too early
        self.withdraw_given_up()

    def _reject(self, admission: Admission, error: TurnstreamError) -> None:
        for lane in admission.lanes:
            self._lives.fail(lane, error)
        admission.opened.settle(None, error)
