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
    rewards      for trajectories of whichever generator
    reservations of lanes that have outgrown what the store holds room for
    heartbeats   of all open lanes, where they are due; whatever fails of them is asked again

What was acknowledged is kept until it is proven to be on disk (`window.py`). A new connection is
first asked which start of the store it leads to. Where that is another one, what is kept goes back
into the queues before everything else (`rewinds.py`), and takes the same way again.

Where the store syncs to disk before it answers, a round is one write, so that a sync is paid for
once a round and not for every few calls.

Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from turnstream.errors import (
    ConflictError,
    NotReadyError,
    RunNotFoundError,
    StoreBehindError,
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
    NoteCall,
    PayloadCall,
    ReserveCall,
    RewardCall,
    Round,
    SealsCall,
    TakeOverCall,
)
from turnstream.generator.drafts import SealMaker, TurnRecord
from turnstream.generator.heartbeats import Heartbeats
from turnstream.generator.lanes import Admission, Lane, PendingTurn, RewardPost
from turnstream.generator.queues import Queues
from turnstream.generator.receipts import Delivery
from turnstream.generator.reservations import Reservations
from turnstream.generator.rewinds import (
    Reposts,
    has_survived,
    is_left_to_payload,
    leave_to_payload,
    rewind,
    why_refused,
)
from turnstream.generator.statistics import PublisherStatistics
from turnstream.generator.tally import Tally
from turnstream.generator.window import (
    KEEP_S,
    MAX_KEPT_BYTES,
    Ended,
    KeptTurn,
    TakenOver,
    Window,
)
from turnstream.records.configs import decode_config
from turnstream.records.events import encode_event
from turnstream.store import keys
from turnstream.store.replies import error_text, is_passing, refusal, translate, wake_id
from turnstream.types import DeclaredColumn, GroupOpened, TrajectoryKey

_logger = logging.getLogger(__name__)
_NO_ROOM = "no room can be reserved"


