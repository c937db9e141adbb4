"""A trajectory being written, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

from turnstream.generator.api.trajectory_core import TrajectoryWriterBase, reason_of
from turnstream.generator.encode.checks import checked_turn
from turnstream.generator.encode.extras import with_checked_extras
from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.outbox.receipts import AsyncReceipt, Receipt
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.generator.transport.async_sender import AsyncSender
from turnstream.generator.transport.sender import Sender
from turnstream.types import Anchor, GroupOpened, Status, TrajectoryKey, VersionRun


class TrajectoryWriter(TrajectoryWriterBase[Sender]):
    """A trajectory being written; a context manager. Made by `Publisher` and `GroupWriter`.

    Leaving it by an exception, or without `seal`, abandons the trajectory. Several threads may
    append: the turns are numbered here.
    """

    def __init__(
        self,
        sender: Sender,
        outbox: Outbox,
        group: GroupOpened,
        key: TrajectoryKey,
        lane: Lane | None,
    ) -> None:
        super().__init__(sender, outbox, group, key, lane)
        self._order = threading.Lock()

    def __enter__(self) -> Self:
        with self._order:
            self._opened_lane()
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
        rewards: Any = None,
        policy_version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        anchor: Anchor | None = None,
        allow_empty: bool = False,
    ) -> Receipt:
        """Send one turn, and return before the store has answered.

        Args:
            prompt_ids: every token that the model saw, those of earlier turns included. Tokens of
                earlier turns are recognised and not sent again.
            response_ids: the sampled tokens.
            logprobs: one per response token, in nats, under the sampling policy.
            loss_mask: one per response token, 1 where it is trained; None trains all.
            rewards: one per response token; None for none.
            policy_version: the version of the weights that sampled the response.
            version_runs: (version, num_tokens) of each part, if several versions sampled it.
            extras: values of the declared extra columns by column, each for the whole turn as
                `prompt_ids` is: see `turnstream.types.extras`.
            anchor: the state of the environment when the turn began, for `estimator="gigpo"`: a
                text or bytes that are equal for equal states, or a hash of 64 bits.
            allow_empty: accept a response without tokens.

        Raises:
            InvalidTurnError: names field, value and position; nothing was accepted.
            RejectedError: the trajectory has ended.
            TurnstreamError: the error of an earlier write of this trajectory.
        """
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            rewards=rewards,
            policy_version=policy_version,
            version_runs=version_runs,
            anchor=anchor,
            allow_empty=allow_empty,
        )
        turn = with_checked_extras(turn, extras, self._sender.learn_columns())
        receipt = self._sender.receipt()
        with self._order:
            lane = self._opened_lane()
            # Wait for capacity first: a turn in the draft must be sent.
            self._sender.wait_until(self._has_capacity(turn), timeout_s=self._outbox.timeout_s)
            made = self._drafted.add(turn)
            self._sender.put(lambda: self._outbox.append(lane, made, receipt))
        return receipt

    def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str = Status.COMPLETED,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
    ) -> None:
        """End the trajectory and wait until the run has recorded it.

        Args:
            reward: outcome of the whole episode; None if the turns or the components carry it.
            reward_components: named rewards.
            status: how the episode ended.
            sampling: parameters such as temperature.
            tags: labels, at most 64; each batch counts the trajectories of every value.
            metrics: finite numbers, at most 64; each batch has their means and extremes.
            awaits_reward: the reward, or some of its components, will be posted by `post_reward`,
                by any process. The group waits for it.

        Raises:
            InvalidTurnError: a value is wrong, or there is no turn; the trajectory is still open.
            TurnstreamError: the error of a write of this trajectory.
        """
        end = self._sender.receipt()
        with self._order:
            lane = self._opened_lane()
            seal = self._drafted.seal(
                reward=reward,
                reward_components=reward_components,
                status=status,
                sampling=sampling,
                tags=tags,
                metrics=metrics,
                awaits_reward=awaits_reward,
            )
            self._put_seal(lane, seal, end, awaits_reward=awaits_reward)
        end.result()

    def abandon(self, reason: str) -> Receipt:
        """Give the trajectory up: none of it is trained. Returns before the store has answered.

        Raises:
            RejectedError: the trajectory has ended.
        """
        with self._order:
            return self._abandon(reason)

    def _opened_lane(self) -> Lane:
        self._require_open()
        if self._lane is not None:
            return self._lane
        opened = self._sender.receipt()
        lane = self._request_admission(opened)
        try:
            opened.result()
        except BaseException as error:
            self._abandon(reason_of(error))
            raise
        return lane

    def _abandon(self, reason: str) -> Receipt:
        end = self._sender.receipt()
        self._put_abandon(reason, end)
        return end


class AsyncTrajectoryWriter(TrajectoryWriterBase[AsyncSender]):
    """A trajectory being written; made by `AsyncPublisher` and `AsyncGroupWriter`.

    Leaving it by an exception, or without `seal`, abandons the trajectory. Several tasks may
    append: the turns are numbered here.
    """

    def __init__(
        self,
        sender: AsyncSender,
        outbox: Outbox,
        group: GroupOpened,
        key: TrajectoryKey,
        lane: Lane | None,
    ) -> None:
        super().__init__(sender, outbox, group, key, lane)
        self._order = asyncio.Lock()

    async def __aenter__(self) -> Self:
        async with self._order:
            await self._opened_lane()
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
        rewards: Any = None,
        policy_version: int | None = None,
        version_runs: Sequence[VersionRun] = (),
        extras: Mapping[str, Any] | None = None,
        anchor: Anchor | None = None,
        allow_empty: bool = False,
    ) -> AsyncReceipt:
        """Send one turn; return before the store has answered. See `TrajectoryWriter.append`."""
        turn = checked_turn(
            prompt_ids,
            response_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            rewards=rewards,
            policy_version=policy_version,
            version_runs=version_runs,
            anchor=anchor,
            allow_empty=allow_empty,
        )
        turn = with_checked_extras(turn, extras, await self._sender.learn_columns())
        receipt = self._sender.receipt()
        async with self._order:
            lane = await self._opened_lane()
            # Wait for capacity first: a turn in the draft must be sent.
            await self._sender.wait_until(
                self._has_capacity(turn), timeout_s=self._outbox.timeout_s
            )
            self._require_open()  # `abandon` does not wait for its turn
            self._sender.require_open()
            made = self._drafted.add(turn)
            self._sender.put(lambda: self._outbox.append(lane, made, receipt))
        return receipt

    async def seal(
        self,
        reward: float | None = None,
        *,
        reward_components: Mapping[str, float] | None = None,
        status: Status | str = Status.COMPLETED,
        sampling: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        awaits_reward: bool = False,
    ) -> None:
        """End the trajectory and wait until the run knows of it. See `TrajectoryWriter.seal`."""
        end = self._sender.receipt()
        async with self._order:
            lane = await self._opened_lane()
            seal = self._drafted.seal(
                reward=reward,
                reward_components=reward_components,
                status=status,
                sampling=sampling,
                tags=tags,
                metrics=metrics,
                awaits_reward=awaits_reward,
            )
            self._put_seal(lane, seal, end, awaits_reward=awaits_reward)
        await end

    def abandon(self, reason: str) -> AsyncReceipt:
        """Give the trajectory up: none of it is trained. Returns before the store has answered.

        Raises:
            RejectedError: the trajectory has ended.
        """
        end = self._sender.receipt()
        self._put_abandon(reason, end)
        return end

    async def _opened_lane(self) -> Lane:
        self._require_open()
        if self._lane is not None:
            return self._lane
        opened = self._sender.receipt()
        lane = self._request_admission(opened)
        try:
            await opened
        except BaseException as error:
            self.abandon(reason_of(error))
            raise
        self._require_open()  # `abandon` does not wait for its turn
        return lane
