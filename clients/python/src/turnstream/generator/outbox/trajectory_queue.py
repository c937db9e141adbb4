"""The writes in flight, by trajectory and by group. Data of the outbox; no decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from turnstream.errors import TurnstreamError
from turnstream.generator.encode.encoder import SealMaker, TurnRecord
from turnstream.generator.outbox.receipts import Delivery
from turnstream.store.client.replies import Refusal
from turnstream.store.client.scripts import Command
from turnstream.store.run.budget import FIRST_BYTES
from turnstream.types import GroupOpened, TrajectoryKey


class PendingTurn(NamedTuple):
    """A turn to be acknowledged; `is_again` if it was, before a restart of the store."""

    turn: TurnRecord
    receipt: Delivery | None
    is_again: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """One trajectory's writes, in order.

    States, which `error` ends early:

    1. not admitted: `epoch` is 0; turns wait here;
    2. admitted: `epoch` is set; turns are sent as they come;
    3. ending: `seal` or `abandon_reason` is set, and follows the last turn;
    4. sealed: all payload is acknowledged, and `seal_record` is posted;
    5. ended: `end` is settled.

    Attributes:
        awaits_reward: its reward is posted after the seal.
        is_placed: the store has created its payload stream.
        num_acknowledged: turns acknowledged: the index of `pending[0]`.
        is_queued: it is in the queue of lanes with payload to send.
        num_bytes: bytes of all its turn records so far.
        reserved_bytes: bytes that the store has reserved for them.
        end: receipt of the end.
        has_ended: it has ended once; a restart of the store may repeat all states.
        earlier_epoch: its epoch before the restart.
        is_doubted: the run does not know its posted seal, perhaps after a lost answer, so the
            payload decides.
    """

    key: TrajectoryKey
    trajectory_id: str
    end: Delivery | None = None
    epoch: int = 0
    is_placed: bool = False
    pending: deque[PendingTurn] = field(default_factory=deque)
    num_acknowledged: int = 0
    seal: SealMaker | None = None
    seal_record: bytes = b""
    awaits_reward: bool = False
    merged_tokens: int = 0
    abandon_reason: str | None = None
    is_queued: bool = False
    num_bytes: int = 0
    reserved_bytes: int = FIRST_BYTES
    error: TurnstreamError | None = None
    has_ended: bool = False
    earlier_epoch: int = 0
    is_doubted: bool = False

    @property
    def is_ending(self) -> bool:
        """Whether it takes no further turn."""
        return self.seal is not None or self.abandon_reason is not None or self.error is not None

    def raise_error(self) -> None:
        """Raise the error of a trajectory that has failed."""
        if self.error is not None:
            raise self.error

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of the turns that were never acknowledged."""
        return sum([len(turn.record) for turn, _, is_again in self.pending if not is_again])

    def rewind(self, turns: Sequence[TurnRecord]) -> None:
        """Queue these, its last acknowledged turns, before those that wait."""
        self.reserved_bytes = FIRST_BYTES
        self.pending.extendleft([PendingTurn(turn, None, True) for turn in reversed(turns)])
        self.num_acknowledged -= len(turns)


@dataclass(slots=True, eq=False)
class Admission:
    """A group that requests admission, or further samples of an open group.

    Attributes:
        record: the encoded `group`.
        opened: receipt of the answer.
        since_s: time of the first refusal for lack of capacity; None before.
        reason: message of the last refusal.
        has_timed_out: its wait has failed.
        prompt_number: number of the prompt of a task; 0 for another group.
        is_again: it was open before a restart of the store.
    """

    group: GroupOpened
    record: bytes
    lanes: Sequence[Lane]
    opened: Delivery
    since_s: float | None = None
    reason: str = ""
    has_timed_out: bool = False
    prompt_number: int = 0
    is_again: bool = False


@dataclass(slots=True, eq=False)
class RunCall:
    """A call for which no other call waits.

    Attributes:
        command: returns the call, once the id of the run is known.
        accept: handles an answer, and the time.
        refuse: handles a refusal, and the time.
        receipt: receipt of the first answer.
        what: the call in words, for errors.
    """

    command: Callable[[], Command]
    accept: Callable[[Any, float], None]
    refuse: Callable[[Refusal, float], None]
    receipt: Delivery | None = None
    what: str = ""


@dataclass(slots=True, eq=False)
class RewardPost:
    """A reward that is posted for a trajectory of any generator.

    Attributes:
        receipt: receipt of the first answer.
        outcome: the last answer.
        until_s: until when it is posted again, if a restarted store lacks the trajectory.
    """

    command: Command
    receipt: Delivery
    outcome: str = ""
    until_s: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the trajectory."""
        return str(self.command.args[0])
