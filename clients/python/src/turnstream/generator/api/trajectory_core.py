"""Both kinds of trajectory writers: the turns of a draft, and their order."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from turnstream.errors import InvalidTurnError, RejectedError
from turnstream.generator.encode.checks import with_checked_extras
from turnstream.generator.encode.encoder import AdoptedTurn, TrajectoryDraft
from turnstream.generator.encode.group_checks import checked_key
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import PendingWrite
from turnstream.generator.outbox.writes import TrajectoryQueue
from turnstream.generator.transport.sender import Sender
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types import GroupOpened, Status, TrajectoryKey, Turn
from turnstream.types.names import few_of, quoted

_MAX_REASON_LENGTH: Final = 200  # a ledger keeps it for every trajectory

_logger = logging.getLogger(__name__)

_Receipt = TypeVar("_Receipt", bound=PendingWrite)
_Sender = TypeVar("_Sender", bound=Sender[Any])


class TrajectoryWriterBase(Generic[_Sender, _Receipt]):
    """The one implementation of both kinds of trajectory writers.

    Without the `queue` of an open trajectory, the first use opens the group and waits for
    admission. An adopted trajectory continues after the `stored` turns.
    """

    def __init__(
        self,
        sender: _Sender,
        outbox: Outbox,
        group: GroupOpened,
        key: TrajectoryKey,
        queue: TrajectoryQueue | None = None,
        stored: Sequence[AdoptedTurn] = (),
    ) -> None:
        self._sender = sender
        self._outbox = outbox
        self._group = group
        self._key = checked_key(key, num_samples=group.num_samples)
        self._queue = queue
        self._draft: TrajectoryDraft | None = None
        self._turns = tuple(each.turn for each in stored)
        self._has_ended = False
        self._status = Status.COMPLETED  # of the last turn
        self._receipts: dict[str, _Receipt] = {}  # of the turns with these call ids
        self._order = asyncio.Lock()  # orders the writes that wait
        self._numbering = threading.Lock()  # guards the draft
        for each in stored:
            self._drafted.restore(each.turn, each.stored)

    @property
    def key(self) -> TrajectoryKey:
        """The name of the trajectory in its run."""
        return self._key

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that were stored when it was adopted, whole; empty if it was not."""
        return self._turns

    @property
    def call_ids(self) -> Mapping[str, int]:
        """The indexes of the turns that have ids of model calls, by id; also of stored turns."""
        return {} if self._draft is None else self._draft.call_ids

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned."""
        return self._has_ended

    def abandon(self, reason: str) -> _Receipt:
        """Abandon the trajectory: none of it is trained. Returns before the store has answered.

        Raises:
            RejectedError: the trajectory has ended.
        """
        if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurnError("reason", f"{quoted(reason)} is not a text")
        self._require_open()
        end: _Receipt = self._sender.receipt()
        queue = self._queue
        if queue is None:
            self._sender.require_open()
            end.settle(self._key)
        else:
            # It may quote anything; invalid Unicode could not be sent.
            text = reason[:_MAX_REASON_LENGTH].encode(errors="replace").decode()
            self._sender.put(lambda: self._outbox.abandon(queue, text, end=end))
        self._has_ended = True
        return end

    @property
    def _drafted(self) -> TrajectoryDraft:
        """The turns so far; made when the columns of the run are known."""
        if self._draft is None:
            columns = self._outbox.run_calls.extra_columns or ()
            self._draft = TrajectoryDraft(self._key, extra_columns=columns)
        return self._draft

    async def _open(self) -> TrajectoryQueue:
        """Return the trajectory of the trajectory, which is open; the caller holds `_order`."""
        self._require_open()
        if self._queue is not None:
            return self._queue
        key, group, opened = self._key, self._group, self._sender.loop_receipt()
        admissions = self._outbox.admissions
        queue = self._sender.put(lambda: admissions.request(group, [key], opened=opened)[0])
        self._queue = queue
        try:
            await opened
        except BaseException as error:
            self.abandon(reason_of(error))
            raise
        self._require_open()  # `abandon` does not wait for its turn
        return queue

    async def _enter(self) -> None:
        self._sender.check_caller()
        async with self._order:
            await self._open()

    async def _append(
        self, turn: Turn, extras: Mapping[str, Any] | None, receipt: _Receipt
    ) -> _Receipt:
        """Append a turn; return its receipt, of an earlier one if it has the same call id."""
        turn = with_checked_extras(turn, extras, await self._sender.learn_columns())
        async with self._order:
            queue = await self._open()
            if (earlier := self._receipt_of(turn)) is not None:
                return earlier
            # Wait for capacity first: a turn in the draft must be sent.
            await self._sender.wait_for_capacity(
                self._has_capacity(turn), timeout_s=self._outbox.timeout_s
            )
            with self._numbering:
                self._put_turn(queue, turn, receipt)
        return receipt

    def _append_at_once(
        self, turn: Turn, extras: Mapping[str, Any] | None, receipt: _Receipt
    ) -> _Receipt | None:
        """Append a turn as `_append` does; return None if something has to be waited for."""
        columns = self._outbox.run_calls.extra_columns
        if columns is None or self._queue is None:
            return None
        turn = with_checked_extras(turn, extras, columns)
        has_capacity = self._outbox.inflight.has_capacity_for_turn
        with self._numbering:
            if self._order.locked() or not has_capacity(_size_of(turn)):
                return None
            self._require_open()
            if (earlier := self._receipt_of(turn)) is not None:
                return earlier
            self._put_turn(self._queue, turn, receipt)
        return receipt

    def _receipt_of(self, turn: Turn) -> _Receipt | None:
        """Return the receipt of the turn of the same call; None if there is none.

        ConflictError if that turn has another prompt or response.
        """
        if turn.call_id is None or not self._drafted.is_repeated(turn):
            return None
        receipt = self._receipts.get(turn.call_id)
        if receipt is None:  # it was stored when the trajectory was adopted
            receipt = self._sender.receipt()
            receipt.settle(self._key)
        return receipt

    def _has_capacity(self, turn: Turn) -> Callable[[], bool]:
        return lambda: self._outbox.inflight.has_capacity_for_turn(_size_of(turn))

    def _put_turn(
        self, queue: TrajectoryQueue, turn: Turn, receipt: _Receipt, *, is_last: bool = False
    ) -> None:
        self._require_open()
        self._sender.require_open()
        made = (self._drafted.add_last if is_last else self._drafted.add)(turn)
        if turn.call_id is not None:
            self._receipts[turn.call_id] = receipt
        self._sender.put(lambda: self._outbox.append(queue, made, receipt))

    async def _seal(self, *, status: Status | str | None, **fields: Any) -> None:
        self._sender.check_caller()
        end = self._sender.loop_receipt()
        async with self._order:
            queue = await self._open()
            with self._numbering:
                status = self._status if status is None else status
                seal = self._drafted.seal(status=status, **fields)
                self._sender.put(lambda: self._outbox.seal(queue, seal, end=end))
                self._has_ended = True
        await end

    def _abandon_unsealed(self, error: BaseException | None) -> None:
        if not self._has_ended and self._sender.process.is_here:
            self.abandon(reason_of(error))
            if error is None:
                warn_unsealed(self._key.group_id, [self._key.sample])

    def _require_open(self) -> None:
        if self._has_ended:
            raise RejectedError(f"trajectory {self._key} is sealed or abandoned")


def _size_of(turn: Turn) -> int:
    """Return the bytes of a turn; its encoded size may be smaller."""
    num_bytes = 4 * (len(turn.prompt_ids) + 2 * len(turn.response_ids))
    return num_bytes + sum([values.nbytes for values in turn.extras.values()])


def warn_unsealed(group_id: str, samples: Sequence[int]) -> None:
    """Log that samples were abandoned because their block was left without a seal."""
    _logger.warning(
        "group %s: sample %s left without a seal, so it is abandoned and not trained: call "
        "seal(reward=...) before the block ends",
        *(group_id, few_of(samples)),
    )


def reason_of(error: BaseException | None) -> str:
    """Return why a with block was left, for the ledger."""
    if error is None:
        return UNSEALED
    return f"{type(error).__name__}: {error}"
