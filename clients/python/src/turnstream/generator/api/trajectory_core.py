"""The rules of trajectory writers, without the waiting."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from turnstream.errors import InvalidTurnError, RejectedError
from turnstream.generator.api.adoption import AdoptedTurn
from turnstream.generator.encode.checks import check_key
from turnstream.generator.encode.encoder import SealMaker, TrajectoryDraft
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types import GroupOpened, TrajectoryKey, Turn
from turnstream.types.names import shown

_logger = logging.getLogger(__name__)

NOT_STARTED: Final = "never started"


_MAX_REASON_LENGTH = 200  # a ledger keeps it for every trajectory

_Result = TypeVar("_Result")
_Receipt = TypeVar("_Receipt", bound=Delivery)
_Receipt_co = TypeVar("_Receipt_co", bound=Delivery, covariant=True)


class Carrier(Protocol[_Receipt_co]):
    """Sends an outbox to the store, with a thread or with a task."""

    def put(self, write: Callable[[], _Result]) -> _Result:
        """Do something to the outbox, and send what comes of it."""
        ...

    def receipt(
        self, num_parts: int = 1, *, unread_failures: list[Delivery] | None = None
    ) -> _Receipt_co:
        """A receipt that can be waited for."""
        ...

    def require_open(self) -> None:
        """Refuse writes after `close`."""
        ...


_Carrier = TypeVar("_Carrier", bound=Carrier[Any])


class TrajectoryWriterBase(ABC, Generic[_Carrier]):
    """The rules of both kinds of trajectory writers.

    Args:
        sender: sender of the publisher.
        outbox: outbox of the publisher.
        group: group of the trajectory, which the first use opens if no lane is given.
        key: name of the trajectory.
        lane: lane of a trajectory that is open; None requests admission at the first use.
    """

    def __init__(
        self,
        sender: _Carrier,
        outbox: Outbox,
        group: GroupOpened,
        key: TrajectoryKey,
        lane: Lane | None,
    ) -> None:
        check_key(key, num_samples=group.num_samples)
        self._sender = sender
        self._outbox = outbox
        self._group = group
        self._key = TrajectoryKey(key.group_id, int(key.sample), int(key.attempt))
        self._lane = lane
        self._draft: TrajectoryDraft | None = None
        self._turns: tuple[Turn, ...] = ()
        self._has_ended = False

    @property
    def key(self) -> TrajectoryKey:
        """The name of the trajectory in its run."""
        return self._key

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that were stored when it was adopted, whole; empty if it was not."""
        return self._turns

    @property
    def has_ended(self) -> bool:
        """Whether it was sealed or abandoned."""
        return self._has_ended

    @abstractmethod
    def abandon(self, reason: str) -> Delivery:
        """End the trajectory untrained."""

    @property
    def _drafted(self) -> TrajectoryDraft:
        """The turns so far; made when the columns of the run are known."""
        if self._draft is None:
            columns = self._outbox.extra_columns or ()
            self._draft = TrajectoryDraft(self._key, extra_columns=columns)
        return self._draft

    def _abandon_unsealed(self, error: BaseException | None) -> None:
        """Abandon the trajectory at the end of its block, if it is not sealed."""
        if not self._has_ended:
            self.abandon(reason_of(error))
            if error is None:
                warn_unsealed(self._key.group_id, [self._key.sample])

    def _require_open(self) -> None:
        """Refuse writes to a trajectory that was sealed or abandoned here."""
        if self._has_ended:
            raise RejectedError(f"trajectory {self._key} is sealed or abandoned")

    def _request_admission(self, opened: Delivery) -> Lane:
        """Ask for the admission of the trajectory; the store's answer settles `opened`."""
        key, group = self._key, self._group
        self._lane = self._sender.put(lambda: self._outbox.admit(group, [key], opened=opened)[0])
        return self._lane

    def _has_capacity(self, turn: Turn) -> Callable[[], bool]:
        """Return a test for capacity for this turn; its encoded size may be smaller."""
        num_tokens = len(turn.prompt_ids) + 2 * len(turn.response_ids)
        num_bytes = 4 * num_tokens + sum([values.nbytes for values in turn.extras.values()])
        return lambda: self._outbox.inflight.has_capacity_for_turn(num_bytes)

    def _put_seal(self, lane: Lane, seal: SealMaker, end: Delivery, *, awaits_reward: bool) -> None:
        """Put the seal after the last turn; the store's answer settles `end`."""
        merged_tokens = self._drafted.merged_tokens
        self._sender.put(
            lambda: self._outbox.seal(
                lane, seal, merged_tokens=merged_tokens, end=end, awaits_reward=awaits_reward
            )
        )
        self._has_ended = True

    def _put_abandon(self, reason: str, end: Delivery) -> None:
        """Abandon the trajectory after its last turn, if it was opened."""
        if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurnError("reason", f"{shown(reason)} is not a text")
        self._require_open()
        lane = self._lane
        if lane is None:
            self._sender.require_open()
            end.settle(self._key)
        else:
            # It may quote anything; invalid Unicode could not be sent.
            text = reason[:_MAX_REASON_LENGTH].encode(errors="replace").decode()
            self._sender.put(lambda: self._outbox.abandon(lane, text, end=end))
        self._has_ended = True


def restore_turns(writer: TrajectoryWriterBase[Any], turns: Sequence[AdoptedTurn]) -> None:
    """Let a writer continue after the turns that an earlier writer stored."""
    for stored, turn in turns:
        writer._drafted.restore(turn, stored)
    writer._turns = tuple(each.turn for each in turns)


def warn_unsealed(group_id: str, samples: Sequence[int]) -> None:
    """Log that samples were abandoned because their block was left without a seal."""
    _logger.warning(
        "group %s: sample %s left without a seal, so it is abandoned and not trained: call "
        "seal(reward=...) before the block ends",
        *(group_id, ", ".join(map(str, samples))),
    )


def reason_of(error: BaseException | None) -> str:
    """Return why a with block was left, for the ledger."""
    if error is None:
        return UNSEALED
    return f"{type(error).__name__}: {error}"
