"""Trajectories on their way: opened, stored, ended, failed or lost. No I/O, no clock.

Owns what all trajectories of a publisher share: queues, leases, reservations and kept writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from turnstream.errors import ConflictError, StoreBehindError, TurnstreamError
from turnstream.generator.outbox import resend
from turnstream.generator.outbox.heartbeats import Heartbeats, Reservations
from turnstream.generator.outbox.receipts import InflightCounts
from turnstream.generator.outbox.resend import KeptWrite, ResendBuffer
from turnstream.generator.outbox.writes import (
    MAX_ROUND_BYTES,
    Admission,
    Call,
    SendQueues,
    TargetRun,
    TrajectoryQueue,
    drained,
)
from turnstream.generator.requests import Abandon, Adopt, AppendTurns, CountConflict, PostSeals
from turnstream.store.client import keys
from turnstream.store.client.replies import CODES, Refusal, parse_refusal
from turnstream.types import TrajectoryKey
from turnstream.types.names import few_of

_logger = logging.getLogger(__name__)


class TrajectoryTracker:
    """The trajectories of one publisher, from their first write to their end."""

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
        self.send_queues = SendQueues()
        self.heartbeats = Heartbeats(target, writer, self.fail)
        self.reservations = Reservations(target, writer)
        self.losses: list[TurnstreamError] = []
        self.unended: dict[TrajectoryQueue, None] = {}
        self.connection = 1

    @property
    def run(self) -> str:
        """The id of the run; its name until it is found."""
        return self.target.run

    def begin(self, key: TrajectoryKey) -> TrajectoryQueue:
        """Return a new trajectory that is not open."""
        queue = TrajectoryQueue(key, keys.trajectory_id(key))
        self.unended[queue] = None
        return queue

    def adopt(
        self, key: TrajectoryKey, *, epoch: int, num_turns: int, num_bytes: int, now_s: float
    ) -> TrajectoryQueue:
        """Continue an adopted trajectory after its stored turns."""
        queue = self.begin(key)
        queue.epoch, queue.is_placed, queue.num_acknowledged = epoch, True, num_turns
        queue.num_bytes = queue.acknowledged_bytes = num_bytes
        self._add_lease(queue, now_s)
        self.resend_buffer.keep(KeptWrite(queue, is_adoption=True), now_s=now_s)
        return queue

    def begin_opened(
        self, epochs: Mapping[TrajectoryKey, int], *, now_s: float
    ) -> list[TrajectoryQueue]:
        """Return new trajectories that the store has opened with these epochs."""
        queues = [self.begin(key) for key in epochs]
        for queue in queues:
            queue.epoch = epochs[queue.key]
            self._add_lease(queue, now_s)
        return queues

    def has_any(self, keys: Set[TrajectoryKey]) -> bool:
        """Whether one of these is written here, or was and may have to be sent again."""
        is_written = any(queue.key in keys for queue in self.unended)
        return is_written or any(map(self.resend_buffer.has_opened, keys))

    def opened(self, queue: TrajectoryQueue, epoch: int, now_s: float) -> None:
        """Send the turns of a trajectory that the store has opened with this epoch."""
        queue.epoch = epoch
        self._add_lease(queue, now_s)
        self.inflight.moved(queue.num_pending_bytes, is_open=True)
        self.advance(queue)

    def not_opened(
        self, queue: TrajectoryQueue, refused: Refusal, now_s: float
    ) -> TurnstreamError | None:
        """Return why the store has not opened it; None where the store has all of it."""
        if self._is_beyond(queue, refused, now_s):
            return None
        if queue.seal_record and resend.is_ended(refused):
            queue.epoch = queue.earlier_epoch  # its seal had been posted, and the answer was lost
            self.send_queues.seals.append(queue)
            return None
        self.fail([queue], refused.error)
        return refused.error

    def _stored(
        self, queue: TrajectoryQueue, sent: AppendTurns, answer: int | bytes | None, now_s: float
    ) -> None:
        """Record that the store has the payload of a call.

        `answer` is the number of new records, the id of the entry of a direct turn, or None where
        such a turn found no stream.
        """
        if answer is None:
            self._needs_script(queue)
            return
        num_new = answer if isinstance(answer, int) else 1
        queue.is_placed, queue.connection = True, self.connection
        num_turns = len(sent.records) - sent.is_sealed
        for _ in range(num_turns):
            turn, receipt, is_again = queue.pending.popleft()
            queue.acknowledged_bytes += len(turn.record)
            self.resend_buffer.keep(KeptWrite(queue, turn), now_s=now_s)
            if is_again:
                self.inflight.add("num_resent")
            else:
                self.inflight.acknowledged(turn.shape, num_bytes=len(turn.record))
            if receipt is not None:
                receipt.settle(queue.key)
        queue.num_acknowledged += num_turns
        self.inflight.add("num_duplicates", len(sent.records) - num_new)
        if sent.is_sealed:
            self.resend_buffer.keep(KeptWrite(queue), now_s=now_s)
            self.send_queues.seals.append(queue)
        else:
            self.advance(queue)

    def _needs_script(self, queue: TrajectoryQueue) -> None:
        """Send the turn that was not appended directly by the script, which knows why."""
        queue.connection = 0
        self.send_queues.put_back_payload(queue)

    def _not_stored(
        self, queue: TrajectoryQueue, sent: AppendTurns, refused: Refusal, now_s: float
    ) -> None:
        if not sent.is_direct or refused.code in CODES:
            self.refuse([queue], refused, now_s)
        else:
            self._needs_script(queue)

    def advance(self, queue: TrajectoryQueue) -> None:
        """Queue the next call of a trajectory, now that the one before is answered."""
        if queue.pending or queue.seal is not None:
            self.send_queues.add_payload(queue)
        elif queue.abandon_reason is not None:
            self.send_queues.abandons.append(queue)

    def _posted(
        self, queues: Sequence[TrajectoryQueue], answers: Sequence[bytes], now_s: float
    ) -> None:
        for queue, answer in zip(queues, answers, strict=True):
            text = answer.decode()
            if text in ("OK", "DUPLICATE", "SURPLUS"):
                self._end_sealed(queue, now_s)
                continue
            refused = parse_refusal(text)
            if resend.is_unknown(refused) and not queue.is_doubted:
                queue.is_doubted = True  # an answer may be lost: the payload decides
                self.advance(queue)
            else:
                self.fail([queue], refused.error)

    def _end_sealed(self, queue: TrajectoryQueue, now_s: float) -> None:
        if not queue.has_ended:
            self.inflight.add("num_trajectories")
            self.inflight.add("merged_tokens", queue.merged_tokens)
        self.end_well(queue, now_s)

    def refuse(self, queues: Sequence[TrajectoryQueue], refused: Refusal, now_s: float) -> None:
        """Fail trajectories of which the store refused something, unless it has all of them."""
        failed: dict[str, tuple[TurnstreamError, list[TrajectoryQueue]]] = {}
        for queue in queues:
            if not self._is_beyond(queue, refused, now_s):
                error = resend.why_refused(queue, refused)
                self._count_conflict(queue, error)
                failed.setdefault(str(error), (error, []))[1].append(queue)
        for error, same in failed.values():
            self.fail(same, error)

    def _is_beyond(self, queue: TrajectoryQueue, refused: Refusal, now_s: float) -> bool:
        """Whether a refusal is no failure: the store has it all, or the payload has to show it."""
        if resend.is_decided_by_payload(queue, refused):
            queue.epoch, queue.is_placed = queue.earlier_epoch, True
            self.advance(queue)
            return True
        if resend.has_survived(queue, refused):
            # The store has all of it; after its next restart it may not.
            queue.epoch = queue.epoch or queue.earlier_epoch
            self.end_well(queue, now_s)
            return True
        if queue.is_doubted and resend.is_payload_released(refused):
            self._end_sealed(queue, now_s)
            return True
        return False

    def take_endings(self) -> list[Call]:
        """Return the calls that abandon trajectories and post seals."""
        send_queues = self.send_queues
        calls = [
            Call(
                Abandon(
                    self.run,
                    self.writer,
                    queue.trajectory_id,
                    queue.epoch,
                    queue.abandon_reason or "",
                ),
                partial(self._abandoned, queue),
                partial(self.refuse, [queue]),
                partial(send_queues.abandons.appendleft, queue),
            )
            for queue in drained(send_queues.abandons)
        ]
        if queues := send_queues.take_seals():
            posting = Call(
                PostSeals(self.run, self.writer, [queue.posted_seal for queue in queues]),
                partial(self._posted, queues),
                lambda refused, _: self.fail(queues, refused.error),
                lambda: send_queues.seals.extendleft(reversed(queues)),
            )
            calls.append(posting)
        return calls

    def take_payload(self) -> list[Call]:
        """Return one call per trajectory with waiting turns, and its seal if it ends there."""
        calls: list[Call] = []
        num_bytes = 0
        while (
            num_bytes < MAX_ROUND_BYTES and (queue := self.send_queues.take_payload()) is not None
        ):
            sent = queue.next_payload(self.run, self.writer, connection=self.connection)
            num_bytes += sum(map(len, sent.records))
            storing = Call(
                sent,
                partial(self._stored, queue, sent),
                partial(self._not_stored, queue, sent),
                partial(self.send_queues.put_back_payload, queue),
            )
            calls.append(storing)
        return calls

    def _abandoned(self, queue: TrajectoryQueue, _: object, now_s: float) -> None:
        self.inflight.add("num_abandoned", not queue.has_ended)
        self.end_well(queue, now_s)

    def _adopt_again(self, queue: TrajectoryQueue) -> None:
        """Queue the adoption of a trajectory that was adopted before a restart."""

        def accept(answer: Sequence[int], now_s: float) -> None:
            self.resend_buffer.keep(KeptWrite(queue, is_adoption=True), now_s=now_s)
            self.opened(queue, answer[0], now_s)

        def refuse(refused: Refusal, now_s: float) -> None:
            self.refuse([queue], refused, now_s)
            self.resend_buffer.keep(KeptWrite(queue, is_adoption=True), now_s=now_s)

        request = Adopt(self.run, self.writer, queue.trajectory_id)
        self.send_queues.of_run.append(Call(request, accept, refuse))

    def resend(self, *, is_other: bool) -> None:
        """Return all kept writes to the queues, before everything that waits.

        `is_other` is False at the first contact: the store is not known to be restarted.
        """
        resent = resend.resend(
            self.resend_buffer.take(), send_queues=self.send_queues, inflight=self.inflight
        )
        if is_other:
            self.inflight.add("num_restarts")
            _logger.warning(
                "run %s: the store was restarted and may have lost writes: those of %d "
                "trajectories are sent again",
                self.run,
                len(resent.closed) + len(resent.open),
            )
        for queue in resent.adopted:
            self._adopt_again(queue)
        for queue in (*resent.closed, *resent.open):
            self.unended[queue] = None
        for queue in resent.closed:
            self.heartbeats.ended(queue)
        for queue in resent.open:
            self.reservations.grew(queue)
            self.advance(queue)
        self.heartbeats.failed()

    def fail(self, queues: Sequence[TrajectoryQueue], error: TurnstreamError) -> None:
        """End trajectories with this error, which is logged once."""
        if queues:
            names = few_of([queue.key.readable_name for queue in queues])
            _logger.warning("run %s: trajectory %s failed: %s", self.run, names, error)
        for queue in queues:
            self.end(queue, error)

    def end_well(self, queue: TrajectoryQueue, now_s: float) -> None:
        """End a trajectory whose end the run has acknowledged; only its seal is still needed.

        Turns that were to be sent again are stored, and a restart of the store may lose them.
        """
        for pending in queue.pending:
            self.resend_buffer.keep(KeptWrite(queue, pending.turn), now_s=now_s)
        queue.num_acknowledged += len(queue.pending)
        queue.acknowledged_bytes = queue.num_bytes
        if queue.seal is not None:
            record = queue.seal_record
            queue.seal = lambda _epoch: record
        self.resend_buffer.keep(KeptWrite(queue), now_s=now_s)
        self.end(queue)
        queue.has_ended = True

    def end(self, queue: TrajectoryQueue, error: TurnstreamError | None = None) -> None:
        """End a trajectory, and settle all its receipts."""
        queue.error = error
        self.unended.pop(queue, None)
        self.heartbeats.ended(queue)
        self.reservations.ended(queue)
        while queue.pending:
            turn, receipt, is_again = queue.pending.popleft()
            if not is_again:
                self.inflight.accepted(-len(turn.record), is_open=queue.epoch > 0)
            if receipt is not None:
                receipt.settle(queue.key, error)
        if queue.end is not None:
            queue.end.settle(queue.key, error)
            queue.end = None
        if error is not None and queue.has_ended and queue.abandon_reason is None:
            self.lose(queue.key.readable_name, error)

    def lose(self, what: str, reason: TurnstreamError) -> None:
        """Record that something acknowledged is lost for good."""
        error = reason
        if not isinstance(reason, StoreBehindError):
            error = StoreBehindError(f"{what} was acknowledged, and the store lost it: {reason}")
        _logger.error("run %s: %s", self.run, error)
        self.inflight.add("num_lost")
        self.losses.append(error)

    def fail_all(
        self, error_of: Callable[[TrajectoryQueue | Admission | str], TurnstreamError]
    ) -> None:
        """Fail everything that is not acknowledged, and settle its receipts.

        `error_of` returns the error of a trajectory, of a group, or of a call, in words.
        """
        queues = self.send_queues
        opened = [(each.opened, error_of(each)) for each in queues.admissions]
        calls = [(each.receipt, each.what) for each in queues.of_run if each.receipt is not None]
        queues.clear()
        for queue in list(self.unended):
            if queue.pending or queue.end is not None or queue.epoch == 0 or queue.has_ended:
                self.end(queue, error_of(queue))
        for receipt, error in opened:
            receipt.settle(None, error)
        for receipt, what in calls:
            receipt.settle(None, error_of(what))

    def abandon_unwritten(self, key: TrajectoryKey, epoch: int, *, reason: str) -> None:
        """Abandon a trajectory that the store has opened and that has no writer here."""
        stray = self.begin(key)
        stray.epoch, stray.abandon_reason = epoch, reason
        self.send_queues.abandons.append(stray)

    def _add_lease(self, queue: TrajectoryQueue, now_s: float) -> None:
        self.reservations.grew(queue)
        self.heartbeats.opened(queue, now_s=now_s)

    def _count_conflict(self, queue: TrajectoryQueue, error: TurnstreamError) -> None:
        if isinstance(error, ConflictError):
            note = Call(
                CountConflict(self.run, queue.trajectory_id, str(error)),
                lambda _, __: None,
                lambda refused, _: _logger.warning(
                    "run %s: a conflict is not counted: %s", self.run, refused.error
                ),
            )
            self.send_queues.of_run.append(note)
