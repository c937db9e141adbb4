"""Writes on their way, the calls that they become, and rounds of calls. No I/O, no decisions."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from redis.exceptions import ResponseError

from turnstream.errors import TurnstreamError
from turnstream.generator.encode.encoder import SealMaker, TurnRecord
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.requests import AppendTurns, PostedSeal, ScriptRequest
from turnstream.store.client.replies import Refusal, error_text, parse_refusal
from turnstream.store.client.run_ids import no_such_run
from turnstream.store.client.scripts import Argument, Command
from turnstream.store.run.groups import FIRST_BYTES
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream.types.names import is_run_id

MAX_ROUND_BYTES: Final = 1 << 20
"""Enough to hide the round trip, and small in the server's buffers."""

MAX_ROUND_TURNS: Final = 1_000
"""Turns of one call, which blocks the store."""

MAX_DIRECT_BYTES: Final = 32 * 1024 * 1024
"""Bytes of a trajectory up to which the store need not count them: two thirds of its limit."""

_T = TypeVar("_T")

_MAX_SEALS: Final = 256  # a script can unpack some thousand values, not more
_MAX_SEAL_BYTES: Final = 1 << 20  # a call blocks the store; one seal alone may be longer


class Call(NamedTuple):
    """A call, and the handlers of its reply, which get the answer or the refusal, and the time.

    Attributes:
        put_back: queues the call again, before all others.
        is_write: a receipt waits for it.
        receipt: receipt of the first answer, of a call for which no other call waits.
        what: such a call in words, for errors.
    """

    request: ScriptRequest
    accept: Callable[[Any, float], None]
    refuse: Callable[[Refusal, float], None]
    put_back: Callable[[], None] = lambda: None
    is_write: bool = True
    receipt: PendingWrite | None = None
    what: str = ""


class Round(NamedTuple):
    """Calls that travel together; none only to see which store answers.

    Attributes:
        is_first: the first round of a connection, which asks which process of the store answers.
        is_grouped: all calls are one transaction, which a store that syncs before it answers syncs
            once.
        sought: name of the run whose id is asked for, in a round without calls; "" for none.
    """

    calls: Sequence[Call]
    is_first: bool
    is_grouped: bool = False
    sought: str = ""

    @property
    def commands(self) -> list[Command]:
        """Return the call of the script of each call."""
        return [call.request.command for call in self.calls]

    @property
    def words(self) -> list[Sequence[Argument]]:
        """Return the words of each call to Redis; a gateway gets requests in place of words."""
        return [
            request.direct_words
            if isinstance(request, AppendTurns) and request.is_direct
            else request.command.words
            for request, *_ in self.calls
        ]

    @property
    def is_heartbeat(self) -> bool:
        """Whether it has no write that a receipt waits for."""
        return not any(call.is_write for call in self.calls)


class StoreProcess(NamedTuple):
    """The process of the store that a connection leads to.

    Attributes:
        syncs_each_write: it answers after it has synced; None if the store does not say it.
    """

    name: str
    syncs_each_write: bool | None


class Answers(NamedTuple):
    """The answers to a round.

    Attributes:
        values: for each call its reply, or a ResponseError.
        store: the process that has answered, if the round was the first one.
        run: id of the run that was asked for, or why it was not read; else None.
        trouble: why the store did not even take the scripts; "" where it did.
        is_aborted: the calls were one transaction, and none was carried out because of one.
    """

    values: Sequence[Any]
    store: StoreProcess | None = None
    run: str | TurnstreamError | None = None
    trouble: str = ""
    is_aborted: bool = False


