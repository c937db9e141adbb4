"""The state machine of both publishers: order of sending and of resending. No I/O, no clock.

Its owner adds writes and repeats three calls: take a round, send it, pass the replies back. One
round is in flight at a time; heartbeats that are due meanwhile travel beside it. Unacknowledged
calls return to their queues in order. A round takes, first to last::

    abandons     of trajectories whose turns are all acknowledged
    seals        of trajectories whose payload is all acknowledged: one call for many
    admissions   of groups; a refused one waits until the run's wake stream moves
    payload      per trajectory one call with the waiting turns, and the seal if it ends there
    of the run   rewards, its configuration, conflicts, its closing, trajectories to adopt again
    reservations of trajectories that have outgrown their reserved bytes
    heartbeats   of all open trajectories when they are due; alone after a long silence
    waits        the state of the run, for groups whose wait is about to time out

Each call has the handlers of its reply. Acknowledged writes are kept until they are on disk
(`resend.py`). A new connection first reads the server's run id. If the server was restarted, the
kept writes return to the queues before all others. If the store syncs before it answers, a round is
one transaction and costs one sync. Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from redis.exceptions import NoScriptError, ResponseError

from turnstream.errors import StoreUnavailableError, TurnstreamError
from turnstream.generator.encode.encoder import DraftedGroup, DraftedSeal, TurnRecord
from turnstream.generator.outbox.receipts import InflightCounts, PendingWrite, PublisherStatistics
from turnstream.generator.outbox.resend import KEEP_S, MAX_KEPT_BYTES, ResendBuffer
from turnstream.generator.outbox.run_calls import Admissions, RunCalls
from turnstream.generator.outbox.trajectories import TrajectoryTracker
from turnstream.generator.outbox.waits import Outage, WaitMessages, first_result
from turnstream.generator.outbox.writes import (
    Admission,
    Answers,
    Call,
    PendingTurn,
    Round,
    StoreProcess,
    TargetRun,
    TrajectoryQueue,
)
from turnstream.store.client.deadlines import is_silence
from turnstream.store.client.replies import parse_refusal, translate
from turnstream.types.names import RunId

_logger = logging.getLogger(__name__)


class Outbox:
    """Writes on their way to one run.

    Its arguments are those of `Publisher`. `jitter` returns numbers from 0 to 1, and `address` is
    the address of the store, for messages. The id of the run is read before anything else is sent.
    """

    def __init__(
        self,
        run: str | TargetRun,
        writer: str,
        *,
        max_inflight_bytes: int,
        timeout_s: float,
        admission_timeout_s: float,
        jitter: Callable[[], float],
        address: str = "?",
        keep_s: float = KEEP_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self.target = TargetRun(RunId(run)) if isinstance(run, str) else run
        self.writer = writer
        self.inflight = InflightCounts(max_inflight_bytes)
        self._resend_buffer = ResendBuffer(keep_s=keep_s, max_bytes=max_kept_bytes)
        self.tracker = TrajectoryTracker(
            self.target, writer, inflight=self.inflight, resend_buffer=self._resend_buffer
        )
        self._queues = self.tracker.send_queues
        self.admissions = Admissions(self.tracker, timeout_s=admission_timeout_s)
        self.run_calls = RunCalls(self.tracker, timeout_s=timeout_s)
        self.timeout_s = timeout_s
        self.admission_timeout_s = admission_timeout_s
        self.outage = Outage(timeout_s, jitter=jitter, address=address)
        self.why = WaitMessages(self.tracker, self.admissions, self.outage)
        self._process = ""
        self._round: Round | None = None
        self._is_connected = False
        self._syncs_each_write = False
        self._was_aborted = False

    @property
    def run(self) -> str:
        """The id of the run; its name until it is found."""
        return self.target.run

    def append(
        self, queue: TrajectoryQueue, turn: TurnRecord, receipt: PendingWrite | None = None
    ) -> None:
        """Send a turn after the others of its trajectory, or raise the error that ended it."""
        queue.raise_error()
        queue.pending.append(PendingTurn(turn, receipt))
        self.inflight.accepted(len(turn.record), is_open=queue.epoch > 0)
        queue.num_bytes += len(turn.record)
        self.tracker.reservations.grew(queue)
        self._queues.add_payload(queue)

    def seal(self, queue: TrajectoryQueue, seal: DraftedSeal, *, end: PendingWrite) -> None:
        """End a trajectory after its last turn; the answer of the run settles `end`."""
        queue.raise_error()
        queue.seal, queue.merged_tokens, queue.awaits_reward = seal
        queue.end = end
        self._queues.add_payload(queue)

    def put_group(self, whole: DraftedGroup, end: PendingWrite) -> None:
        """Send a whole finished group; the answer for each of its trajectories settles `end`."""
        queues = self.admissions.request(whole.opening, [made.key for made in whole.trajectories])
        for queue, made in zip(queues, whole.trajectories, strict=True):
            for turn in made.turns:
                self.append(queue, turn)
            self.seal(queue, made.seal, end=end)

    def abandon(self, queue: TrajectoryQueue, reason: str, *, end: PendingWrite) -> None:
        """Abandon a trajectory after its last turn; the answer of the run settles `end`.

        A failed trajectory is not abandoned: it may belong to another writer.
        """
        if queue.error is not None:
            end.settle(queue.key)
            return
        queue.abandon_reason, queue.end = reason, end
        if queue.epoch == 0:
            self.admissions.withdraw_abandoned()
        elif not queue.pending:
            self._queues.abandons.append(queue)

    @property
    def is_idle(self) -> bool:
        """Whether everything accepted is acknowledged or has failed."""
        return self._queues.is_empty and (self._round is None or self._round.is_heartbeat)

    @property
    def has_round(self) -> bool:
        """Whether a round is in flight, after which the next one is taken."""
        return self._round is not None

    @property
    def is_on_disk(self) -> bool:
        """Whether, beyond that, the store has had the time to sync what it acknowledged."""
        return self.is_idle and self._resend_buffer.is_settled and self.run_calls.is_settled

    def take_losses(self) -> list[TurnstreamError]:
        """Return, once, the errors of acknowledged trajectories that the store lost for good."""
        losses, self.tracker.losses = self.tracker.losses, []
        return losses

    def statistics(self) -> PublisherStatistics:
        """Return the counts so far."""
        resend_buffer = self._resend_buffer
        return self.inflight.statistics(
            num_forgotten=resend_buffer.num_forgotten,
            kept_bytes=resend_buffer.num_bytes,
            max_kept_bytes=resend_buffer.max_bytes,
        )

    def next_round(self, now_s: float) -> Round | None:
        """Return the calls to send now; None if there is nothing to send, or a pause lasts."""
        self.expire(now_s)
        if warning := self.why.warning(now_s):
            _logger.warning("run %s: %s", self.run, warning)
        if self._round is not None or self.outage.pause_s(now_s) > 0:
            return None
        self.outage.sent_s = self.outage.progress_s = now_s
        is_known = self._is_connected or self._resend_buffer.is_settled
        if not is_known or not (self.target.is_found or self._queues.is_empty):
            return self._empty_round()  # acknowledged writes must be restored first
        if not self._is_connected:
            self.tracker.connection += 1
        calls = self._take_calls(now_s)
        if not calls:
            return self._empty_round() if self._resend_buffer.pause_s(now_s) == 0 else None
        self._round = Round(
            calls,
            is_first=not self._is_connected,
            is_grouped=self._syncs_each_write and not self._was_aborted and len(calls) > 1,
        )
        self.outage.num_calls = len(calls)
        return self._round

    def next_beats(self, now_s: float) -> Round | None:
        """Return heartbeats to send beside the round in flight; None if there are none to send.

        A slow link may need longer for a round than a lease lasts.
        """
        calls = self.tracker.heartbeats.take(now_s) if self.has_round else []
        return Round(calls, is_first=not self._is_connected) if calls else None

    def beats_answered(self, answers: Answers, *, sent_s: float) -> None:
        """The store answered heartbeats that were sent beside a round; a refusal says nothing."""
        if not any(isinstance(answer, ResponseError) for answer in answers.values):
            self.tracker.heartbeats.renewed_meanwhile(answers.values, sent_s=sent_s)

    def _take_calls(self, now_s: float) -> list[Call]:
        """Return the calls to send now, first to last.

        After a silence longer than a lease, only heartbeats are sent. A late write could otherwise
        create a trajectory again that was abandoned and released.
        """
        tracker = self.tracker
        beats = tracker.heartbeats.take(now_s)
        asks = self.admissions.due(now_s, is_full=self.outage.is_full)
        if tracker.heartbeats.has_slept(now_s):
            return [*beats, *asks]
        return [
            *tracker.take_endings(),
            *self.admissions.take(),
            *tracker.take_payload(),
            *self.run_calls.take(now_s),
            *tracker.reservations.take(),
            *beats,
            *asks,
        ]

    def expire(self, now_s: float) -> None:
        """End the waits that have timed out.

        A silent store may block the sender, so another thread calls this during a round.
        """
        outage = self.outage
        if self.admissions.pause_s(now_s) == 0:
            store = self.why.store(now_s) if outage.is_strained(now_s) else ()
            self.admissions.expire(now_s, store=store)
        if outage.left_s(now_s) == 0:
            self._fail_overdue(outage.trouble, now_s)

    def ends_in_s(self, now_s: float) -> float | None:
        """Seconds after which `expire` may end something; None while nothing has a deadline."""
        return first_result(self.admissions.pause_s(now_s), self.outage.left_s(now_s))

    def _empty_round(self) -> Round:
        """Return a round without calls, which finds the server instance and the id of the run."""
        self._round = Round(
            (), is_first=True, sought="" if self.target.is_found else self.target.run
        )
        self.outage.num_calls = 0
        return self._round

    def pause_s(self, now_s: float) -> float | None:
        """Seconds after which `next_round` may give something that it does not give now."""
        expires_s, away_s = self.admissions.pause_s(now_s), self.outage.pause_s(now_s)
        if away_s > 0:
            return first_result(expires_s, away_s)
        parts = (self.tracker.heartbeats, self._resend_buffer, self.run_calls)
        due_s = [part.pause_s(now_s) for part in parts]
        return first_result(expires_s, *due_s, self.admissions.asks_in_s(now_s))

    def wakes_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `next_round` is to be called again, for a round or a warning."""
        return first_result(self.pause_s(now_s), self.why.warns_in_s(now_s))

    def answered(self, sent: Round, answers: Answers, *, now_s: float) -> None:
        """The store answered the round."""
        if not self._ends(sent):
            return
        self.outage.answered_s = now_s
        back: list[Call] = []
        trouble = "" if sent.calls else answers.trouble
        is_new, self._is_connected = not self._is_connected, not parse_refusal(trouble).is_passing
        if answers.store is not None and self._is_connected:
            self._compare_process(answers.store, is_new=is_new)
            self._find_run(answers.run)
        for call, answer in zip(sent.calls, answers.values, strict=True):
            if not isinstance(answer, ResponseError):
                call.accept(answer, now_s)
                continue
            refused = self.target.refusal(answer)
            is_unknown = isinstance(answer, NoScriptError)
            if is_unknown or refused.is_passing:
                back.append(call)
                # A server without the scripts gets them at once, but only once.
                is_loading = is_unknown and not sent.is_first
                trouble = trouble or ("" if is_loading else f"{refused.code} {refused.message}")
                self._is_connected = self._is_connected and not is_unknown
            else:
                call.refuse(refused, now_s)
        self.inflight.add("num_retries", len(back))
        _put_back(back)
        # A full store refuses a transaction with one append in it; single calls free memory.
        self._was_aborted = answers.is_aborted or (self._was_aborted and bool(trouble))
        if self._is_connected:
            self._resend_buffer.prove(self.outage.sent_s)
        if trouble:
            self._back_off(trouble, now_s, since_s=now_s)
        else:
            self.outage.end()

    def lost(self, sent: Round, *, error: Exception, now_s: float) -> None:
        """The connection failed: nothing is known of what the round asked for."""
        if not self._ends(sent):
            return
        self.inflight.add("num_retries", len(sent.calls) or 1)
        _put_back(sent.calls)
        self._is_connected = False
        reason = translate(error)
        if isinstance(reason, StoreUnavailableError):
            is_silent = is_silence(error)
            self._back_off(str(reason), now_s, since_s=self.outage.progress_s, is_silent=is_silent)
        else:
            self.fail_all(reason)

    def _compare_process(self, store: StoreProcess, *, is_new: bool) -> None:
        """Compare the process with the last one; another may have lost acknowledged writes.

        One that does not say its name counts as another one after every new connection.
        """
        self._syncs_each_write = store.syncs_each_write is not False
        self._resend_buffer.is_needed = not store.syncs_each_write
        known, self._process = self._process, store.name
        is_same = known == self._process and bool(known or not is_new)
        if not is_same and not self._resend_buffer.is_settled:
            self.tracker.resend(is_other=bool(known) or not self._process)

    def _find_run(self, found: str | TurnstreamError | None) -> None:
        """Keep to the run that was found; fail all writes if it was not read."""
        if isinstance(found, TurnstreamError):
            self.fail_all(found)
        elif isinstance(found, str):
            self.target.found(found)

    def fail_all(self, error: TurnstreamError) -> None:
        """Fail everything that is not acknowledged."""
        self._end_all(lambda _: error)

    def close(self, error: TurnstreamError) -> None:
        """Fail everything that is not acknowledged, and free the acknowledged writes."""
        self.fail_all(error)
        self._resend_buffer.take()

    def _end_all(
        self, error_of: Callable[[TrajectoryQueue | Admission | str], TurnstreamError]
    ) -> None:
        if self._round is not None:
            _put_back(self._round.calls)
            self._is_connected = not self._ends(self._round)
        self.admissions.woken()
        self.tracker.fail_all(error_of)

    def _ends(self, sent: Round) -> bool:
        """Return whether this round is in flight; it is not if everything failed in between."""
        if self._round is not sent:
            return False
        self._round = None
        self.outage.num_calls = None
        return True

    def _back_off(
        self, trouble: str, now_s: float, *, since_s: float, is_silent: bool = False
    ) -> None:
        if not self.outage.is_failing:
            _logger.warning("run %s: the store takes no writes: %s", self.run, trouble)
        if self.outage.failed(trouble, now_s, since_s=since_s, is_silent=is_silent):
            self._fail_overdue(trouble, now_s)

    def _fail_overdue(self, trouble: str, now_s: float) -> None:
        message = f"the store took no writes for {self.timeout_s:g} s: {trouble}"
        _logger.error("run %s: %s", self.run, message)
        error_of = self.why.errors_of_failed(message, now_s)
        self.outage.end()
        self._end_all(error_of)


def _put_back(calls: Sequence[Call]) -> None:
    """Queue unanswered calls again, before all others and in the same order."""
    for call in reversed(calls):
        call.put_back()
