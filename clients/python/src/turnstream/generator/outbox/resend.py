"""Acknowledged writes that the store may still lose, and how they are sent again. No I/O, no clock.

A store that does not sync before it answers loses its last writes in a power cut. After a restart
everything that is kept is sent again; the store answers surviving writes as duplicates.

A write is *proven* when the same server instance still answers `keep_s` seconds after it: by then
the write is synced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from turnstream.errors import StoreBehindError, TurnstreamError
from turnstream.generator.encode.encoder import TurnRecord
from turnstream.generator.outbox.receipts import InflightCounts, PendingWrite
from turnstream.generator.outbox.writes import Admission, Call, SendQueues, TrajectoryQueue
from turnstream.store.client.replies import Refusal
from turnstream.types import TrajectoryKey

KEEP_S: Final = 5.0
"""The store syncs every second, and postpones a write for up to two more while its disk is slow."""

MAX_KEPT_BYTES: Final = 64 * 1024 * 1024


class KeptWrite(NamedTuple):
    """An acknowledged write of a trajectory: a turn, its adoption, or else its end."""

    queue: TrajectoryQueue
    turn: TurnRecord | None = None
    is_adoption: bool = False


Acknowledged = Admission | KeptWrite | Call


class _Kept(NamedTuple):
    acknowledged_s: float
    num_bytes: int
    what: Acknowledged


class ResendBuffer:
    """The newest acknowledged writes of one publisher, in the order of their answers.

    Args:
        keep_s: time in which the store syncs acknowledged writes; 0 keeps nothing.
        max_bytes: limit of the kept turns; the oldest are dropped first.
    """

    def __init__(self, *, keep_s: float, max_bytes: int) -> None:
        self.is_needed = True
        self.keep_s = keep_s
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_forgotten = 0
        self._kept: deque[_Kept] = deque()
        self._opened: dict[TrajectoryKey, TrajectoryQueue] = {}  # members of the kept admissions
        self._newest_s: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether all that was acknowledged is proven."""
        return self._newest_s is None

    def keep(self, what: Acknowledged, *, now_s: float) -> None:
        """Keep something that the store has acknowledged."""
        if not self.is_needed or self.keep_s <= 0:
            return
        num_bytes = 0
        if isinstance(what, KeptWrite):
            num_bytes = 0 if what.turn is None else len(what.turn.record)
        elif isinstance(what, Admission):
            self._opened.update((queue.key, queue) for queue in what.queues)
        self._kept.append(_Kept(now_s, num_bytes, what))
        self._newest_s = now_s
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_forgotten += self._drop().num_bytes > 0

    def prove(self, alive_s: float) -> None:
        """The server instance that acknowledged all this was alive at this time, or later."""
        while self._kept and self._kept[0].acknowledged_s + self.keep_s <= alive_s:
            self._drop()
        if self._newest_s is not None and self._newest_s + self.keep_s <= alive_s:
            self._newest_s = None

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until an answer of the store proves everything; None if everything is proven."""
        return None if self._newest_s is None else max(0.0, self._newest_s + self.keep_s - now_s)

    def has_opened(self, key: TrajectoryKey) -> bool:
        """Whether the admission of a trajectory is kept that has not failed."""
        queue = self._opened.get(key)
        return queue is not None and queue.error is None

    def take(self) -> list[Acknowledged]:
        """Remove and return all that is kept."""
        taken = [each.what for each in self._kept]
        self._kept.clear()
        self._opened.clear()
        self.num_bytes, self._newest_s = 0, None
        return taken

    def _drop(self) -> _Kept:
        dropped = self._kept.popleft()
        self.num_bytes -= dropped.num_bytes
        if isinstance(dropped.what, Admission):
            for queue in dropped.what.queues:
                if self._opened.get(queue.key) is queue:
                    del self._opened[queue.key]
        return dropped


class Resent(NamedTuple):
    """Trajectories that are sent again.

    Those of `closed` must be opened, or adopted, before their turns may follow.
    """

    closed: list[TrajectoryQueue]
    open: list[TrajectoryQueue]
    adopted: list[TrajectoryQueue]


def resend(
    kept: Iterable[Acknowledged], *, send_queues: SendQueues, inflight: InflightCounts
) -> Resent:
    """Return everything that was kept to the queues, before everything that waits there.

    Admissions are requested again, then follow the turns, then the seals. The caller queues the
    turns of the open trajectories.
    """
    turns: dict[TrajectoryQueue, list[TurnRecord]] = {}
    admissions: list[Admission] = []
    adopted: list[TrajectoryQueue] = []
    for each in kept:
        match each:
            case Admission():
                admissions.append(each)
            case KeptWrite(queue, is_adoption=True):
                adopted.append(queue)
            case KeptWrite(queue, turn):
                turns.setdefault(queue, []).extend([] if turn is None else [turn])
            case Call():
                send_queues.of_run.append(each)
    members = [queue for admission in admissions for queue in admission.queues if queue.epoch]
    closed = _unfailed([*members, *adopted])
    opened = [queue for queue in _unfailed(turns) if queue not in closed]
    send_queues.withdraw({**closed, **dict.fromkeys(opened)})
    for queue in (*closed, *opened):
        queue.resend(turns.get(queue, []))
    for queue in closed:
        queue.earlier_epoch, queue.epoch, queue.is_placed = queue.epoch, 0, False
        inflight.moved(queue.num_pending_bytes, is_open=False)
    for admission in reversed(admissions):
        again = Admission(
            admission.group,
            [queue for queue in admission.queues if queue in closed],
            PendingWrite(),
            prompt_number=admission.prompt_number,
            is_again=True,
        )
        send_queues.admissions.appendleft(again)
    return Resent(list(closed), opened, [queue for queue in adopted if queue in closed])


def _unfailed(queues: Iterable[TrajectoryQueue]) -> dict[TrajectoryQueue, None]:
    return {queue: None for queue in queues if queue.error is None}


def why_refused(queue: TrajectoryQueue, refused: Refusal) -> TurnstreamError:
    """Return the error of a refused trajectory; a gap means that the store has lost turns."""
    if refused.code != "GAP":
        return refused.error
    first, last = int(refused.fact), queue.num_acknowledged - 1
    lost = f"turn {first}" if first == last else f"turns {first} to {last}"
    return StoreBehindError(
        f"{queue.key.readable_name}: the store came back without {lost}, which it had acknowledged "
        "and which are no longer kept here"
    )


def has_survived(queue: TrajectoryQueue, refused: Refusal) -> bool:
    """Whether a refusal proves that the store has all of a trajectory that had ended.

    A trajectory that was sealed here and is abandoned there proves the opposite. It was open when
    the store came back, and its lease ended before it was sealed again.
    """
    if not queue.has_ended:
        return False
    if refused.code != "CONFLICT":
        return is_payload_released(refused)
    if refused.fact == "abandoned":
        return queue.abandon_reason is not None
    return _is_finished(refused) or _is_without(refused)


def is_decided_by_payload(queue: TrajectoryQueue, refused: Refusal) -> bool:
    """Whether only the payload can say if the store has lost a trajectory that was sealed.

    The ledger does not have the trajectory, and its group went on. The payload is gone too. Its
    tombstone stands for longer than anything is kept here, and records whether the trajectory was
    abandoned. If there is no tombstone, the store has lost the trajectory.
    """
    is_first_reply = queue.epoch == 0 and queue.earlier_epoch > 0
    is_sealed = queue.has_ended and queue.seal is not None
    return is_first_reply and is_sealed and (_is_without(refused) or is_unknown(refused))


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
    """Whether the group of a trajectory takes no member any more, and the ledger lacks it."""
    return refused.code == "CONFLICT" and refused.fact in ("group", "name")
