"""Replies of the store, by type of call. No I/O, no clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from turnstream.errors import RejectedError, RunNotFoundError, TurnstreamError
from turnstream.generator.outbox.admissions import Admissions
from turnstream.generator.outbox.calls import (
    AbandonCall,
    Call,
    CloseCall,
    ConfigCall,
    HeartbeatCall,
    NoteCall,
    PayloadCall,
    ReserveCall,
    SealsCall,
    TakeOverCall,
    WaitsCall,
)
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.resend import Adopted, Reposts
from turnstream.generator.outbox.trajectories import TrajectoryTracker
from turnstream.generator.outbox.trajectory_queue import Admission, Lane, RewardPost
from turnstream.store.client.replies import Refusal
from turnstream.store.run.configs import parse_config
from turnstream.store.run.rewards import RewardOutcome
from turnstream.types import DeclaredColumn

_logger = logging.getLogger(__name__)


class Answers:
    """Passes the replies of the store to the parts of one outbox.

    Attributes:
        extra_columns: declared columns of the run; None before they were read.
    """

    def __init__(
        self, tracker: TrajectoryTracker, admissions: Admissions, reposts: Reposts
    ) -> None:
        self.extra_columns: tuple[DeclaredColumn, ...] | None = None
        self._tracker = tracker
        self._resend_buffer = tracker.resend_buffer
        self._admissions = admissions
        self._reposts = reposts

    def accept(self, call: Call, answer: Any, now_s: float) -> None:
        """Record that the store has carried a call out."""
        tracker = self._tracker
        match call:
            case PayloadCall():
                tracker.stored(call, num_new=answer, now_s=now_s)
            case SealsCall(lanes):
                tracker.posted(lanes, answer, now_s)
            case Admission():
                self._admissions.granted(call, answer, now_s)
            case AbandonCall(lane):
                tracker.inflight.add("num_abandoned", not lane.has_ended)
                tracker.end_well(lane, now_s)
            case ReserveCall(lanes):
                tracker.reservations.answered(lanes, answer)
            case HeartbeatCall(lanes):
                tracker.renewed(lanes, answer)
            case WaitsCall():
                self._admissions.answered(answer, now_s)
            case _:
                self._accept_of_run(call, answer, now_s)

    def refuse(self, call: Call, refused: Refusal, now_s: float) -> None:
        """Handle a refused call."""
        error = refused.error
        match call:
            case PayloadCall(lane) | AbandonCall(lane):
                self._tracker.refuse(lane, refused, now_s)
            case TakeOverCall(lane):
                self._tracker.refuse(lane, refused, now_s)
                self._resend_buffer.keep(Adopted(lane), now_s=now_s)
            case RewardPost():
                self._refuse_reward(call, error, now_s)
            case SealsCall(lanes):
                for lane in lanes:
                    self._tracker.fail(lane, error)
            case Admission():
                self._admissions.refused(call, refused, now_s)
            case HeartbeatCall(lanes):
                self._refuse_heartbeat(lanes, error)
            case WaitsCall():
                self._admissions.answered(None, now_s)
            case CloseCall(_, receipt) | ConfigCall(receipt):
                receipt.settle(None, error)
            case _:
                is_note = isinstance(call, NoteCall)
                what = "a conflict is not counted" if is_note else "no bytes can be reserved"
                _logger.warning("run %s: %s: %s", self._tracker.run, what, error)

    def _accept_of_run(self, call: Call, answer: Any, now_s: float) -> None:
        match call:
            case TakeOverCall(lane):
                self._resend_buffer.keep(Adopted(lane), now_s=now_s)
                self._tracker.opened(lane, answer[0], now_s)
            case CloseCall(reason, receipt):
                receipt.settle(None)
                self._resend_buffer.keep(CloseCall(reason, Delivery()), now_s=now_s)
            case RewardPost():
                self._accept_reward(call, answer.decode(), now_s)
            case ConfigCall(receipt):
                self._accept_config(answer, receipt)
            case _:
                pass  # notes have no receipt

    def _refuse_heartbeat(self, lanes: Sequence[Lane], error: TurnstreamError) -> None:
        _logger.warning("run %s: leases cannot be renewed: %s", self._tracker.run, error)
        if isinstance(error, RunNotFoundError):
            for lane in [lane for lane in lanes if not lane.is_ending]:
                self._tracker.fail(lane, error)

    def _accept_config(self, answer: Sequence[bytes], receipt: Delivery) -> None:
        try:
            self.extra_columns = parse_config(answer, run=self._tracker.run)[1].extra_columns
        except TurnstreamError as error:
            receipt.settle(None, error)
        else:
            receipt.settle(None)

    def _accept_reward(self, post: RewardPost, outcome: str, now_s: float) -> None:
        before, post.outcome = post.outcome, outcome
        self._resend_buffer.keep(post, now_s=now_s)
        if not before:
            post.receipt.settle(None)
        elif outcome == RewardOutcome.LATE != before:
            error = RejectedError(f"the group of {post.name} went on without it")
            self._tracker.lose("a reward", error)

    def _refuse_reward(self, post: RewardPost, error: TurnstreamError, now_s: float) -> None:
        if not post.outcome:
            post.receipt.settle(None, error)
        elif not self._reposts.add(post, now_s=now_s):
            self._tracker.lose("a reward", error)
