"""Trajectories on their way: opened, stored, ended, failed or lost. No I/O, no clock.

Owns what all trajectories of a publisher share: queues, leases, reservations and kept writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from turnstream.errors import ConflictError, StoreBehindError, TurnstreamError
from turnstream.generator.outbox.calls import (
    MAX_ROUND_BYTES,
    Call,
    TargetRun,
    num_sendable,
    payload,
    seals_of,
)
from turnstream.generator.outbox.heartbeats import Heartbeats, Reservations
from turnstream.generator.outbox.inflight import InflightCounts
from turnstream.generator.outbox.resend import (
    Adopted,
    Ended,
    KeptTurn,
    ResendBuffer,
    has_survived,
    is_decided_by_payload,
    is_ended,
    is_payload_released,
    is_unknown,
    resend,
    why_refused,
)
from turnstream.generator.outbox.trajectory_queue import Admission, Lane, Queues, RunCall
from turnstream.generator.requests import Abandon, Adopt, CountConflict
from turnstream.store.client import keys
from turnstream.store.client.replies import Refusal, parse_refusal
from turnstream.types import TrajectoryKey
from turnstream.types.names import few_of

_logger = logging.getLogger(__name__)


class TrajectoryTracker:
    """The trajectories of one publisher, from their first write to their end.

    Attributes:
        losses: errors of acknowledged trajectories that a restarted store has lost.
        unended: trajectories whose end the run has not acknowledged.
    """

    def __init__(
        self,
        target: TargetRun,
        writer: str,
        *,
        inflight: InflightCounts,
        resend_buffer: ResendBuffer,
    ) -> None:
        self.target = target
        self.writer = writer
        self.inflight = inflight
        self.resend_buffer = resend_buffer
        self.queues = Queues()
        self.heartbeats = Heartbeats(target, writer, self.fail)
        self.reservations = Reservations(target, writer)
        self.losses: list[TurnstreamError] = []
        self.unended: dict[Lane, None] = {}

    @property
    def run(self) -> str:
        """The id of the run; its name until it is found."""
        return self.target.run

    def begin(self, key: TrajectoryKey) -> Lane:
        """Return a new lane that is not open."""
        lane = Lane(key, keys.trajectory_id(key))
        self.unended[lane] = None
        return lane

    def adopt(
        self, key: TrajectoryKey, *, epoch: int, num_turns: int, num_bytes: int, now_s: float
    ) -> Lane:
        """Continue an adopted trajectory after its stored turns."""
        lane = self.begin(key)
        lane.epoch, lane.is_placed, lane.num_acknowledged = epoch, True, num_turns
        lane.num_bytes = num_bytes
        self._add_lease(lane, now_s)
        self.resend_buffer.keep(Adopted(lane), now_s=now_s)
        return lane

    def begin_opened(self, epochs: Mapping[TrajectoryKey, int], *, now_s: float) -> list[Lane]:
        """Return new lanes that the store has opened with these epochs."""
        lanes = [self.begin(key) for key in epochs]
        for lane in lanes:
            lane.epoch = epochs[lane.key]
            self._add_lease(lane, now_s)
        return lanes

    def has_any(self, keys: Set[TrajectoryKey]) -> bool:
        """Whether one of these is written here, or was and may have to be sent again."""
        is_written = any(lane.key in keys for lane in self.unended)
        return is_written or any(map(self.resend_buffer.has_opened, keys))

    def opened(self, lane: Lane, epoch: int, now_s: float) -> None:
        """Send the turns of a lane that the store has opened with this epoch."""
        num_bytes = lane.num_pending_bytes
        self.inflight.accepted(lane, -num_bytes)
        lane.epoch = epoch
        self._add_lease(lane, now_s)
        self.inflight.accepted(lane, num_bytes)
        self.advance(lane)

    def not_opened(self, lane: Lane, refused: Refusal, now_s: float) -> TurnstreamError | None:
        """Return why the store has not opened it; None where the store has all of it."""
        if self._is_beyond(lane, refused, now_s):
            return None
        if lane.seal_record and is_ended(refused):
            lane.epoch = lane.earlier_epoch  # its seal had been posted, and the answer was lost
            self.queues.seals.append(lane)
            return None
        self.fail([lane], refused.error)
        return refused.error

    def _stored(self, lane: Lane, num_turns: int, seals: bool, num_new: int, now_s: float) -> None:
        """Record that the store has the payload of a call, of which `num_new` records are new."""
        lane.is_placed = True
        for _ in range(num_turns):
            turn, receipt, is_again = lane.pending.popleft()
            self.resend_buffer.keep(KeptTurn(lane, turn), now_s=now_s)
            if is_again:
                self.inflight.add("num_resent")
            else:
                self.inflight.acknowledged(lane, turn.shape, num_bytes=len(turn.record))
            if receipt is not None:
                receipt.settle(lane.key)
        lane.num_acknowledged += num_turns
        self.inflight.add("num_duplicates", num_turns + seals - num_new)
        if seals:
            self.resend_buffer.keep(Ended(lane), now_s=now_s)
            self.queues.seals.append(lane)
        else:
            self.advance(lane)

    def advance(self, lane: Lane) -> None:
        """Queue the next call of a lane, now that the one before is answered."""
        if lane.pending or lane.seal is not None:
            self.queues.add_payload(lane)
        elif lane.abandon_reason is not None:
            self.queues.abandons.append(lane)

    def _posted(self, lanes: Sequence[Lane], answers: Sequence[bytes], now_s: float) -> None:
        """Handle the answer to each posted seal."""
        for lane, answer in zip(lanes, answers, strict=True):
            text = answer.decode()
            if text in ("OK", "DUPLICATE", "SURPLUS"):
                self._end_sealed(lane, now_s)
                continue
            refused = parse_refusal(text)
            if is_unknown(refused) and not lane.is_doubted:
                lane.is_doubted = True  # an answer may be lost: the payload decides
                self.advance(lane)
            else:
                self.fail([lane], refused.error)

    def _end_sealed(self, lane: Lane, now_s: float) -> None:
        """End a lane whose seal the run has."""
        if not lane.has_ended:
            self.inflight.add("num_trajectories")
            self.inflight.add("merged_tokens", lane.merged_tokens)
        self.end_well(lane, now_s)

    def refuse(self, lanes: Sequence[Lane], refused: Refusal, now_s: float) -> None:
        """Fail lanes of which the store refused something, unless the store has all of them."""
        failed: dict[str, tuple[TurnstreamError, list[Lane]]] = {}
        for lane in lanes:
            if not self._is_beyond(lane, refused, now_s):
                error = why_refused(lane, refused)
                self._count_conflict(lane, error)
                failed.setdefault(str(error), (error, []))[1].append(lane)
        for error, same in failed.values():
            self.fail(same, error)

    def _is_beyond(self, lane: Lane, refused: Refusal, now_s: float) -> bool:
        """Whether a refusal is no failure: the store has it all, or the payload has to show it."""
        if is_decided_by_payload(lane, refused):
            lane.epoch, lane.is_placed = lane.earlier_epoch, True
            self.advance(lane)
            return True
        if has_survived(lane, refused):
            # The store has all of it; after its next restart it may not.
            lane.epoch = lane.epoch or lane.earlier_epoch
            self.end_well(lane, now_s)
            return True
        if lane.is_doubted and is_payload_released(refused):
            self._end_sealed(lane, now_s)
            return True
        return False

    def take_endings(self) -> list[Call]:
        """Return the calls that abandon trajectories and post seals."""
        queues = self.queues
        calls = [
            Call(
                Abandon(
                    self.run,
                    self.writer,
                    lane.trajectory_id,
                    lane.epoch,
                    lane.abandon_reason or "",
                ),
                partial(self._abandoned, lane),
                partial(self.refuse, [lane]),
                partial(queues.abandons.appendleft, lane),
            )
            for lane in queues.take_abandons()
        ]
        if lanes := queues.take_seals():
            posting = Call(
                seals_of(self.run, self.writer, lanes),
                partial(self._posted, lanes),
                partial(self._not_posted, lanes),
                lambda: queues.seals.extendleft(reversed(lanes)),
            )
            calls.append(posting)
        return calls

    def take_payload(self) -> list[Call]:
        """Return one call per trajectory with waiting turns, and its seal if it ends there."""
        calls: list[Call] = []
        num_bytes = 0
        while num_bytes < MAX_ROUND_BYTES and (lane := self.queues.take_payload()) is not None:
            num_turns, num_lane_bytes = num_sendable(lane)
            num_bytes += num_lane_bytes
            seals = lane.seal is not None and num_turns == len(lane.pending)
            if seals and lane.seal is not None:
                lane.seal_record = lane.seal(lane.epoch)
            storing = Call(
                payload(self.run, self.writer, lane, num_turns=num_turns, seals=seals),
                partial(self._stored, lane, num_turns, seals),
                partial(self.refuse, [lane]),
                partial(self.queues.put_back_payload, lane),
            )
            calls.append(storing)
        return calls

    def _abandoned(self, lane: Lane, _: object, now_s: float) -> None:
        self.inflight.add("num_abandoned", not lane.has_ended)
        self.end_well(lane, now_s)

    def _not_posted(self, lanes: Sequence[Lane], refused: Refusal, _: float) -> None:
        self.fail(lanes, refused.error)

    def _adopt_again(self, lane: Lane) -> None:
        """Queue the adoption of a lane that was adopted before a restart."""

        def accept(answer: Sequence[int], now_s: float) -> None:
            self.resend_buffer.keep(Adopted(lane), now_s=now_s)
            self.opened(lane, answer[0], now_s)

        def refuse(refused: Refusal, now_s: float) -> None:
            self.refuse([lane], refused, now_s)
            self.resend_buffer.keep(Adopted(lane), now_s=now_s)

        def request() -> Adopt:
            return Adopt(self.run, self.writer, lane.trajectory_id)

        self.queues.of_run.append(RunCall(request, accept, refuse))

    def resend(self, *, is_other: bool) -> None:
        """Return all kept writes to the queues, before everything that waits.

        `is_other` is False at the first contact: the store is not known to be restarted.
        """
        resent = resend(self.resend_buffer.take(), queues=self.queues, inflight=self.inflight)
        if is_other:
            self.inflight.add("num_restarts")
            _logger.warning(
                "run %s: the store was restarted and may have lost writes: those of %d "
                "trajectories are sent again",
                self.run,
                len(resent.closed) + len(resent.open),
            )
        for lane in resent.adopted:
            self._adopt_again(lane)
        for lane in (*resent.closed, *resent.open):
            self.unended[lane] = None
        for lane in resent.closed:
            self.heartbeats.ended(lane)
        for lane in resent.open:
            self.reservations.grew(lane)
            self.advance(lane)
        self.heartbeats.failed()

    def fail(self, lanes: Sequence[Lane], error: TurnstreamError) -> None:
        """End lanes with this error, which is logged once."""
        if lanes:
            names = few_of([lane.key.readable_name for lane in lanes])
            _logger.warning("run %s: trajectory %s failed: %s", self.run, names, error)
        for lane in lanes:
            self.end(lane, error)

    def end_well(self, lane: Lane, now_s: float) -> None:
        """End a lane whose end the run has acknowledged; only its seal is still needed.

        Turns that were to be sent again are stored, and a restart of the store may lose them.
        """
        for pending in lane.pending:
            self.resend_buffer.keep(KeptTurn(lane, pending.turn), now_s=now_s)
        lane.num_acknowledged += len(lane.pending)
        if lane.seal is not None:
            record = lane.seal_record
            lane.seal = lambda _epoch: record
        self.resend_buffer.keep(Ended(lane), now_s=now_s)
        self.end(lane)
        lane.has_ended = True

    def end(self, lane: Lane, error: TurnstreamError | None = None) -> None:
        """End a lane, and settle all its receipts."""
        lane.error = error
        self.unended.pop(lane, None)
        self.heartbeats.ended(lane)
        self.reservations.ended(lane)
        while lane.pending:
            turn, receipt, is_again = lane.pending.popleft()
            if not is_again:
                self.inflight.accepted(lane, -len(turn.record))
            if receipt is not None:
                receipt.settle(lane.key, error)
        if lane.end is not None:
            lane.end.settle(lane.key, error)
            lane.end = None
        if error is not None and lane.has_ended and lane.abandon_reason is None:
            self.lose(lane.key.readable_name, error)

    def lose(self, what: str, reason: TurnstreamError) -> None:
        """Record that something acknowledged is lost for good."""
        error = reason
        if not isinstance(reason, StoreBehindError):
            error = StoreBehindError(f"{what} was acknowledged, and the store lost it: {reason}")
        _logger.error("run %s: %s", self.run, error)
        self.inflight.add("num_lost")
        self.losses.append(error)

    def fail_all(self, error_of: Callable[[Lane | Admission | str], TurnstreamError]) -> None:
        """Fail everything that is not acknowledged, and settle its receipts.

        `error_of` returns the error of a trajectory, of a group, or of a call, in words.
        """
        queues = self.queues
        opened = [(each.opened, error_of(each)) for each in queues.admissions]
        calls = [
            (call.receipt, call.what)
            for call in queues.of_run
            if call.receipt is not None and not call.receipt.is_done
        ]
        queues.clear()
        for lane in list(self.unended):
            if lane.pending or lane.end is not None or lane.epoch == 0 or lane.has_ended:
                self.end(lane, error_of(lane))
        for receipt, error in opened:
            receipt.settle(None, error)
        for receipt, what in calls:
            receipt.settle(None, error_of(what))

    def abandon_unwritten(self, key: TrajectoryKey, epoch: int, *, reason: str) -> None:
        """Abandon a trajectory that the store has opened and that has no writer here."""
        stray = self.begin(key)
        stray.epoch, stray.abandon_reason = epoch, reason
        self.queues.abandons.append(stray)

    def _add_lease(self, lane: Lane, now_s: float) -> None:
        self.reservations.grew(lane)
        self.heartbeats.opened(lane, now_s=now_s)

    def _count_conflict(self, lane: Lane, error: TurnstreamError) -> None:
        if isinstance(error, ConflictError):
            note = RunCall(
                lambda: CountConflict(self.run, lane.trajectory_id, str(error)),
                lambda _, __: None,
                lambda refused, _: _logger.warning(
                    "run %s: a conflict is not counted: %s", self.run, refused.error
                ),
            )
            self.queues.of_run.append(note)
