"""Calls to the run: admissions of groups, rewards, its closing, its configuration.

No I/O, no clock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from turnstream.errors import NotReadyError, RejectedError, TurnstreamError, WaitReason
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.trajectories import TrajectoryTracker
from turnstream.generator.outbox.writes import Admission, Call, TrajectoryQueue, drained
from turnstream.generator.requests import CloseRun, OpenGroup, PostReward, ReadConfig, ReadWaits
from turnstream.store.client.replies import Refusal, parse_refusal
from turnstream.store.run.configs import parse_config
from turnstream.store.run.rewards import LEFT, RewardOutcome, outcome_of
from turnstream.store.waits.awaited import admission_awaited
from turnstream.store.waits.read_waits import parse_waits
from turnstream.store.waits.wait_reasons import reasons
from turnstream.store.waits.wait_snapshot import WaitSnapshot
from turnstream.types import DeclaredColumn, GroupOpened, TrajectoryKey

MAX_NAMED: Final = 8
"""Trajectories, and groups, that the reasons of a wait name."""

ASKS_BEFORE_S: Final = 1.0
"""Seconds before the end of a wait at which the store is asked for the reasons."""

ASKS_EVERY_S: Final = 5.0
"""Many groups may wait for the same: one answer will do for so long."""

_REPOST_EVERY_S: Final = 0.5
_TOO_LATE: Final = "its wait for admission had ended"


@dataclass(slots=True, eq=False)
class RewardPost:
    """A reward of any generator's trajectory, and the last answer.

    If a restarted store lacks the trajectory, it is posted again until `until_s`.
    """

    trajectory_id: str
    receipt: PendingWrite
    outcome: str = ""
    until_s: float | None = None


class RunCalls:
    """The calls for which no other call waits.

    For `timeout_s`, a reward is posted again while a restarted store lacks its trajectory. The
    extra columns are those that the run declares; None before they were read.
    """

    def __init__(self, tracker: TrajectoryTracker, *, timeout_s: float) -> None:
        self.extra_columns: tuple[DeclaredColumn, ...] | None = None
        self._tracker = tracker
        self._queue = tracker.send_queues.of_run
        self._timeout_s = timeout_s
        self._reposts: list[Call] = []
        self._reposts_due_s = 0.0

    def take(self, now_s: float) -> list[Call]:
        """Return the calls to send now, with the rewards that are due to be posted again."""
        if now_s >= self._reposts_due_s:
            self._queue.extend(self._reposts)
            self._reposts = []
        run = self._tracker.run
        return [
            each._replace(
                request=each.request._replace(run=run),
                put_back=partial(self._queue.appendleft, each),
            )
            for each in drained(self._queue)
        ]

    @property
    def is_settled(self) -> bool:
        """Whether no reward waits to be posted again."""
        return not self._reposts

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until a reward is posted again; None if none waits."""
        return max(0.0, self._reposts_due_s - now_s) if self._reposts else None

    def close_run(self, reason: str, receipt: PendingWrite) -> None:
        """Close the run to new groups."""

        def closed(_: object, now_s: float) -> None:
            receipt.settle(None)
            self._tracker.resend_buffer.keep(call, now_s=now_s)

        call = Call(
            CloseRun(self._tracker.run, reason),
            closed,
            partial(_refuse, receipt),
            receipt=receipt,
            what="the closing of the run",
        )
        self._queue.append(call)

    def learn_columns(self, receipt: PendingWrite) -> None:
        """Read what the run declares."""
        call = Call(
            ReadConfig(self._tracker.run),
            partial(self._accept_config, receipt),
            partial(_refuse, receipt),
            receipt=receipt,
            what="the read of the configuration",
        )
        self._queue.append(call)

    def post_reward(self, trajectory_id: str, record: bytes, receipt: PendingWrite) -> RewardPost:
        """Post a reward; the answer settles its receipt."""
        post = RewardPost(trajectory_id, receipt)
        call = Call(
            PostReward(self._tracker.run, trajectory_id, record),
            lambda answer, now_s: self._accept_reward(call, post, answer, now_s),
            lambda refused, now_s: self._refuse_reward(call, post, refused.error, now_s),
            receipt=receipt,
            what=f"the reward of {trajectory_id}",
        )
        self._queue.append(call)
        return post

    def _accept_config(self, receipt: PendingWrite, answer: Sequence[bytes], _: float) -> None:
        try:
            self.extra_columns = parse_config(answer, run=self._tracker.run)[1].extra_columns
        except TurnstreamError as error:
            receipt.settle(None, error)
        else:
            receipt.settle(None)

    def _accept_reward(self, call: Call, post: RewardPost, answer: bytes, now_s: float) -> None:
        before, outcome = post.outcome, outcome_of(answer)
        post.outcome = outcome
        self._tracker.resend_buffer.keep(call, now_s=now_s)
        post.receipt.settle(None)
        if before and outcome == RewardOutcome.LATE != before and answer != LEFT:
            error = RejectedError(f"the group of {post.trajectory_id} went on without it")
            self._tracker.lose("a reward", error)

    def _refuse_reward(
        self, call: Call, post: RewardPost, error: TurnstreamError, now_s: float
    ) -> None:
        """Report a refused reward; after a restart, post it until its trajectory is there again."""
        if not post.outcome:
            post.receipt.settle(None, error)
            return
        if post.until_s is None:
            post.until_s = now_s + self._timeout_s
        if now_s >= post.until_s:
            self._tracker.lose("a reward", error)
            return
        self._reposts.append(call)
        self._reposts_due_s = now_s + _REPOST_EVERY_S


