"""The heart of both publishers: what to send next, and what an answer means. No I/O, no clock.

Its owner puts writes in and otherwise repeats: take a round, send it, hand in the answers. One
round is on its way at a time. What the store did not acknowledge goes back to where it was, in
order, so that a lost connection, a restart or a full server costs time and nothing else. A round
takes, first to last::

    questions    what the run declares, once
    abandons     of lanes whose turns are all acknowledged
    seals        of lanes whose payload is all acknowledged: one call for many
    admissions   of groups; one that is told to wait stands aside until the run's wake stream
                 moves, so that it holds up nothing else
    payload      per lane one call with the turns that wait, and the seal if it ends there
    heartbeats   of all open lanes, where they are due; whatever fails of them is asked again

Where the store syncs to disk before it answers, a round is one write, so that a sync is paid for
once a round and not for every few calls.

Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from turnstream.errors import (
    NotReadyError,
    RunNotFoundError,
    StoreUnavailableError,
    TurnstreamError,
)
from turnstream.generator.backoff import Backoff
from turnstream.generator.calls import (
    AbandonCall,
    AdmissionCall,
    Call,
    CloseCall,
    CommandMaker,
    ConfigCall,
    HeartbeatCall,
    PayloadCall,
    Round,
    SealsCall,
)
from turnstream.generator.drafts import SealMaker, TurnRecord
from turnstream.generator.heartbeats import Heartbeats
from turnstream.generator.lanes import Admission, Lane, PendingTurn
from turnstream.generator.queues import Queues
from turnstream.generator.receipts import Delivery
from turnstream.generator.tally import Tally
from turnstream.records.configs import decode_config
from turnstream.records.events import encode_event
from turnstream.store import keys
from turnstream.store.replies import error_text, is_passing, refusal, translate, wake_id
from turnstream.types import DeclaredColumn, GroupOpened, TrajectoryKey

_logger = logging.getLogger(__name__)


class Outbox:
    """Writes on their way to one run.

    Args:
        run: name of the run.
        writer: who holds the leases of its trajectories.
        max_inflight_bytes: see Tally.
        timeout_s: how long the store may be away or full before everything fails.
        admission_timeout_s: how long a group may wait for leave to start.
        jitter: gives numbers from 0 to 1.
    """

    def __init__(
        self,
        run: str,
        writer: str,
        *,
        max_inflight_bytes: int,
        timeout_s: float,
        admission_timeout_s: float,
        jitter: Callable[[], float],
    ) -> None:
        self.run = run
        self.writer = writer
        self._make = CommandMaker(run, writer)
        self.tally = Tally(max_inflight_bytes)
        self._timeout_s = timeout_s
        self._admission_timeout_s = admission_timeout_s
        self._backoff = Backoff(timeout_s, jitter=jitter)
        self._queues = Queues()
        self._heartbeats = Heartbeats()
        self._unended: dict[Lane, None] = {}
        self._round: Round | None = None
        self._scripts_known = False
        self._syncs_each_write = False
        self._was_aborted = False
        self.wake_id: str | None = None
        """Not None: groups wait until the run's wake stream is beyond this id. See `woken`."""
        self.extra_columns: tuple[DeclaredColumn, ...] | None = None
        """What the run declares; None until it was asked. See `learn_columns`."""

    def admit(
        self,
        group: GroupOpened,
        members: Iterable[TrajectoryKey],
        *,
        opened: Delivery | None = None,
    ) -> list[Lane]:
        """Ask leave for a group and open these members of it."""
        lanes = [self._new_lane(key) for key in members]
        self._queues.admissions.append(
            Admission(group, encode_event(group), lanes, opened or Delivery())
        )
        return lanes

    def adopt(self, key: TrajectoryKey, *, epoch: int, num_turns: int, now_s: float) -> Lane:
        """Go on with a trajectory that was taken over with this epoch, behind its stored turns."""
        lane = self._new_lane(key)
        lane.epoch, lane.is_placed, lane.num_acknowledged = epoch, True, num_turns
        self._heartbeats.opened(lane, now_s=now_s)
        return lane

    def append(self, lane: Lane, turn: TurnRecord, receipt: Delivery | None = None) -> None:
        """Send a turn behind the others of its trajectory.

        Raises:
            TurnstreamError: the trajectory has failed before.
        """
        _raise_error(lane)
        lane.pending.append(PendingTurn(turn, receipt))
        self.tally.accepted(lane, len(turn.record))
        self._queues.add_payload(lane)

    def seal(
        self,
        lane: Lane,
        seal: SealMaker,
        *,
        merged_tokens: int,
        end: Delivery,
        awaits_reward: bool = False,
    ) -> None:
        """End a trajectory behind its last turn; `end` is told when the run knows.

        Raises:
            TurnstreamError: the trajectory has failed before.
        """
        _raise_error(lane)
        lane.seal, lane.merged_tokens, lane.end = seal, merged_tokens, end
        lane.awaits_reward = awaits_reward
        self._queues.add_payload(lane)

    def abandon(self, lane: Lane, reason: str, *, end: Delivery) -> None:
        """Give a trajectory up behind its last turn; `end` is told when the run knows.

        One that has failed is left as it is: it may belong to another writer.
        """
        if lane.error is not None:
            end.settle(lane.key)
            return
        lane.abandon_reason, lane.end = reason, end
        if lane.epoch == 0:
            self._withdraw_given_up()
        elif not lane.pending:
            self._queues.abandons.append(lane)

    def close_run(self, reason: str, receipt: Delivery) -> None:
        """Close the run to new groups."""
        self._queues.closings.append(CloseCall(reason, receipt))

    def learn_columns(self, receipt: Delivery) -> None:
        """Ask what the run declares."""
        self._queues.questions.append(ConfigCall(receipt))

    @property
    def is_idle(self) -> bool:
        """Whether everything accepted is acknowledged or has failed."""
        return self._queues.is_empty and (self._round is None or self._round.is_heartbeat)

    @property
    def num_open(self) -> int:
        """Trajectories that hold a lease, which ends some time after nobody renews it."""
        return self._heartbeats.num_open

    def next_round(self, now_s: float) -> Round | None:
        """What to send now; None while there is nothing, or while the store is left alone."""
        self._expire(now_s)
        if self._round is not None or self._backoff.pause_s(now_s) > 0:
            return None
        heartbeats = self._heartbeats.due(now_s)
        calls = [*self._queues.take(), *heartbeats]
        if not calls:
            return None
        if heartbeats:
            self._heartbeats.sent(now_s)
        commands = [self._make.command(call) for call in calls]
        self._round = Round(
            calls,
            commands,
            loads_scripts=not self._scripts_known,
            is_grouped=self._syncs_each_write and not self._was_aborted and len(calls) > 1,
        )
        return self._round

    def pause_s(self, now_s: float) -> float | None:
        """Seconds after which `next_round` may give something that it does not give now."""
        pause_s = self._backoff.pause_s(now_s)
        if pause_s > 0:
            return pause_s
        beat_s = self._heartbeats.pause_s(now_s)
        pauses_s = [] if beat_s is None else [beat_s]
        since_s = self._queues.waiting_since_s
        if since_s is not None:
            pauses_s.append(max(0.0, since_s + self._admission_timeout_s - now_s))
        return min(pauses_s, default=None)

    def answered(self, sent: Round, *, replies: Sequence[Any], now_s: float) -> None:
        """The store answered the round; `replies` holds values and ResponseErrors."""
        if not self._ends(sent):
            return
        self._scripts_known = True
        if sent.loads_scripts:
            self._syncs_each_write = sent.syncs_each_write(replies)
        back: list[Call] = []
        trouble = ""
        for call, answer in sent.answers(replies):
            if not isinstance(answer, ResponseError):
                self._accept(call, answer, now_s)
                continue
            text = error_text(answer)
            is_unknown = isinstance(answer, NoScriptError)
            if is_unknown or is_passing(text):
                back.append(call)
                # A server that forgot the scripts is told them again at once, but only once.
                trouble = trouble or ("" if is_unknown and not sent.loads_scripts else text)
                self._scripts_known = self._scripts_known and not is_unknown
            else:
                self._refuse(call, text, now_s)
        self._put_back(back)
        # A full store takes no group with a payload in it, but goes on with what makes room.
        self._was_aborted = sent.is_aborted(replies) or (self._was_aborted and bool(trouble))
        if trouble:
            self._back_off(trouble, now_s)
        else:
            self._backoff.succeeded()

    def lost(self, sent: Round, *, error: Exception, now_s: float) -> None:
        """The connection failed: nothing is known of what the round asked for."""
        if not self._ends(sent):
            return
        self._put_back(sent.calls)
        self._scripts_known = False
        reason = translate(error)
        if isinstance(reason, StoreUnavailableError):
            self._back_off(str(reason), now_s)
        else:
            self.fail_all(reason)

    def woken(self) -> None:
        """The run's wake stream has moved: let those ask again who were told to wait."""
        self.wake_id = None
        self._queues.ask_again()

    def fail_all(self, error: TurnstreamError) -> None:
        """Give up everything that is not acknowledged."""
        if self._round is not None:
            self._queues.put_back(self._round.calls)
            self._round = None
        self.woken()
        admissions = [*self._queues.admissions]
        receipts = [call.receipt for call in (*self._queues.closings, *self._queues.questions)]
        self._queues.clear()
        for lane in list(self._unended):
            if lane.pending or lane.end is not None or lane.epoch == 0:
                self._end(lane, error)
        for admission in admissions:
            admission.opened.settle(None, error)
        for receipt in receipts:
            receipt.settle(None, error)

    def _new_lane(self, key: TrajectoryKey) -> Lane:
        name = keys.trajectory_id(key)
        lane = Lane(key, name, keys.trajectory_keys(self.run, name))
        self._unended[lane] = None
        return lane

    def _ends(self, sent: Round) -> bool:
        """Whether this is the round on its way; it is not if everything was given up meanwhile."""
        if self._round is not sent:
            return False
        self._round = None
        return True

    def _put_back(self, calls: Sequence[Call]) -> None:
        """Calls that must be repeated."""
        self.tally.add("num_retries", len(calls))
        self._queues.put_back(calls)
        if any(isinstance(call, HeartbeatCall) for call in calls):
            self._heartbeats.failed()

    def _accept(self, call: Call, answer: Any, now_s: float) -> None:
        match call:
            case PayloadCall():
                self._stored(call, num_new=answer)
            case SealsCall(lanes):
                self._posted(lanes, answer)
            case AdmissionCall(admission):
                self._admitted(admission, answer, now_s)
            case AbandonCall(lane):
                self.tally.add("num_abandoned")
                self._end(lane)
            case CloseCall(_, receipt):
                receipt.settle(None)
            case ConfigCall(receipt):
                self._learn(answer, receipt)
            case HeartbeatCall(lanes):
                self._renewed(lanes, answer)

    def _refuse(self, call: Call, text: str, now_s: float) -> None:
        error = refusal(text)
        match call:
            case PayloadCall(lane) | AbandonCall(lane):
                self._fail(lane, error)
            case SealsCall(lanes):
                for lane in lanes:
                    self._fail(lane, error)
            case AdmissionCall(admission):
                newest_wake_id = wake_id(text)
                if newest_wake_id is not None:
                    self._stand_aside(admission, str(error), newest_wake_id, now_s)
                else:
                    self._reject(admission, error)
            case CloseCall(_, receipt) | ConfigCall(receipt):
                receipt.settle(None, error)
            case HeartbeatCall(lanes):
                _logger.warning("run %s: leases cannot be renewed: %s", self.run, error)
                if isinstance(error, RunNotFoundError):
                    for lane in [lane for lane in lanes if not lane.is_ending]:
                        self._fail(lane, error)

    def _learn(self, config: bytes, receipt: Delivery) -> None:
        try:
            self.extra_columns = decode_config(config).extra_columns
        except TurnstreamError as error:
            receipt.settle(None, error)
        else:
            receipt.settle(None)

    def _stored(self, call: PayloadCall, *, num_new: int) -> None:
        lane = call.lane
        lane.is_placed = True
        for _ in range(call.num_turns):
            turn, receipt = lane.pending.popleft()
            self.tally.acknowledged(lane, turn)
            if receipt is not None:
                receipt.settle(lane.key)
        lane.num_acknowledged += call.num_turns
        self.tally.add("num_duplicates", call.num_turns + call.seals - num_new)
        if call.seals:
            self._queues.seals.append(lane)
        else:
            self._advance(lane)

    def _advance(self, lane: Lane) -> None:
        """Queue a lane for what it waits with, now that something before is done."""
        if lane.pending or lane.seal is not None:
            self._queues.add_payload(lane)
        elif lane.abandon_reason is not None:
            self._queues.abandons.append(lane)

    def _posted(self, lanes: Sequence[Lane], answers: Sequence[bytes]) -> None:
        for lane, answer in zip(lanes, answers, strict=True):
            text = answer.decode()
            if text in ("OK", "DUPLICATE", "SURPLUS"):
                self.tally.add("num_trajectories")
                self.tally.add("merged_tokens", lane.merged_tokens)
                self._end(lane)
            else:
                self._fail(lane, refusal(text))

    def _renewed(self, lanes: Sequence[Lane], answers: Sequence[Any]) -> None:
        """Each lane's lease was renewed, or is lost.

        A lane that ends is not judged by this: what ends it may have been done before.
        """
        lease_ms, *states = answers
        self._heartbeats.answered(lease_s=lease_ms / 1000)
        for lane, state in zip(lanes, states, strict=True):
            if state != b"OK" and not lane.is_ending:
                self._fail(lane, refusal(state.decode()))

    def _admitted(self, admission: Admission, answers: Sequence[Any], now_s: float) -> None:
        if admission.since_s is not None:
            self.tally.add_wait(now_s - admission.since_s)
        first_error = None
        for lane, answer in zip(admission.lanes, answers, strict=True):
            if isinstance(answer, int):
                num_bytes = sum(len(turn.record) for turn, _ in lane.pending)
                self.tally.accepted(lane, -num_bytes)
                lane.epoch = answer
                self._heartbeats.opened(lane, now_s=now_s)
                self.tally.accepted(lane, num_bytes)
                self._advance(lane)
            else:
                error = refusal(answer.decode())
                first_error = first_error or error
                self._fail(lane, error)
        admission.opened.settle(None, first_error)

    def _stand_aside(
        self, admission: Admission, reason: str, newest_wake_id: str, now_s: float
    ) -> None:
        if admission.since_s is None:
            admission.since_s = now_s
            self.tally.add("num_waits")
        admission.reason = reason
        self._queues.waiting.append(admission)
        self.wake_id = self.wake_id or newest_wake_id  # an older id may only wake too early
        self._withdraw_given_up()

    def _reject(self, admission: Admission, error: TurnstreamError) -> None:
        for lane in admission.lanes:
            self._fail(lane, error)
        admission.opened.settle(None, error)

    def _expire(self, now_s: float) -> None:
        """Turn away the groups that have waited for leave long enough."""
        since_s = self._queues.waiting_since_s
        while since_s is not None and now_s - since_s >= self._admission_timeout_s:
            admission = self._queues.waiting.popleft()
            message = f"no leave to start within {self._admission_timeout_s:g} s"
            error = NotReadyError(
                f"group {admission.group.group_id}: {message}: {admission.reason}"
            )
            self._reject(admission, error)
            since_s = self._queues.waiting_since_s

    def _withdraw_given_up(self) -> None:
        """Ask no longer for groups of which every member was given up."""
        for admission in self._queues.take_given_up():
            for lane in admission.lanes:
                self._end(lane)
            admission.opened.settle(None)

    def _back_off(self, reason: str, now_s: float) -> None:
        if not self._backoff.is_failing:
            _logger.warning("run %s: the store takes no writes: %s", self.run, reason)
        if self._backoff.failed(now_s):
            message = f"the store took no writes for {self._timeout_s:g} s: {reason}"
            _logger.error("run %s: %s", self.run, message)
            self.fail_all(StoreUnavailableError(message))

    def _fail(self, lane: Lane, error: TurnstreamError) -> None:
        _logger.warning("run %s: trajectory %s failed: %s", self.run, lane.trajectory_id, error)
        self._end(lane, error)

    def _end(self, lane: Lane, error: TurnstreamError | None = None) -> None:
        lane.error = error
        self._unended.pop(lane, None)
        self._heartbeats.ended(lane)
        while lane.pending:
            turn, receipt = lane.pending.popleft()
            self.tally.accepted(lane, -len(turn.record))
            if receipt is not None:
                receipt.settle(lane.key, error)
        if lane.end is not None:
            lane.end.settle(lane.key, error)


def _raise_error(lane: Lane) -> None:
    if lane.error is not None:
        raise lane.error