class Outbox:
    """Writes on their way to one run.

    Args:
        run: name of the run.
        writer: who holds the leases of its trajectories.
        max_inflight_bytes: see Tally.
        timeout_s: how long the store may be away or full before everything fails.
        admission_timeout_s: how long a group may wait for leave to start.
        jitter: gives numbers from 0 to 1.
        keep_s, max_kept_bytes: see Window.

    Attributes:
        losses: what an earlier start of the store had acknowledged, and this one has not; see
            `take_losses`.
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
        keep_s: float = KEEP_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
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
        self._window = Window(keep_s=keep_s, max_bytes=max_kept_bytes)
        self._reposts = Reposts(timeout_s)
        self._incarnation: bytes | None = None
        self._sent_s = 0.0
        self.losses: list[TurnstreamError] = []
        self._reservations = Reservations()
        self._unended: dict[Lane, None] = {}
        self._round: Round | None = None
        self._scripts_known = False
        self._syncs_each_write = False
        self._was_aborted = False
        self._num_conflicts = 0
        self._nonce = jitter()  # the same writer may have more than one outbox
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

    def adopt(
        self, key: TrajectoryKey, *, epoch: int, num_turns: int, num_bytes: int, now_s: float
    ) -> Lane:
        """Go on with a trajectory that was taken over with this epoch, behind its stored turns."""
        lane = self._new_lane(key)
        lane.epoch, lane.is_placed, lane.num_acknowledged = epoch, True, num_turns
        lane.num_bytes = num_bytes
        self._reservations.grew(lane)
        self._heartbeats.opened(lane, now_s=now_s)
        self._window.keep(TakenOver(lane), now_s=now_s)
        return lane

    def adopt_opened(
        self, group: GroupOpened, epochs: Mapping[TrajectoryKey, int], *, now_s: float
    ) -> list[Lane]:
        """Write the trajectories of a task, which the store has opened with these epochs."""
        lanes = [self._new_lane(key) for key in epochs]
        for lane in lanes:
            lane.epoch = epochs[lane.key]
            self._reservations.grew(lane)
            self._heartbeats.opened(lane, now_s=now_s)
        opening = Admission(group, encode_event(group), lanes, Delivery())
        self._window.keep(opening, now_s=now_s)
        return lanes

    def append(self, lane: Lane, turn: TurnRecord, receipt: Delivery | None = None) -> None:
        """Send a turn behind the others of its trajectory.

        Raises:
            TurnstreamError: the trajectory has failed before.
        """
        _raise_error(lane)
        lane.pending.append(PendingTurn(turn, receipt))
        self.tally.accepted(lane, len(turn.record))
        lane.num_bytes += len(turn.record)
        self._reservations.grew(lane)
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

    def post_reward(self, post: RewardPost) -> None:
        """Post a reward; its receipt is told when the store has answered."""
        self._queues.rewards.append(RewardCall(post))

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
    def is_on_disk(self) -> bool:
        """Whether, beyond that, the store has had the time to sync what it acknowledged."""
        return self.is_idle and self._window.is_settled and self._reposts.is_empty

    def take_losses(self) -> list[TurnstreamError]:
        """What was acknowledged and is lost for good, each once: of lanes that had ended."""
        losses, self.losses = self.losses, []
        return losses

    def statistics(self) -> PublisherStatistics:
        """What happened so far, and what is held."""
        window = self._window
        return self.tally.statistics(
            num_forgotten=window.num_forgotten,
            kept_bytes=window.num_bytes,
            max_kept_bytes=window.max_bytes,
        )

    @property
    def num_open(self) -> int:
        """Trajectories that hold a lease, which ends some time after nobody renews it."""
        return self._heartbeats.num_open

    def next_round(self, now_s: float) -> Round | None:
        """What to send now; None while there is nothing, or while the store is left alone."""
        self._expire(now_s)
        if self._round is not None or self._backoff.pause_s(now_s) > 0:
            return None
        self._sent_s = now_s
        if not self._scripts_known and not self._window.is_settled:
            return self._look()  # whatever else is sent must find what was acknowledged before
        heartbeats = self._heartbeats.due(now_s)
        self._queues.rewards.extend(self._reposts.due(now_s))
        calls = [*self._queues.take(), *self._reservations.due(), *heartbeats]
        if not calls:
            return self._look() if self._window.pause_s(now_s) == 0 else None
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

    def _look(self) -> Round:
        """A round without calls, to see which store answers."""
        self._round = Round((), (), loads_scripts=True)
        return self._round

    def pause_s(self, now_s: float) -> float | None:
        """Seconds after which `next_round` may give something that it does not give now."""
        pause_s = self._backoff.pause_s(now_s)
        if pause_s > 0:
            return pause_s
        parts = (self._heartbeats, self._window, self._reposts)
        pauses_s = [each_s for part in parts if (each_s := part.pause_s(now_s)) is not None]
        since_s = self._queues.waiting_since_s
        if since_s is not None:
            pauses_s.append(max(0.0, since_s + self._admission_timeout_s - now_s))
        return min(pauses_s, default=None)

    def answered(self, sent: Round, *, replies: Sequence[Any], now_s: float) -> None:
        """The store answered the round; `replies` holds values and ResponseErrors."""
        if not self._ends(sent):
            return
        back: list[Call] = []
        trouble = "" if sent.calls else sent.trouble(replies)
        is_new, self._scripts_known = not self._scripts_known, not is_passing(trouble)
        if sent.loads_scripts and self._scripts_known:
            self._meet(sent, replies, is_new=is_new)
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
        if self._scripts_known:
            self._window.prove(self._sent_s)
        if trouble:
            self._back_off(trouble, now_s)
        else:
            self._backoff.succeeded()

    def lost(self, sent: Round, *, error: Exception, now_s: float) -> None:
        """The connection failed: nothing is known of what the round asked for."""
        if not self._ends(sent):
            return
        self._put_back(sent.calls)
        self.tally.add("num_retries", not sent.calls)
        self._scripts_known = False
        reason = translate(error)
        if isinstance(reason, StoreUnavailableError):
            self._back_off(str(reason), now_s)
        else:
            self.fail_all(reason)

    def _meet(self, sent: Round, replies: Sequence[Any], *, is_new: bool) -> None:
        """See which store this is; one that started anew may have forgotten what is kept.

        One that does not say who it is, is taken for another after every new connection.
        """
        self._syncs_each_write = sent.syncs_each_write(replies)
        self._window.is_needed = sent.may_lose_writes(replies)
        known, self._incarnation = self._incarnation, sent.incarnation(replies)
        is_same = known == self._incarnation and (known is not None or not is_new)
        if is_same or self._window.is_settled:
            return
        rewound = rewind(self._window.take(), queues=self._queues, tally=self.tally)
        self.tally.add("num_restarts")
        _logger.warning(
            "run %s: the store was started anew and may have lost writes: those of %d trajectories "
            "are sent again",
            self.run,
            len(rewound.closed) + len(rewound.open),
        )
        for lane in (*rewound.closed, *rewound.open):
            self._unended[lane] = None
        for lane in rewound.closed:
            self._heartbeats.ended(lane)
        for lane in rewound.open:
            self._reservations.grew(lane)
            self._advance(lane)
        self._heartbeats.failed()

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
        receipts += [call.post.receipt for call in self._queues.rewards]
        self._queues.clear()
        for lane in list(self._unended):
            if lane.pending or lane.end is not None or lane.epoch == 0 or lane.has_ended:
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
        self._reservations.failed(calls)
        if any(isinstance(call, HeartbeatCall) for call in calls):
            self._heartbeats.failed()

    def _accept(self, call: Call, answer: Any, now_s: float) -> None:
        match call:
            case PayloadCall():
                self._stored(call, num_new=answer, now_s=now_s)
            case SealsCall(lanes):
                self._posted(lanes, answer, now_s)
            case AdmissionCall(admission):
                self._admitted(admission, answer, now_s)
            case AbandonCall(lane):
                self.tally.add("num_abandoned", not lane.has_ended)
                self._end_well(lane, now_s)
            case TakeOverCall(lane):
                self._window.keep(TakenOver(lane), now_s=now_s)
                self._opened(lane, answer[0], now_s)
            case ReserveCall(lanes):
                self._reservations.answered(lanes, answer)
            case HeartbeatCall(lanes):
                self._renewed(lanes, answer)
            case _:
                self._accept_of_run(call, answer, now_s)

    def _accept_of_run(self, call: Call, answer: Any, now_s: float) -> None:
        """The same of what belongs to no trajectory of this writer."""
        match call:
            case CloseCall(reason, receipt):
                receipt.settle(None)
                self._window.keep(CloseCall(reason, Delivery()), now_s=now_s)
            case RewardCall(post):
                self._rewarded(post, answer.decode(), now_s)
            case ConfigCall(receipt):
                self._learn(answer, receipt)
            case _:
                pass  # nobody waits to hear that a note was taken

    def _refuse(self, call: Call, text: str, now_s: float) -> None:
        error = refusal(text)
        match call:
            case PayloadCall(lane) | AbandonCall(lane):
                self._refuse_lane(lane, text, now_s)
            case TakeOverCall(lane):
                self._refuse_lane(lane, text, now_s)
                self._window.keep(TakenOver(lane), now_s=now_s)
            case RewardCall(post):
                self._refuse_reward(post, error, now_s)
            case SealsCall(lanes):
                for lane in lanes:
                    self._fail(lane, error)
            case AdmissionCall(admission):
                self._refuse_admission(admission, text, now_s)
            case HeartbeatCall(lanes):
                self._refuse_heartbeat(lanes, error)
            case CloseCall(_, receipt) | ConfigCall(receipt):
                receipt.settle(None, error)
            case _:
                what = "a conflict is not counted" if isinstance(call, NoteCall) else _NO_ROOM
                _logger.warning("run %s: %s: %s", self.run, what, error)

    def _refuse_heartbeat(self, lanes: Sequence[Lane], error: TurnstreamError) -> None:
        _logger.warning("run %s: leases cannot be renewed: %s", self.run, error)
        if isinstance(error, RunNotFoundError):
            for lane in [lane for lane in lanes if not lane.is_ending]:
                self._fail(lane, error)

    def _refuse_admission(self, admission: Admission, text: str, now_s: float) -> None:
        newest_wake_id = wake_id(text)
        if newest_wake_id is not None:
            self._stand_aside(admission, str(refusal(text)), newest_wake_id, now_s)
            return
        for lane in admission.lanes:
            self._refuse_lane(lane, text, now_s)
        if any(lane.error is None for lane in admission.lanes):
            self._window.keep(admission, now_s=now_s)
        admission.opened.settle(None, refusal(text))

    def _refuse_lane(self, lane: Lane, text: str, now_s: float) -> None:
        if is_left_to_payload(lane, text):
            leave_to_payload(lane, text)
            self._advance(lane)
        elif has_survived(lane, text):
            self._survived(lane, now_s)
        else:
            error = why_refused(lane, text)
            self._note(lane, error)
            self._fail(lane, error)

    def _note(self, lane: Lane, error: TurnstreamError) -> None:
        """Let the run count what was refused because its key has another content."""
        if isinstance(error, ConflictError):
            self._num_conflicts += 1
            token = f"{self._nonce}:{self._num_conflicts}"
            self._queues.notes.append(NoteCall(lane.trajectory_id, str(error), token))

    def _learn(self, config: bytes, receipt: Delivery) -> None:
        try:
            self.extra_columns = decode_config(config).extra_columns
        except TurnstreamError as error:
            receipt.settle(None, error)
        else:
            receipt.settle(None)

    def _stored(self, call: PayloadCall, *, num_new: int, now_s: float) -> None:
        lane = call.lane
        lane.is_placed = True
        for _ in range(call.num_turns):
            turn, receipt, is_again = lane.pending.popleft()
            self._window.keep(KeptTurn(lane, turn), now_s=now_s)
            if is_again:
                self.tally.add("num_resent")
            else:
                self.tally.acknowledged(lane, turn)
            if receipt is not None:
                receipt.settle(lane.key)
        lane.num_acknowledged += call.num_turns
        self.tally.add("num_duplicates", call.num_turns + call.seals - num_new)
        if call.seals:
            self._window.keep(Ended(lane), now_s=now_s)
            self._queues.seals.append(lane)
        else:
            self._advance(lane)

    def _advance(self, lane: Lane) -> None:
        """Queue a lane for what it waits with, now that something before is done."""
        if lane.pending or lane.seal is not None:
            self._queues.add_payload(lane)
        elif lane.abandon_reason is not None:
            self._queues.abandons.append(lane)

    def _posted(self, lanes: Sequence[Lane], answers: Sequence[bytes], now_s: float) -> None:
        for lane, answer in zip(lanes, answers, strict=True):
            text = answer.decode()
            if text in ("OK", "DUPLICATE", "SURPLUS"):
                if not lane.has_ended:
                    self.tally.add("num_trajectories")
                    self.tally.add("merged_tokens", lane.merged_tokens)
                self._end_well(lane, now_s)
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
                self._opened(lane, answer, now_s)
                continue
            text = answer.decode()
            if has_survived(lane, text):
                self._survived(lane, now_s)
            elif lane.held_epoch and lane.seal is not None and " is already " in text:
                lane.epoch = lane.held_epoch  # its seal had been posted, and the answer was lost
                lane.seal_record = lane.seal(lane.epoch)
                self._queues.seals.append(lane)
            else:
                error = refusal(text)
                first_error = first_error or error
                self._fail(lane, error)
        self._window.keep(admission, now_s=now_s)
        admission.opened.settle(None, first_error)

    def _opened(self, lane: Lane, epoch: int, now_s: float) -> None:
        num_bytes = lane.num_pending_bytes
        self.tally.accepted(lane, -num_bytes)
        lane.epoch = epoch
        self._heartbeats.opened(lane, now_s=now_s)
        self._reservations.grew(lane)
        self.tally.accepted(lane, num_bytes)
        self._advance(lane)

    def _rewarded(self, post: RewardPost, outcome: str, now_s: float) -> None:
        is_again, post.outcome = bool(post.outcome), outcome
        self._window.keep(RewardCall(post), now_s=now_s)
        if not is_again:
            post.receipt.settle(None)

    def _refuse_reward(self, post: RewardPost, error: TurnstreamError, now_s: float) -> None:
        if not post.outcome:
            post.receipt.settle(None, error)
        elif not self._reposts.add(RewardCall(post), now_s=now_s):
            self._lose("a reward", error)

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
        while since_s is not None and since_s + self._admission_timeout_s <= now_s:
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

    def _end_well(self, lane: Lane, now_s: float) -> None:
        """The run knows how a lane ended; of the draft nothing is needed but the seal."""
        if lane.seal is not None:
            record = lane.seal_record
            lane.seal = lambda _epoch: record
        self._window.keep(Ended(lane), now_s=now_s)
        self._end(lane)
        lane.has_ended = True

    def _survived(self, lane: Lane, now_s: float) -> None:
        """The store has all of a lane that had ended; the next start of it may not."""
        for pending in lane.pending:
            self._window.keep(KeptTurn(lane, pending.turn), now_s=now_s)
        lane.num_acknowledged += len(lane.pending)
        lane.epoch = lane.epoch or lane.held_epoch
        self._end_well(lane, now_s)

    def _end(self, lane: Lane, error: TurnstreamError | None = None) -> None:
        lane.error = error
        self._unended.pop(lane, None)
        self._heartbeats.ended(lane)
        self._reservations.ended(lane)
        while lane.pending:
            turn, receipt, is_again = lane.pending.popleft()
            if not is_again:
                self.tally.accepted(lane, -len(turn.record))
            if receipt is not None:
                receipt.settle(lane.key, error)
        if lane.end is not None:
            lane.end.settle(lane.key, error)
            lane.end = None
        if error is not None and lane.has_ended and lane.abandon_reason is None:
            self._lose(lane.trajectory_id, error)

    def _lose(self, what: str, reason: TurnstreamError) -> None:
        error = reason
        if not isinstance(reason, StoreBehindError):
            error = StoreBehindError(f"{what} was acknowledged, and the store lost it: {reason}")
        _logger.error("run %s: %s", self.run, error)
        self.tally.add("num_lost")
        self.losses.append(error)


def _raise_error(lane: Lane) -> None:
    if lane.error is not None:
        raise lane.error