class TargetRun:
    """One run, for the whole life of a publisher: a later run of the name never takes its place.

    `run` is its id; its name until that is found.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.is_found = is_run_id(run)

    def found(self, run: str) -> None:
        """Keep to this run from now on. Only the first call has an effect."""
        if not self.is_found:
            self.run, self.is_found = run, True

    def refusal(self, answer: ResponseError) -> Refusal:
        """Return why a call was refused; if the run is not in the store, the message names it."""
        refused = parse_refusal(error_text(answer))
        if refused.code != "NORUN":
            return refused
        return refused._replace(message=str(no_such_run(self.run)))


class PendingTurn(NamedTuple):
    """A turn to be acknowledged; `is_again` if it was, before a restart of the store."""

    turn: TurnRecord
    receipt: PendingWrite | None
    is_again: bool = False


@dataclass(slots=True, eq=False)
class TrajectoryQueue:
    """One trajectory's writes, in order.

    States, which `error` ends early:

    1. not admitted: `epoch` is 0; turns wait here;
    2. admitted: `epoch` is set; turns are sent as they come;
    3. ending: `seal` or `abandon_reason` is set, and follows the last turn;
    4. sealed: all payload is acknowledged, and `seal_record` is posted;
    5. ended: `end` is settled.

    Attributes:
        num_acknowledged: turns acknowledged: the index of `pending[0]`.
        acknowledged_bytes: bytes of these turns.
        num_bytes: bytes of all its turns.
        has_ended: it has ended once; a restart of the store may repeat all states.
        earlier_epoch: its epoch before the restart.
        is_doubted: the run does not know its posted seal, perhaps after a lost answer, so the
            payload decides.
        connection: number of the connection on which its newest turn was stored; 0 if the next
            turn needs the script.
    """

    key: TrajectoryKey
    trajectory_id: str
    end: PendingWrite | None = None
    epoch: int = 0
    is_placed: bool = False
    pending: deque[PendingTurn] = field(default_factory=deque)
    num_acknowledged: int = 0
    acknowledged_bytes: int = 0
    seal: SealMaker | None = None
    seal_record: bytes = b""
    awaits_reward: bool = False
    merged_tokens: int = 0
    abandon_reason: str | None = None
    num_bytes: int = 0
    reserved_bytes: int = FIRST_BYTES
    error: TurnstreamError | None = None
    has_ended: bool = False
    earlier_epoch: int = 0
    is_doubted: bool = False
    connection: int = 0

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

    def resend(self, turns: Sequence[TurnRecord]) -> None:
        """Queue these, its last acknowledged turns, before those that wait."""
        self.reserved_bytes = FIRST_BYTES
        self.pending.extendleft([PendingTurn(turn, None, True) for turn in reversed(turns)])
        self.num_acknowledged -= len(turns)
        self.acknowledged_bytes -= sum([len(turn.record) for turn in turns])

    def next_payload(self, run: str, writer: str, *, connection: int) -> AppendTurns:
        """Return the request that stores the next turns, at least one, and its seal after all.

        The first writer appends one later turn without the script, if the script has answered on
        this connection: so neither the epoch nor the store can have changed unnoticed.
        """
        records: list[bytes] = []
        num_bytes = 0
        for turn, _, _ in self.pending:
            num_bytes += len(turn.record)
            if records and (num_bytes > MAX_ROUND_BYTES or len(records) == MAX_ROUND_TURNS):
                break
            records.append(turn.record)
        is_sealed = self.seal is not None and len(records) == len(self.pending)
        if is_sealed and self.seal is not None:
            self.seal_record = self.seal(self.epoch)
            records.append(self.seal_record)
        return AppendTurns(
            run,
            writer,
            self.trajectory_id,
            self.epoch,
            is_placed=self.is_placed,
            first=self.num_acknowledged,
            records=records,
            is_sealed=is_sealed,
            bytes_before=self.acknowledged_bytes,
            is_direct=self.seal is None
            and len(self.pending) == 1
            and self.epoch == 1
            and self.connection == connection
            and self.num_bytes <= MAX_DIRECT_BYTES,
        )

    @property
    def posted_seal(self) -> PostedSeal:
        """Return its stored seal as the run gets it."""
        return PostedSeal(
            self.trajectory_id,
            self.epoch,
            self.awaits_reward,
            self.num_bytes + len(self.seal_record),
            self.seal_record,
        )


@dataclass(slots=True, eq=False)
class Admission:
    """A group that requests admission, or further samples of an open group.

    Attributes:
        since_s: time of the first refusal for lack of capacity; None before.
        prompt_number: number of the prompt of a task; 0 for another group.
        is_again: it was open before a restart of the store.
    """

    group: GroupOpened
    queues: Sequence[TrajectoryQueue]
    opened: PendingWrite
    since_s: float | None = None
    reason: str = ""
    prompt_number: int = 0
    is_again: bool = False


class SendQueues:
    """Everything that is not in flight.

    Attributes:
        payload: open trajectories with something to send, in order.
        abandons: trajectories to abandon, all their turns acknowledged.
        seals: trajectories whose payload is acknowledged and whose seal is not posted.
        of_run: calls that no other call waits for; the id of their run may be found later.
    """

    def __init__(self) -> None:
        self.payload: OrderedDict[TrajectoryQueue, None] = OrderedDict()
        self.abandons: deque[TrajectoryQueue] = deque()
        self.seals: deque[TrajectoryQueue] = deque()
        self.admissions: deque[Admission] = deque()
        self.waiting: deque[Admission] = deque()
        self.of_run: deque[Call] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self.waiting or self.has_calls)

    @property
    def has_calls(self) -> bool:
        """Whether the next round has calls."""
        return any((self.abandons, self.seals, self.admissions, self.of_run, self.payload))

    def add_payload(self, queue: TrajectoryQueue) -> None:
        """Queue a trajectory that has something to send, once it is open."""
        if queue.epoch:
            self.payload[queue] = None

    def put_back_payload(self, queue: TrajectoryQueue) -> None:
        """Queue a trajectory again, before all others."""
        self.payload[queue] = None
        self.payload.move_to_end(queue, last=False)

    def take_payload(self) -> TrajectoryQueue | None:
        """Remove and return the next trajectory with something to send; None if there is none."""
        while self.payload:
            queue, _ = self.payload.popitem(last=False)
            if queue.error is None:  # else a call would create its payload stream again
                return queue
        return None

    def take_seals(self) -> list[TrajectoryQueue]:
        """Remove and return the trajectories whose seals the next round posts."""
        queues: list[TrajectoryQueue] = []
        num_bytes = 0
        while self.seals and len(queues) < _MAX_SEALS:
            num_bytes += len(self.seals[0].seal_record)
            if queues and num_bytes > _MAX_SEAL_BYTES:
                break
            queues.append(self.seals.popleft())
        return queues

    def withdraw(self, queues: Collection[TrajectoryQueue]) -> None:
        """Remove these trajectories from all queues."""
        for queue in queues:
            self.payload.pop(queue, None)
        for waiting in (self.seals, self.abandons):
            staying = [queue for queue in drained(waiting) if queue not in queues]
            waiting.extend(staying)

    def withdraw_admission(self, admission: Admission) -> None:
        """Remove the request of this group."""
        for queue in (self.admissions, self.waiting):
            if admission in queue:
                queue.remove(admission)

    def clear(self) -> None:
        """Remove all calls."""
        self.payload.clear()
        for queue in (self.abandons, self.seals, self.admissions, self.waiting, self.of_run):
            queue.clear()


def drained(queue: deque[_T]) -> list[_T]:
    """Remove and return all members of a queue."""
    members = list(queue)
    queue.clear()
    return members
