"""A trajectory being written, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeVar

from turnstream.errors import InvalidTurnError, RejectedError
from turnstream.generator.encode.checks import checked_turn, with_checked_extras
from turnstream.generator.encode.encoder import AdoptedTurn, TrajectoryDraft
from turnstream.generator.encode.group_checks import checked_key, checked_status
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import AsyncReceipt, PendingWrite, Receipt
from turnstream.generator.outbox.writes import TrajectoryQueue
from turnstream.generator.transport.sender import Sender
from turnstream.generator.transport.thread_sender import ThreadSender
from turnstream.store.waits.wait_reasons import UNSEALED
from turnstream.types import Anchor, GroupOpened, Status, TrajectoryKey, Turn, VersionRun
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
        self, turn: Turn, extras: Mapping[str, Any] | None, receipt: PendingWrite
    ) -> None:
        turn = with_checked_extras(turn, extras, await self._sender.learn_columns())
        async with self._order:
            queue = await self._open()
            # Wait for capacity first: a turn in the draft must be sent.
            await self._sender.wait_for_capacity(
                self._has_capacity(turn), timeout_s=self._outbox.timeout_s
            )
            with self._numbering:
                self._put_turn(queue, turn, receipt)

    def _append_at_once(
        self, turn: Turn, extras: Mapping[str, Any] | None, receipt: PendingWrite
    ) -> bool:
        """Append a turn if nothing has to be waited for; return whether it was appended."""
        columns = self._outbox.run_calls.extra_columns
        if columns is None or self._queue is None:
            return False
        turn = with_checked_extras(turn, extras, columns)
        has_capacity = self._outbox.inflight.has_capacity_for_turn
        with self._numbering:
            is_waiting = self._order.locked() or not has_capacity(_size_of(turn))
            if not is_waiting:
                self._put_turn(self._queue, turn, receipt)
        return not is_waiting

    def _has_capacity(self, turn: Turn) -> Callable[[], bool]:
        return lambda: self._outbox.inflight.has_capacity_for_turn(_size_of(turn))

    def _put_turn(self, queue: TrajectoryQueue, turn: Turn, receipt: PendingWrite) -> None:
        self._require_open()
        self._sender.require_open()
        made = self._drafted.add(turn)
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


class TrajectoryWriter(TrajectoryWriterBase[ThreadSender, Receipt]):
    """A trajectory being written; a context manager. Made by `Publisher` and `GroupWriter`.

    Leaving it by an exception, or without `seal`, abandons the trajectory. Several threads may
    append: the turns are numbered here.
    """

    def __enter__(self) -> Self:
        self._sender.run(self._enter())
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)

    def append(
        self,
        prompt_ids: Any,
        response_ids: Any,
        *,
        logprobs: Any = None,
        loss_mask: Any = None,
        token_weights: Any = None,
        rewards: Any = None,
        reward: float | None = None,
        policy_version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        anchor: Anchor | None = None,
        allow_empty: bool = False,
        status: Status | str = Status.COMPLETED,
    ) -> Receipt:
        """Send one turn, and return before the store has answered.

        Args:
            prompt_ids: every token that the model saw, those of earlier turns included. Tokens of
                earlier turns are recognised and not sent again.
            response_ids: the sampled tokens.
            logprobs: one per response token, in nats, under the sampling policy.
            loss_mask: one per response token, 1 where it is trained; None trains all. Numbers
                between 0 and 1 are `token_weights`, and train every token above 0.
            token_weights: one per response token, at least 0: the factor of the token's loss; None
                weighs all with 1. The denominators count a trained token once, whatever its weight.
            rewards: one per response token; None for none.
            reward: one of the whole turn in place of `rewards`, for its last response token. A run
                reads it with `reward_source="sum_of_turns"` or `"last_turn"`.
            policy_version: the version of the weights that sampled the response.
            version_runs: (version, num_tokens) of each part, if several versions sampled it.
            extras: values of the declared extra columns by column, each for the whole turn as
                `prompt_ids` is: see `turnstream.types.extras`.
            anchor: the state of the environment when the turn began, for `estimator="gigpo"`: a
                text or bytes that are equal for equal states, or a hash of 64 bits.
            allow_empty: accept a response without tokens.
            status: how the response ended; `seal` takes that of the last turn.

        Raises:
            InvalidTurnError: names field, value and position; nothing was accepted. Also for a turn
                with more than 8 MB of new tokens and columns.
            RejectedError: the trajectory has ended.
            TurnstreamError: the error of an earlier write of this trajectory.
        """
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            token_weights=token_weights,
            rewards=rewards,
            reward=reward,
            policy_version=policy_version,
            version_runs=version_runs,
            anchor=anchor,
            allow_empty=allow_empty,
        )
        status = checked_status(status)
        receipt = self._sender.receipt()
        if not self._append_at_once(turn, extras, receipt):
            self._sender.run(self._append(turn, extras, receipt))
        self._status = status
        return receipt

    def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str | None = None,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
    ) -> None:
        """End the trajectory and wait until the run has recorded it.

        Args:
            reward: outcome of the whole episode; None if the turns or the components carry it.
            reward_components: named rewards.
            status: how the episode ended; None takes the status of the last turn. A run excludes
                "error" by default, see `BatchingConfig.error_trajectories`. A failed start, with
                the status "error", needs no turn. It is never trained.
            sampling: parameters such as temperature.
            tags: labels, at most 64; each batch counts the trajectories of every value.
            metrics: finite numbers, at most 64; each batch has their means and extremes.
            awaits_reward: the reward, or some of its components, will be posted by `post_reward`,
                by any process. The group waits for it.

        Raises:
            InvalidTurnError: a value is wrong, or the turn is missing; the trajectory is still
                open.
            TurnstreamError: the error of a write of this trajectory.
        """
        self._sender.run(
            self._seal(
                reward=reward,
                reward_components=reward_components,
                status=status,
                sampling=sampling,
                tags=tags,
                metrics=metrics,
                awaits_reward=awaits_reward,
            )
        )


class AsyncTrajectoryWriter(TrajectoryWriterBase[Sender[AsyncReceipt], AsyncReceipt]):
    """The same as `TrajectoryWriter`, made by `AsyncPublisher` and `AsyncGroupWriter`."""

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._abandon_unsealed(error)

    async def append(
        self,
        prompt_ids: Any,
        response_ids: Any,
        *,
        logprobs: Any = None,
        loss_mask: Any = None,
        token_weights: Any = None,
        rewards: Any = None,
        reward: float | None = None,
        policy_version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        anchor: Anchor | None = None,
        allow_empty: bool = False,
        status: Status | str = Status.COMPLETED,
    ) -> AsyncReceipt:
        """Send one turn; return before the store has answered. See `TrajectoryWriter.append`."""
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            token_weights=token_weights,
            rewards=rewards,
            reward=reward,
            policy_version=policy_version,
            version_runs=version_runs,
            anchor=anchor,
            allow_empty=allow_empty,
        )
        status = checked_status(status)
        receipt = self._sender.receipt()
        await self._append(turn, extras, receipt)
        self._status = status
        return receipt

    async def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str | None = None,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
    ) -> None:
        """End the trajectory and wait until the run has it. See `TrajectoryWriter.seal`."""
        await self._seal(
            reward=reward,
            reward_components=reward_components,
            status=status,
            sampling=sampling,
            tags=tags,
            metrics=metrics,
            awaits_reward=awaits_reward,
        )


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