def _refuse(receipt: PendingWrite, refused: Refusal, _: float) -> None:
    receipt.settle(None, refused.error)


class Admissions:
    """The groups of one publisher that are not open yet; each may wait for `timeout_s`.

    Groups wait until the run's wake stream is beyond `wake_id`. Shortly before a wait times out,
    the store is asked for the reasons, once for all waiting groups.

    A wait also times out while a request is unanswered. If the store opens the group later, its
    trajectories are abandoned. A group that was open before a restart of the store has no deadline:
    only this publisher still has its acknowledged writes.
    """

    def __init__(self, tracker: TrajectoryTracker, *, timeout_s: float) -> None:
        self.wake_id: str | None = None
        self._tracker = tracker
        self._queues = tracker.send_queues
        self._timeout_s = timeout_s
        self.waits: WaitSnapshot | None = None
        self._asked_s: float | None = None
        self._refused: deque[Admission] = deque()  # oldest first

    def request(
        self,
        group: GroupOpened,
        members: Iterable[TrajectoryKey],
        *,
        opened: PendingWrite | None = None,
    ) -> list[TrajectoryQueue]:
        """Request the admission of a group, and return trajectories for these members."""
        queues = [self._tracker.begin(key) for key in members]
        self._queues.admissions.append(Admission(group, queues, opened or PendingWrite()))
        return queues

    def begin_opened(
        self,
        group: GroupOpened,
        epochs: Mapping[TrajectoryKey, int],
        *,
        now_s: float,
        prompt_number: int = 0,
    ) -> list[TrajectoryQueue]:
        """Return new trajectories of a group that the store has opened with these epochs."""
        queues = self._tracker.begin_opened(epochs, now_s=now_s)
        admission = Admission(group, queues, PendingWrite(), prompt_number=prompt_number)
        self._tracker.resend_buffer.keep(admission, now_s=now_s)
        return queues

    def take(self) -> list[Call]:
        """Return the calls that request admissions."""
        return [
            Call(
                self._opening(each),
                partial(self._granted, each),
                partial(self._refuse, each),
                partial(self._put_back, each),
            )
            for each in drained(self._queues.admissions)
        ]

    def _opening(self, admission: Admission) -> OpenGroup:
        return OpenGroup(
            self._tracker.run,
            self._tracker.writer,
            admission.group,
            [queue.trajectory_id for queue in admission.queues],
            prompt_number=admission.prompt_number,
            is_again=admission.is_again,
        )

    def _put_back(self, admission: Admission) -> None:
        if not admission.opened.is_done:
            self._queues.admissions.appendleft(admission)

    def _granted(self, admission: Admission, answers: Sequence[Any], now_s: float) -> None:
        if admission.opened.is_done:
            for queue, answer in zip(admission.queues, answers, strict=True):
                if isinstance(answer, int):  # opened after its wait had ended
                    self._tracker.abandon_unwritten(queue.key, answer, reason=_TOO_LATE)
            return
        if admission.since_s is not None:
            self._tracker.inflight.add("wait_s", now_s - admission.since_s)
        first_error = None
        for queue, answer in zip(admission.queues, answers, strict=True):
            if isinstance(answer, int):
                self._tracker.opened(queue, answer, now_s)
            else:
                refused = parse_refusal(answer.decode())
                error = self._tracker.not_opened(queue, refused, now_s)
                first_error = first_error or error
        self._tracker.resend_buffer.keep(admission, now_s=now_s)
        admission.opened.settle(None, first_error)

    def _refuse(self, admission: Admission, refused: Refusal, now_s: float) -> None:
        if admission.opened.is_done:
            return
        if refused.code == "WAIT":
            self._wait_for_capacity(admission, str(refused.error), refused.fact, now_s)
            return
        self._tracker.refuse(admission.queues, refused, now_s)
        if any(queue.error is None for queue in admission.queues):
            self._tracker.resend_buffer.keep(admission, now_s=now_s)
        admission.opened.settle(None, refused.error)

    def woken(self) -> None:
        """Request the refused admissions again: the run's wake stream has moved."""
        self.wake_id = None
        queues = self._queues
        queues.admissions.extendleft(reversed(drained(queues.waiting)))  # before newer ones

    def expire(self, now_s: float, *, store: Sequence[WaitReason] = ()) -> None:
        """Fail the groups whose wait has timed out; `store` is why the store does not answer."""
        while (admission := self._oldest) is not None and self._left_s(admission, now_s) == 0:
            head = f"group {admission.group.group_id}: no admission"
            message = f"{head} within {self._timeout_s:g} s: {admission.reason}"
            why = [self._awaited(admission, now_s), *store, *self._reasons(admission, now_s)]
            error = NotReadyError(message, why)
            self._queues.withdraw_admission(admission)
            self._tracker.fail(admission.queues, error)
            admission.opened.settle(None, error)

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until a wait times out; None if no group waits."""
        admission = self._oldest
        return None if admission is None else self._left_s(admission, now_s)

    def asks_in_s(self, now_s: float) -> float | None:
        """Seconds until the reasons are read; None while the last answer is recent enough."""
        if not self._queues.waiting:
            return None
        since_s = self._queues.waiting[0].since_s or 0.0
        end_s = since_s + self._timeout_s
        at_s = end_s - ASKS_BEFORE_S
        if self._asked_s is not None and self._asked_s >= since_s:
            at_s = max(at_s, self._asked_s + ASKS_EVERY_S)
        return max(0.0, at_s - now_s) if at_s < end_s else None

    def due(self, now_s: float, *, is_full: bool) -> list[Call]:
        """Return the call that reads the reasons of a wait that may end soon.

        A full store is asked every few seconds, until it takes writes.
        """
        is_old = self._asked_s is None or now_s - self._asked_s >= ASKS_EVERY_S
        if not (is_full and is_old) and self.asks_in_s(now_s) != 0:
            return []
        request = ReadWaits(self._tracker.run)
        return [Call(request, self._answered, self._not_answered, is_write=False)]

    def _answered(self, answer: Any, now_s: float) -> None:
        self.waits, self._asked_s = None, now_s
        with contextlib.suppress(TurnstreamError):  # it must not hide that a wait ends
            self.waits = parse_waits(self._tracker.run, answer)

    def _not_answered(self, _: Refusal, now_s: float) -> None:
        self.waits, self._asked_s = None, now_s

    def why_waiting(self, now_s: float, delivery: PendingWrite | None = None) -> list[WaitReason]:
        """Return why groups wait for admission; only those of `delivery` if it is set."""
        waiting = [
            admission
            for admission in (*self._queues.waiting, *self._queues.admissions)
            if admission.since_s is not None and _concerns(admission, delivery)
        ]
        found = [self._awaited(each, now_s) for each in waiting[:MAX_NAMED]]
        return [*found, *self._reasons(waiting[0], now_s)] if found else []

    def waited_s(self, now_s: float) -> float | None:
        """Return the length of the longest wait; None if no group waits."""
        admission = self._oldest
        return None if admission is None else now_s - (admission.since_s or now_s)

    def withdraw_abandoned(self) -> None:
        """Withdraw the requests of groups whose members are all abandoned."""
        queues = self._queues
        for admission in [*queues.admissions, *queues.waiting]:
            if any(queue.abandon_reason is None for queue in admission.queues):
                continue
            queues.withdraw_admission(admission)
            for queue in admission.queues:
                self._tracker.end(queue)
            admission.opened.settle(None)

    @property
    def _oldest(self) -> Admission | None:
        while self._refused and self._refused[0].opened.is_done:
            self._refused.popleft()
        return self._refused[0] if self._refused else None

    def _left_s(self, admission: Admission, now_s: float) -> float:
        return max(0.0, (admission.since_s or 0.0) + self._timeout_s - now_s)

    def _reasons(self, admission: Admission, now_s: float) -> list[WaitReason]:
        """Return the store's reasons for the wait of a group, if they are recent."""
        since_s, asked_s = admission.since_s, self._asked_s
        if since_s is None or asked_s is None or not since_s <= asked_s >= now_s - ASKS_EVERY_S:
            return []
        return reasons(self.waits, group=admission.group)

    def _awaited(self, admission: Admission, now_s: float) -> WaitReason:
        waited_s = now_s - (admission.since_s or now_s)
        return admission_awaited(admission.group, admission.reason, waited_s=waited_s)

    def _wait_for_capacity(
        self, admission: Admission, reason: str, newest_wake_id: str, now_s: float
    ) -> None:
        if admission.since_s is None:
            admission.since_s = now_s
            if not admission.is_again:
                self._refused.append(admission)
            self._tracker.inflight.add("num_waits")
        admission.reason = reason
        self._queues.waiting.append(admission)
        self.wake_id = self.wake_id or newest_wake_id  # an older id may only wake too early
        self.withdraw_abandoned()


def _concerns(admission: Admission, delivery: PendingWrite | None) -> bool:
    if delivery is None or admission.opened is delivery:
        return True
    return any(
        queue.end is delivery or any(each.receipt is delivery for each in queue.pending)
        for queue in admission.queues
    )
