"""Back to what the store may have lost: lanes as they were when it had not yet acknowledged it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from turnstream.errors import StoreBehindError, TurnstreamError
from turnstream.generator.encode.encoder import TurnRecord
from turnstream.generator.outbox.calls import RewardCall, TakeOverCall
from turnstream.generator.outbox.inflight import InflightCounts
from turnstream.generator.outbox.queues import Queues
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.resend_buffer import Acknowledged, Ended, KeptTurn, TakenOver
from turnstream.generator.outbox.trajectory_queue import Admission, Lane
from turnstream.store.client.replies import Refusal

REPOST_EVERY_S: Final = 0.5


class Rewound(NamedTuple):
    """Trajectories that are sent again.

    Attributes:
        closed: those that must be opened, or taken over, before their turns may follow.
        open: those that the store knows from before.
    """

    closed: list[Lane]
    open: list[Lane]


def rewind(kept: Iterable[Acknowledged], *, queues: Queues, inflight: InflightCounts) -> Rewound:
    """Return everything that was kept to the queues, before everything that waits there.

    Openings are requested again, then follow the turns, then the seals. The caller queues the turns
    of the open lanes.
    """
    turns: dict[Lane, list[TurnRecord]] = {}
    openings: list[Admission] = []
    taken: list[Lane] = []
    for each in kept:
        match each:
            case Admission():
                openings.append(each)
            case TakenOver(lane):
                taken.append(lane)
            case KeptTurn(lane, turn):
                turns.setdefault(lane, []).append(turn)
            case Ended(lane):
                turns.setdefault(lane, [])
            case RewardCall():
                queues.rewards.append(each)
            case _:
                queues.closings.append(each)
    members = [lane for opening in openings for lane in opening.lanes if lane.epoch]
    closed = _living([*members, *taken])
    opened = [lane for lane in _living(turns) if lane not in closed]
    queues.withdraw({**closed, **dict.fromkeys(opened)})
    for lane in (*closed, *opened):
        lane.rewind(turns.get(lane, []))
    for lane in closed:
        num_bytes = lane.num_pending_bytes
        inflight.accepted(lane, -num_bytes)
        lane.held_epoch, lane.epoch, lane.is_placed = lane.epoch, 0, False
        inflight.accepted(lane, num_bytes)
    for opening in reversed(openings):
        lanes = [lane for lane in opening.lanes if lane in closed]
        again = Admission(
            opening.group,
            opening.record,
            lanes,
            Delivery(),
            prompt_number=opening.prompt_number,
            is_again=True,
        )
        queues.admissions.appendleft(again)
    queues.takeovers.extend(TakeOverCall(lane) for lane in taken if lane in closed)
    return Rewound(list(closed), opened)


def _living(lanes: Iterable[Lane]) -> dict[Lane, None]:
    return {lane: None for lane in lanes if lane.error is None}


def why_refused(lane: Lane, refused: Refusal) -> TurnstreamError:
    """Return the error of a refused lane; a gap means that the store has lost turns."""
    if refused.code != "GAP":
        return refused.error
    first, last = int(refused.fact), lane.num_acknowledged - 1
    lost = f"turn {first}" if first == last else f"turns {first} to {last}"
    return StoreBehindError(
        f"{lane.key.readable_name}: the store came back without {lost}, which it had acknowledged, "
        "and which are no longer kept here"
    )


def has_survived(lane: Lane, refused: Refusal) -> bool:
    """Whether a refusal proves that the store has all of a lane that had ended.

    A lane that was sealed here and is abandoned there proves the opposite. It was open when the
    store came back, and its lease ended before it was sealed again.
    """
    if not lane.has_ended:
        return False
    if refused.code != "CONFLICT":
        return is_payload_released(refused)
    if refused.fact == "abandoned":
        return lane.abandon_reason is not None
    return _is_finished(refused) or _is_without(refused)


def is_left_to_payload(lane: Lane, refused: Refusal) -> bool:
    """Whether only the payload can say if the store has lost a lane that was sealed.

    The ledger does not have the trajectory, and its group went on. The payload is gone too. Its
    tombstone stands for longer than anything is kept here, and records whether the trajectory was
    abandoned. If there is no tombstone, the store has lost the trajectory.
    """
    is_asked_first = lane.epoch == 0 and lane.held_epoch > 0
    is_sealed = lane.has_ended and lane.seal is not None
    return is_asked_first and is_sealed and (_is_without(refused) or is_unknown(refused))


def is_unknown(refused: Refusal) -> bool:
    """Whether the ledger does not have the trajectory: not yet, or no longer."""
    return refused.fact == "unknown"


def is_payload_released(refused: Refusal) -> bool:
    """Whether the payload of a finished trajectory is released."""
    return refused.code == "FENCED" and refused.fact == "released"


def is_ended(refused: Refusal) -> bool:
    """Whether the trajectory, or its group, was decided before this call."""
    return refused.code == "CONFLICT" and (_is_finished(refused) or refused.fact == "group")


def _is_finished(refused: Refusal) -> bool:
    """Whether a conflict names the state of a trajectory that is no longer open."""
    return refused.fact not in ("", "unknown", "group", "name")


def _is_without(refused: Refusal) -> bool:
    """Whether the group of a lane takes no member any more, and the ledger does not have it."""
    return refused.code == "CONFLICT" and refused.fact in ("group", "name")


def leave_to_payload(lane: Lane) -> None:
    """Continue with its earlier epoch: the payload, or its tombstone, answers."""
    lane.epoch, lane.is_placed = lane.held_epoch, True


class Reposts:
    """Rewards that are posted again before the trajectory is there again: they ask until it is.

    Args:
        timeout_s: how long.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: list[RewardCall] = []
        self._due_s = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether none waits."""
        return not self._waiting

    def add(self, call: RewardCall, *, now_s: float) -> bool:
        """Ask again later; False where it has asked for long enough."""
        post = call.post
        if post.until_s is None:
            post.until_s = now_s + self._timeout_s
        if now_s >= post.until_s:
            return False
        self._waiting.append(call)
        self._due_s = now_s + REPOST_EVERY_S
        return True

    def due(self, now_s: float) -> list[RewardCall]:
        """Those that ask now."""
        if now_s < self._due_s:
            return []
        due, self._waiting = self._waiting, []
        return due

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until one asks."""
        return max(0.0, self._due_s - now_s) if self._waiting else None
